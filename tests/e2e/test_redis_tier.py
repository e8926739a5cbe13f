"""Two real SGLang servers that share nothing but Redis: what one computed, the other restores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from hicache_ext.testing.client import Generation
from hicache_ext.testing.server import SglangServer
from tests.e2e.conftest import THIRD_PROMPT, restored_by
from tests.rigs.redis_servers import RedisCluster, RedisServer, redis_program

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PAGE_SIZE = 16
PROMPT = THIRD_PROMPT
REUSABLE = len(PROMPT) - PAGE_SIZE


@pytest.fixture(scope="module", autouse=True)
def _needs_redis() -> None:
    if redis_program() is None:
        pytest.skip("missing: redis-server")


@pytest.fixture(scope="module")
def cold(cold_answer: Callable[[Sequence[int]], Generation]) -> Generation:
    return cold_answer(PROMPT)


@pytest.fixture(params=["single", "cluster"])
def pool(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RedisServer | RedisCluster]:
    with RedisServer(tmp_path / "pool") if request.param == "single" else RedisCluster(tmp_path / "pool") as pool:
        yield pool


def redis_tier_config(url: str | list[str], **settings: Any) -> dict[str, Any]:
    return {
        "backend_name": "hicache_ext",
        "module_path": "hicache_ext.storage.backend",
        "class_name": "HiCacheExtBackend",
        "interface_v1": 1,
        "hicache_ext": {"tiers": {"pool": {"type": "redis", "url": url, **settings}}},
    }


def test_what_one_server_computed_another_restores(
    tiny_model: Path, tmp_path: Path, cold: Generation, pool: RedisServer | RedisCluster
) -> None:
    # One that is gone refuses at once: the timeout is for a loaded machine.
    config = redis_tier_config(pool.url, timeout="20s")

    def serve(name: str) -> SglangServer:
        return SglangServer(
            tiny_model,
            log_file=tmp_path / f"{name}.log",
            page_size=PAGE_SIZE,
            storage_backend="dynamic",
            extra_config=config,
        )

    with serve("first") as first, serve("second") as second:
        computed = first.generate(PROMPT)
        assert computed.cached_tokens == 0
        assert computed.output_ids == cold.output_ids
        restored_by(second, first, PROMPT, cold, REUSABLE)

        # The pool is lost: requests go on, with the same output and without it.
        pool.stop()
        for server in (first, second):
            server.flush_cache()
            without = server.generate(PROMPT)
            assert without.cached_tokens == 0
            assert without.output_ids == cold.output_ids
        if isinstance(pool, RedisServer):
            # Back, and empty: what the one writes the other reads again, and nobody was restarted.
            pool.start()
            restored_by(second, first, PROMPT, cold, REUSABLE)
    for name in ("first", "second"):
        # SGLang logs tracebacks of its own (its client that has gone); none comes from this package.
        assert "/hicache_ext/storage/" not in (tmp_path / f"{name}.log").read_text()

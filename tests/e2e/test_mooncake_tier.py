"""Two real SGLang servers that share nothing but a Mooncake pool: what one computed the other restores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from hicache_ext.testing.client import Generation
from hicache_ext.testing.server import SglangServer
from tests.e2e.conftest import FIRST_PROMPT, restored_by
from tests.rigs.mooncake_servers import MooncakeServers, missing_mooncake
from tests.rigs.own_network import NetworkUnavailable, own_network

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PAGE_SIZE = 16
PROMPT = FIRST_PROMPT
REUSABLE = len(PROMPT) - PAGE_SIZE


@pytest.fixture
def servers(tmp_path):
    if missing := missing_mooncake():
        pytest.skip(f"missing: {missing}")
    try:
        with own_network(), MooncakeServers(tmp_path / "mooncake", lease_ms=5000) as servers:
            yield servers
    except NetworkUnavailable as error:
        pytest.skip(f"missing: {error}")


def mooncake_tier_config(servers: MooncakeServers, **settings: Any) -> dict[str, Any]:
    tier = {"type": "mooncake", "master": servers.master, "local_hostname": "127.0.0.1", "timeout": "2s", **settings}
    return {
        "backend_name": "hicache_ext",
        "module_path": "hicache_ext.storage.backend",
        "class_name": "HiCacheExtBackend",
        "interface_v1": 1,
        "hicache_ext": {"tiers": {"pool": tier}},
    }


def test_what_one_server_computed_another_restores_and_a_dead_pool_costs_no_answer(
    tiny_model: Path,
    tmp_path: Path,
    servers: MooncakeServers,
    cold_answer: Callable[[Sequence[int]], Generation],
) -> None:
    def serve(name: str, **arguments: Any) -> SglangServer:
        return SglangServer(tiny_model, log_file=tmp_path / f"{name}.log", page_size=PAGE_SIZE, **arguments)

    config = mooncake_tier_config(servers)
    cold = cold_answer(PROMPT)
    with (
        serve("writer", storage_backend="dynamic", extra_config=config) as writer,
        serve("reader", storage_backend="dynamic", extra_config=config) as reader,
    ):
        assert writer.generate(PROMPT).cached_tokens == 0
        restored = restored_by(reader, writer, PROMPT, cold, REUSABLE)
        assert restored.meta_info["cached_tokens_details"]["storage_backend"] == "HiCacheExtBackend"

        servers.kill_master()
        reader.flush_cache()
        without_pool = reader.generate(PROMPT)
        assert without_pool.cached_tokens == 0
        assert without_pool.output_ids == cold.output_ids

        servers.start_master()
        restored_by(reader, writer, PROMPT, cold, REUSABLE)

"""A real disaggregated pair: the decode node writes to the pool, the next turn's prefill reads it, equal answers."""

from __future__ import annotations

import ast
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from hicache_ext.cli.main import main
from hicache_ext.cli.server_commands import read_samples
from hicache_ext.config.model import ExtraConfig
from hicache_ext.errors import ServerError
from hicache_ext.page.hashes import page_hashes
from hicache_ext.sglang.used_names import DECODE_WRITER
from tests.e2e.conftest import file_tier_config
from tests.releases.needs import needs
from tests.rigs.mooncake_servers import MooncakeServers, missing_mooncake
from tests.rigs.network_namespace import NetworkNamespace, missing_for_namespaces
from tests.rigs.pd_pair import PdGeneration, PdPair
from tests.rigs.redis_servers import RedisServer, redis_program
from tests.rigs.server_hooks import rig_environment
from tests.storage.raw_access import stored_keys
from tests.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow, needs(DECODE_WRITER)]

PAGE_SIZE = 16
CONVERSATIONS = int(os.environ.get("HICACHE_EXT_CONVERSATIONS", "24"))
"""At once; ``make conversations`` has more of them."""
PROMPT = [(11 * position * position + 5 * position) % 250 for position in range(640)]


@contextmanager
def directory_pool(directory: Path) -> Iterator[dict[str, Any]]:
    yield {"type": "file", "path": str(directory / "pool"), "capacity": "256MiB", "layout": "pages"}


@contextmanager
def redis_pool(directory: Path) -> Iterator[dict[str, Any]]:
    with RedisServer(directory / "redis") as server:
        yield {"type": "redis", "url": server.url, "timeout": "20s"}


@contextmanager
def mooncake_pool(directory: Path) -> Iterator[dict[str, Any]]:
    with MooncakeServers(directory / "mooncake") as servers:
        yield {"type": "mooncake", "master": servers.master, "local_hostname": "127.0.0.1", "timeout": "2s"}


# A pool more is one line more: what the machine lacks for it, and its servers with its tier. The nodes start with Redis
# and are told to change over.
OTHER_POOLS: dict[str, tuple[Callable[[], str | None], Callable[[Path], AbstractContextManager[dict[str, Any]]]]] = {
    "directory": (lambda: None, directory_pool),
    "mooncake": (missing_mooncake, mooncake_pool),
}


@pytest.fixture(scope="module", autouse=True)
def _namespaces() -> None:
    if missing := missing_for_namespaces():
        pytest.skip(f"missing: {missing}")


@dataclass(frozen=True)
class RunningPair:
    """A pair over Redis, and what its nodes were given; the prefill node has a directory of its own in front."""

    pair: PdPair
    directory: Path
    document: dict[str, Any]

    def change_pool(self, name: str, tier: dict[str, Any]) -> None:
        """Have both running nodes use another pool and nothing else, as ``hicache-ext reload`` does."""
        document = {**self.document, "hicache_ext": {"tiers": {name: tier}}}
        file = as_file(self.directory, document).removeprefix("@")
        assert main(["reload", file]) == 0

    def pages_near_prefill(self) -> int:
        return len(stored_keys(self.directory / "near"))


@pytest.fixture(scope="module")
def running(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningPair]:
    directory = tmp_path_factory.mktemp("pair")
    if redis_program() is None:
        pytest.skip("missing: redis-server")
    with NetworkNamespace() as namespace, pool_in(namespace, redis_pool(directory)) as pool:
        near = {"type": "file", "path": str(directory / "near"), "capacity": "64MiB", "layout": "pages"}
        section = {
            "tiers": {"near": near, "pool": pool},
            "store_locations": ["pool"],
            "promote_to": "near",
            "roles": {"decode": {"retrieve_locations": []}},
            "pd": {"hints": {"enabled": True}},
        }
        # Keys that SGLang takes out on a prefill node and leaves in on a decode node, in a file that it cannot read.
        document = {**ExtraConfig.around(section), "prefetch_threshold": 64, "prefetch_timeout_base": 2}
        config = as_file(directory, document)
        with PdPair(
            tiny_model,
            directory=directory,
            prefill_config=config,
            decode_config=config,
            prefill_arguments=("--enable-metrics",),
            namespace=namespace,
        ) as pair:
            yield RunningPair(pair, directory, document)
    counters = writer_counters(directory / "decode.log")
    assert counters["request.opted_out"] == 1
    assert counters["hint.sent"] > 0
    for log in ("decode.log", "prefill.log"):
        assert not error_lines(directory / log)


def as_file(directory: Path, document: dict[str, Any], name: str = "hicache.yaml") -> str:
    path = directory / name
    path.write_text(yaml.safe_dump(document))
    return f"@{path}"


def writer_counters(log: Path) -> dict[str, int]:
    """The decode writer's last summary."""
    lines = re.findall(r"decode writer: (\{.*\})", log.read_text(errors="replace"))
    assert lines, log.read_text(errors="replace")[-2000:]
    counters = ast.literal_eval(lines[-1])
    assert isinstance(counters, dict)
    return counters


@contextmanager
def pool_in(namespace: NetworkNamespace, pool: AbstractContextManager[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """``pool`` served inside the pair's network: processes inherit that of the thread which starts them."""
    with ExitStack() as stack:
        tier = namespace.run(lambda: stack.enter_context(pool))
        yield tier


def error_lines(log: Path) -> list[str]:
    """What SGLang's scheduler or we complained about; SGLang's launcher has a traceback of its own at some starts."""
    trouble = "scheduler hit an exception|not enough host memory|hicache_ext: .* failed|will not be written|refusing"
    text = re.split(r"fired up and ready|Uvicorn running", log.read_text(errors="replace"))[-1]
    return [line for line in text.splitlines() if re.search(trouble, line, re.IGNORECASE)]


def hits_from(pair: PdPair, tier: str) -> float:
    """Pages that the prefill node has had from a tier; exported once a second."""
    return read_samples(pair.prefill.get("/metrics")).total("hicache_ext_chain_pages_total", tier=tier, reason="used")


def restored(pair: PdPair, prompt: list[int], expected: int, **body: Any) -> PdGeneration:
    """The first answer whose prompt comes from storage as far as expected: writing takes its moment.

    An attempt that came too early computed the rest of the prompt, which the next one may find, too: compare with
    ``expected`` and ``whole_pages(prompt)``.
    """
    deadline = time.monotonic() + 90
    while True:
        pair.prefill.flush_cache()
        answer = pair.generate(prompt, 16, **body)
        if answer.cached.storage >= expected or time.monotonic() > deadline:
            return answer
        time.sleep(0.2)


def whole_pages(prompt: list[int]) -> int:
    """Tokens of a prompt that storage could have at most."""
    return len(prompt) // 16 * 16


def test_the_second_turn_restores_what_the_decode_node_wrote(running: RunningPair) -> None:
    pair = running.pair
    first = pair.generate(PROMPT, 80)
    assert (first.cached_tokens, len(first.output_ids)) == (0, 80)
    next_turn = [*PROMPT, *first.output_ids, *range(24)]

    # The decode node has said what is in the pool: before anybody asks, all of it lies in front of the prefill node.
    wait_until(lambda: running.pages_near_prefill() == 44)
    pair.prefill.flush_cache()
    warm = pair.generate(next_turn, 16)
    assert warm.cached.storage == 704
    assert warm.prefill.meta_info["cached_tokens_details"]["storage_backend"] == "HiCacheExtBackend"
    wait_until(lambda: hits_from(pair, "near") == 44)
    assert hits_from(pair, "pool") == 0

    # Another salt is another namespace: nothing of it is stored.
    cold = pair.generate(next_turn, 16, cache_salt="cold")
    assert cold.cached_tokens == 0
    assert warm.output_ids == cold.output_ids

    # In a namespace, too; and by a request that wants none of its KV stored.
    salted = pair.generate(PROMPT, 80, cache_salt="tenant")
    assert salted.output_ids == first.output_ids
    in_namespace = restored(pair, next_turn, 704, cache_salt="tenant")
    assert in_namespace.cached.storage in (704, whole_pages(next_turn))
    assert in_namespace.output_ids == cold.output_ids

    private = {"custom_params": {"hicache_ext": {"store": False}}}
    secret = pair.generate(PROMPT, 80, cache_salt="private", sampling=private)
    assert secret.output_ids == first.output_ids
    pair.generate(PROMPT, 80, cache_salt="later")
    unstored = restored(pair, next_turn, 640, cache_salt="private")
    assert unstored.cached.storage in (640, whole_pages(next_turn))
    assert unstored.output_ids == cold.output_ids


@pytest.mark.parametrize("pool", sorted(OTHER_POOLS))
def test_the_second_turn_is_restored_from_other_pools(running: RunningPair, pool: str, tmp_path: Path) -> None:
    pair, (missing, serve) = running.pair, OTHER_POOLS[pool]
    if lacking := missing():
        pytest.skip(f"missing: {lacking}")
    with pool_in(pair.namespace, serve(tmp_path)) as tier:
        running.change_pool(pool, tier)
        pair.prefill.flush_cache()
        first = pair.generate(PROMPT, 80)
        assert (first.cached_tokens, len(first.output_ids)) == (0, 80)
        next_turn = [*PROMPT, *first.output_ids, *range(24)]
        cold = pair.generate(next_turn, 16, cache_salt="cold")
        assert cold.cached_tokens == 0
        warm = restored(pair, next_turn, 704)
        assert warm.cached.storage in (704, whole_pages(next_turn))
        assert warm.output_ids == cold.output_ids


def test_many_conversations_give_all_host_memory_back_and_leave_no_orphans(tiny_model: Path, tmp_path: Path) -> None:
    """Requests are cut off at random and retracted, host memory holds a fraction of what is generated: nothing leaks,
    every page in the pool can be reached from its conversation's first one, no error lines."""
    document = file_tier_config(tmp_path / "pool", layout="pages")
    config = as_file(tmp_path, document)
    generator = random.Random(6)
    plans = [
        ([generator.randrange(250) for _ in range(generator.randrange(20, 400))], generator.random() < 0.4)
        for _ in range(CONVERSATIONS)
    ]
    answers: dict[int, tuple[int, ...]] = {}

    with PdPair(
        tiny_model,
        directory=tmp_path,
        prefill_config=config,
        decode_config=config,
        decode_arguments=("--hicache-ratio", "0.05"),
        decode_environment=rig_environment(
            {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "40"}, ["tests.rigs.quick_pd"]
        ),
    ) as pair:
        # What would be answered without an abort, in a namespace of its own.
        whole = [pair.generate(prompt, 120, cache_salt="whole").output_ids for prompt, _ in plans[:3]]

        def talk(number: int) -> None:
            prompt, aborts = plans[number]
            # SGLang aborts every request whose name begins so: none may begin as another one does.
            name = f"conversation-{number:04}"
            if aborts:
                timer = threading.Timer(generator.random(), abort, (name,))
                timer.start()
            try:
                answers[number] = pair.generate(prompt, 120, rid=name).output_ids
            except (ServerError, OSError):
                assert aborts

        def abort(name: str) -> None:
            for server in (pair.prefill, pair.decode):
                server.request("POST", "/abort_request", {"rid": name})

        threads = [threading.Thread(target=talk, args=(number,)) for number in range(len(plans))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [number for number, (_, aborts) in enumerate(plans) if not aborts and number not in answers] == []
        for number in range(3):
            pair.prefill.flush_cache()
            assert pair.generate(plans[number][0], 120).output_ids == whole[number]
        time.sleep(6)  # what waits for a prompt that was never written is given up after the grace
        # Less than a page: one would still wait for its prompt when the servers stop.
        assert pair.generate([1, 2, 3], 4).output_ids
        stored = {key[16:] for key in stored_keys(tmp_path / "pool")}
        conversations = [[*prompt, *answers.get(number, ())] for number, (prompt, _) in enumerate(plans)]
    counters = writer_counters(tmp_path / "decode.log")
    assert counters["host_used_tokens"] == 0
    assert counters["waiting_pages"] == 0
    assert counters["page.stored"] > 0
    assert "Testing retraction" in (tmp_path / "decode.log").read_text(errors="replace")
    for log in ("decode.log", "prefill.log"):
        assert not error_lines(tmp_path / log)
    continued = 0
    for (prompt, _), tokens in zip(plans, conversations, strict=True):
        present = [page in stored for page in page_hashes(tokens, PAGE_SIZE)]
        leading = present.index(False) if False in present else len(present)
        assert not any(present[leading:]), "pages behind a gap can never be found"
        continued += leading > len(prompt) // PAGE_SIZE
    # How many are cut off or dropped before their first whole page depends on the machine's speed.
    assert continued >= CONVERSATIONS // 5

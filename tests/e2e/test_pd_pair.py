"""A real disaggregated pair: the decode node writes to the pool, the next turn's prefill reads it, equal answers."""

from __future__ import annotations

import ast
import random
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from hicache_ext.testing.network_namespace import missing_for_namespaces
from hicache_ext.testing.pd_pair import PdPair
from hicache_ext.testing.server import ServerError
from tests.e2e.conftest import file_tier_config

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PAGE_SIZE = 16
PROMPT = [(11 * position * position + 5 * position) % 250 for position in range(640)]


def shared_directory(directory: Path) -> dict[str, Any]:
    return file_tier_config(directory / "pool")


# A pool more is one line more: a function from a directory to the operator's document.
POOLS: dict[str, Callable[[Path], dict[str, Any]]] = {"shared directory": shared_directory}


@pytest.fixture(autouse=True)
def _namespaces() -> None:
    if missing := missing_for_namespaces():
        pytest.skip(f"missing: {missing}")


@pytest.fixture(params=sorted(POOLS))
def pool(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    return POOLS[request.param](tmp_path)


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


def error_lines(log: Path) -> list[str]:
    """What SGLang's scheduler or we complained about; SGLang's launcher has a traceback of its own at some starts."""
    trouble = "scheduler hit an exception|not enough host memory|hicache_ext: .* failed|will not be written|refusing"
    text = re.split(r"fired up and ready|Uvicorn running", log.read_text(errors="replace"))[-1]
    return [line for line in text.splitlines() if re.search(trouble, line, re.IGNORECASE)]


def restored(pair: PdPair, prompt: list[int], expected: int, **body: Any) -> Any:
    """The first answer whose prompt comes from storage as far as expected: writing takes its moment."""
    deadline = time.monotonic() + 20
    while True:
        pair.prefill.flush_cache()
        answer = pair.generate(prompt, 16, **body)
        if answer.cached.storage >= expected or time.monotonic() > deadline:
            return answer
        time.sleep(0.2)


def test_the_second_turn_restores_what_the_decode_node_wrote(
    tiny_model: Path, tmp_path: Path, pool: dict[str, Any]
) -> None:
    # Keys that SGLang takes out on a prefill node and leaves in on a decode node, in a file that it cannot read there.
    config = as_file(tmp_path, {**pool, "prefetch_threshold": 64, "prefetch_timeout_base": 2})
    with PdPair(tiny_model, directory=tmp_path, prefill_config=config, decode_config=config) as pair:
        first = pair.generate(PROMPT, 80)
        assert (first.cached_tokens, len(first.output_ids)) == (0, 80)
        next_turn = [*PROMPT, *first.output_ids, *range(24)]
        # Another salt is another namespace: nothing of it is stored.
        cold = pair.generate(next_turn, 16, cache_salt="cold")
        assert cold.cached_tokens == 0

        warm = restored(pair, next_turn, 704)
        assert warm.cached.storage == 704
        assert warm.cached.storage_backend == "HiCacheExtBackend"
        assert warm.output_ids == cold.output_ids

        # In a namespace, too; and by a request that wants none of its KV stored.
        salted = pair.generate(PROMPT, 80, cache_salt="tenant")
        assert salted.output_ids == first.output_ids
        in_namespace = restored(pair, next_turn, 704, cache_salt="tenant")
        assert in_namespace.cached.storage == 704
        assert in_namespace.output_ids == cold.output_ids

        private = {"custom_params": {"hicache_ext": {"store": False}}}
        secret = pair.generate(PROMPT, 80, cache_salt="private", sampling=private)
        assert secret.output_ids == first.output_ids
        pair.generate(PROMPT, 80, cache_salt="later")
        unstored = restored(pair, next_turn, 640, cache_salt="private")
        assert unstored.cached.storage == 640
        assert unstored.output_ids == cold.output_ids
    counters = writer_counters(tmp_path / "decode.log")
    assert counters["request.opted_out"] == 1
    assert counters["host.used_tokens"] == 0
    assert not error_lines(tmp_path / "decode.log")


@pytest.mark.parametrize("retractions", [False, True], ids=["aborts", "aborts and retractions"])
def test_fifty_conversations_give_all_host_memory_back(tiny_model: Path, tmp_path: Path, retractions: bool) -> None:
    """Host memory of a fraction of what is generated, requests cut off at random: nothing leaks, no error lines."""
    document = shared_directory(tmp_path)
    document["hicache_ext"]["pd"] = {"write": {"stride": 32, "drop": "shortest"}}
    config = as_file(tmp_path, document)
    generator = random.Random(6)
    plans = [
        ([generator.randrange(250) for _ in range(generator.randrange(20, 400))], generator.random() < 0.4)
        for _ in range(50)
    ]
    answers: dict[int, tuple[int, ...]] = {}

    with PdPair(
        tiny_model,
        directory=tmp_path,
        prefill_config=config,
        decode_config=config,
        decode_arguments=("--hicache-ratio", "0.05"),
        decode_environment=(
            {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "40"} if retractions else None
        ),
    ) as pair:
        before = [pair.generate(prompt, 120, cache_salt="before").output_ids for prompt, _ in plans[:3]]

        def talk(number: int) -> None:
            prompt, aborts = plans[number]
            name = f"conversation-{number}"
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
        assert len(answers) >= 25
        for number in range(3):
            pair.prefill.flush_cache()
            assert pair.generate(plans[number][0], 120).output_ids == before[number]
        time.sleep(6)  # what waits for a prompt that was never written is given up after the grace
        assert pair.generate([1, 2, 3] * 10, 4).output_ids
    counters = writer_counters(tmp_path / "decode.log")
    assert counters["host.used_tokens"] == 0
    assert counters["waiting.pages"] == 0
    assert counters["page.stored"] > 0
    log = (tmp_path / "decode.log").read_text(errors="replace")
    assert ("Testing retraction" in log) == retractions
    assert not error_lines(tmp_path / "decode.log")

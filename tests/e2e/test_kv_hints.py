"""What requests say about KV, heard by real servers of every release: nothing stored, prompts leased."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from hicache_ext.sglang.releases import TESTED
from hicache_ext.sglang.used_names import DECODE_WRITER
from hicache_ext.storage.tiers.file.pins import read_pins
from hicache_ext.testing.client import Generation
from hicache_ext.testing.server import SglangServer
from tests.e2e.conftest import FIRST_PROMPT, SECOND_PROMPT, file_tier_config
from tests.e2e.test_hybrid_models import PROMPTS as HYBRID_PROMPTS
from tests.e2e.test_linker import linked
from tests.releases.needs import needs
from tests.releases.wheels import environment_of
from tests.rigs.network_namespace import missing_for_namespaces
from tests.rigs.pd_pair import PdPair
from tests.rigs.server_hooks import hybrid_environment
from tests.rigs.tiny_hybrid import ARGUMENTS as HYBRID
from tests.rigs.tiny_hybrid import KINDS, Kind, make_tiny_hybrid
from tests.storage.raw_access import stored_keys
from tests.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PAGE_SIZE = 16
IN_PARTS = ("--chunked-prefill-size", "256")
"""A prompt is computed in three parts."""


def hints(*actions: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    """The envelope as a body of /generate has it."""
    made = [
        {"action_id": kind, "action_type": f"kv.{kind}", "action_version": "1.0", "payload": payload}
        for kind, payload in actions
    ]
    return {"kv_hints": {"protocol_version": "0.1", "message_id": "turn", "actions": made}}


NO_STORE = hints(("no_store", {}))
AS_CUSTOM_PARAMS = {"custom_params": {"hicache_ext": {"hints": [{"action_type": "no_store"}]}}}


def leaves_no_byte(server: SglangServer, pool: Path, prompts: Sequence[Sequence[int]]) -> list[Generation]:
    """Say ``no_store`` with each way, twice; the first answers."""
    answers = [server.generate(prompts[0], **NO_STORE), server.generate(prompts[1], sampling=AS_CUSTOM_PARAMS)]
    assert [answer.cached_tokens for answer in answers] == [0, 0]
    assert server.generate(prompts[0], **NO_STORE).cached_tokens == 0, "it is on the device"
    server.flush_cache()
    assert stored_keys(pool) == []
    assert server.generate(prompts[1], **NO_STORE).cached_tokens == 0
    return answers


@pytest.mark.thorough
@pytest.mark.parametrize("release", TESTED)
def test_a_server_leaves_no_byte_of_a_request_that_says_so_and_leases_the_prompt_of_another(
    tiny_model: Path, tmp_path: Path, cold_answer: Callable[[Sequence[int]], Generation], release: str
) -> None:
    pool = tmp_path / "l3"
    with SglangServer(
        tiny_model,
        log_file=tmp_path / "server.log",
        page_size=PAGE_SIZE,
        storage_backend="dynamic",
        extra_config=file_tier_config(pool, layout="pages"),
        extra_arguments=IN_PARTS,
        environment=environment_of(release),
    ) as server:
        answers = leaves_no_byte(server, pool, (FIRST_PROMPT, SECOND_PROMPT))
        expected = [cold_answer(FIRST_PROMPT).output_ids, cold_answer(SECOND_PROMPT).output_ids]
        assert [answer.output_ids for answer in answers] == expected
        # What is stored already is read all the same, and its own tail is not written.
        assert server.generate(FIRST_PROMPT[:320]).cached_tokens == 0
        server.flush_cache()
        before = sorted(stored_keys(pool))
        assert len(before) in (20, 21)  # with a page of the answer, in 0.5.21
        assert server.generate(FIRST_PROMPT, **NO_STORE).cached.storage == 320
        server.flush_cache()
        assert sorted(stored_keys(pool)) == before

        server.generate(FIRST_PROMPT, **hints(("retain", {"ttl_seconds": 600}), ("unheard-of", {})))
        wait_until(lambda: read_pins(pool), "the prompt is leased")
        (lease,) = read_pins(pool)
        assert len(lease.hashes) == 40
        server.flush_cache()
        stored = {key[-32:] for key in stored_keys(pool)}
        assert stored >= set(lease.hashes)
        assert len(stored) <= 42  # with a page of each of the two answers, in 0.5.21
        body = {"model": "tiny", "prompt": FIRST_PROMPT, "max_tokens": 4}
        release_it = {"hicache_ext": {"hints": [{"action_type": "release"}]}}
        server.request("POST", "/v1/completions", {**body, "custom_params": release_it})
        wait_until(lambda: not read_pins(pool), "the lease is over")
        assert server.generate(FIRST_PROMPT).output_ids == expected[0]


def test_through_the_linker_no_byte_is_left_either(tiny_model: Path, tmp_path: Path) -> None:
    pool = tmp_path / "l3"
    config = file_tier_config(pool, layout="pages")
    with linked(tiny_model, tmp_path / "server.log", config, extra_arguments=IN_PARTS) as server:
        leaves_no_byte(server, pool, (FIRST_PROMPT, SECOND_PROMPT))


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_a_hybrid_model_leaves_no_byte_either(tmp_path: Path, kind: Kind) -> None:
    pool = tmp_path / "l3"
    with SglangServer(
        make_tiny_hybrid(tmp_path / "model", kind),
        log_file=tmp_path / "server.log",
        page_size=PAGE_SIZE,
        storage_backend="dynamic",
        extra_config=file_tier_config(pool, layout="pages"),
        extra_arguments=(*HYBRID.get(kind, ()), *IN_PARTS),
        environment=hybrid_environment(),
    ) as server:
        leaves_no_byte(server, pool, [HYBRID_PROMPTS["first"], HYBRID_PROMPTS["second"][::-1]])


@needs(DECODE_WRITER)
@pytest.mark.skipif(missing_for_namespaces() is not None, reason="missing: namespaces")
def test_neither_node_of_a_pair_writes_a_byte(tiny_model: Path, tmp_path: Path) -> None:
    pool = tmp_path / "pool"
    config = file_tier_config(pool, layout="pages")
    with PdPair(
        tiny_model,
        directory=tmp_path,
        prefill_config=config,
        decode_config=config,
        prefill_arguments=IN_PARTS,
    ) as pair:
        told = pair.generate(FIRST_PROMPT, 80, **NO_STORE)
        pair.prefill.flush_cache()
        again = pair.generate(FIRST_PROMPT, 80, **NO_STORE)
        assert (told.cached_tokens, again.cached_tokens) == (0, 0)
        assert told.output_ids == again.output_ids
        assert pair.generate(SECOND_PROMPT, 80).cached_tokens == 0
        # What is written in the background comes in order: what the first ones wrote would be here, too.
        wait_until(lambda: len(stored_keys(pool)) >= 44, "the third conversation is written")
        pair.prefill.flush_cache()
        first = {key[-32:] for key in stored_keys(pool)}
        assert len(first) <= 45

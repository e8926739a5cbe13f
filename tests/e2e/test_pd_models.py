"""Pairs of models with more than one pool, and of nodes of unlike TP: the decode node writes windows and states beside
the KV, and the next turn's prefill goes on from them, with the log-probabilities of a server that computes everything.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from hicache_ext.errors import ServerError
from hicache_ext.sglang.used_names import DECODE_WRITER
from tests.e2e.conftest import file_tier_config
from tests.e2e.test_hybrid_models import PAGE_SIZE, logprobs_of
from tests.e2e.test_pd_pair import PROMPT, as_file, error_lines, restored, writer_counters
from tests.releases.needs import needs, needs_release
from tests.rigs.network_namespace import missing_for_namespaces
from tests.rigs.pd_pair import PdPair
from tests.rigs.rig_server import RigServer
from tests.rigs.server_hooks import hybrid_environment, rig_environment
from tests.rigs.tiny_hybrid import ARGUMENTS, CHUNK, DECODE_ARGUMENTS, KINDS, Kind, make_tiny_hybrid
from tests.rigs.tiny_model import make_tiny_model

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    needs(DECODE_WRITER),
    needs_release("0.5.23", "older releases write one pool"),
]

GENERATED = 3 * CHUNK + 10
CONVERSATIONS = 12
POOL_CAPACITY = "3MiB"
"""Less than the conversations have."""
NEXT_QUESTION = [(7 * position * position + 3 * position) % 250 for position in range(100)]
"""Long enough that its log-probabilities tell one prefix from another."""


UNLIKE_TP = ("--hicache-mem-layout", "page_head")
"""With ``tp_lcm_size``: heads are pages of their own."""


@pytest.mark.parametrize(
    ("kind", "prefill_tp", "decode_tp"),
    [("gemma4", 1, 1), ("qwen3_next", 1, 1), ("qwen3_next", 2, 2), ("llama", 1, 2), ("llama", 2, 1)],
)
def test_the_second_turn_restores_all_pools_of_the_answer(
    tmp_path: Path, kind: Literal["gemma4", "qwen3_next", "llama"], prefill_tp: int, decode_tp: int
) -> None:
    if missing := missing_for_namespaces():
        pytest.skip(f"missing: {missing}")
    model = make_tiny_model(tmp_path / kind) if kind == "llama" else make_tiny_hybrid(tmp_path / kind, kind)
    document = file_tier_config(tmp_path / "pool", layout="pages")
    unlike = UNLIKE_TP if prefill_tp != decode_tp else ()
    if unlike:
        document["tp_lcm_size"] = 2
    config = as_file(tmp_path, document)
    unit = CHUNK if kind == "qwen3_next" else PAGE_SIZE
    with PdPair(
        model,
        directory=tmp_path,
        prefill_config=config,
        decode_config=config,
        prefill_tp=prefill_tp,
        decode_tp=decode_tp,
        prefill_arguments=(*ARGUMENTS.get(kind, ()), *unlike),
        decode_arguments=(*ARGUMENTS.get(kind, ()), *DECODE_ARGUMENTS.get(kind, ()), *unlike),
        environment=hybrid_environment(),
        page_size=PAGE_SIZE,
    ) as pair:
        first = pair.generate(PROMPT, GENERATED, sampling={"ignore_eos": True}, return_logprob=True)
        assert (first.cached_tokens, len(first.output_ids)) == (0, GENERATED)
        answer = [*PROMPT, *first.output_ids]
        stored = (len(answer) - 1) // unit * unit  # the last token has no KV
        next_turn = [*answer, *NEXT_QUESTION]
        # SGLang restores nothing behind the first token of which a log-probability is asked.
        warm = restored(pair, next_turn, stored, return_logprob=True, logprob_start_len=stored)
        assert warm.cached.storage == stored
        assert warm.prefill.meta_info["cached_tokens_details"]["storage_backend"] == "HiCacheExtBackend"
    counters = writer_counters(tmp_path / "decode.log")
    assert counters["host_used_tokens"] == 0 and counters["page.stored"] > 0
    for log in ("decode.log", "prefill.log"):
        assert not error_lines(tmp_path / log)

    with computing_server(model, kind, tmp_path, prefill_tp) as server:
        computed = logprobs_of(server, next_turn)
        # The answer itself decides: were its end alone enough, equal log-probabilities would prove nothing.
        other = logprobs_of(server, [*PROMPT[::-1], *next_turn[len(PROMPT) :]])
    found = input_logprobs(warm.prefill.meta_info)
    assert len(found) == len(next_turn) - stored - 1
    tail = computed[-len(found) :]
    error, of_others = (found - tail).abs().mean(), (other[-len(found) :] - tail).abs().mean()
    # A step of decoding rounds other bits of bfloat16 than a whole prompt does, and so does the state that it keeps.
    said = torch.tensor([logprob for logprob, *_ in first.decode.meta_info["output_token_logprobs"]])
    rounding = (said - computed[len(PROMPT) - 1 : len(answer) - 1]).abs().mean()
    assert error < 0.15 * of_others and error < 4 * rounding, (error, of_others, rounding)
    assert torch.corrcoef(torch.stack([found, tail]))[0, 1] > 0.995


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_node_a_full_pool_aborts_and_retractions_change_no_answer_and_keep_no_memory(
    tmp_path: Path, kind: Kind
) -> None:
    """Every conversation goes on from what the pool still has of it, on whatever its node had to give up."""
    if missing := missing_for_namespaces():
        pytest.skip(f"missing: {missing}")
    model = make_tiny_hybrid(tmp_path / kind, kind)
    generator = random.Random(6)
    prompts = [[generator.randrange(250) for _ in range(generator.randrange(100, 400))] for _ in range(CONVERSATIONS)]
    config = as_file(tmp_path, file_tier_config(tmp_path / "pool", capacity=POOL_CAPACITY, layout="pages"))
    answers: dict[int, tuple[int, ...]] = {}
    with PdPair(
        model,
        directory=tmp_path,
        prefill_config=config,
        decode_config=config,
        prefill_arguments=ARGUMENTS.get(kind, ()),
        decode_arguments=(*ARGUMENTS.get(kind, ()), *DECODE_ARGUMENTS.get(kind, ()), "--hicache-ratio", "0.3"),
        environment=hybrid_environment(),
        decode_environment=rig_environment(
            {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "40"},
            ["tests.rigs.hybrid_on_cpu", "tests.rigs.quick_pd"],
        ),
        page_size=PAGE_SIZE,
    ) as pair:

        def talk(number: int, aborts: bool) -> None:
            if aborts:
                threading.Timer(generator.random(), abort, (number,)).start()
            with contextlib.suppress(ServerError, OSError):
                answer = pair.generate(prompts[number], 120, rid=f"conversation-{number:04}")
                answers[number] = answer.output_ids

        def abort(number: int) -> None:
            for server in (pair.prefill, pair.decode):
                with contextlib.suppress(ServerError, OSError):
                    server.request("POST", "/abort_request", {"rid": f"conversation-{number:04}"})

        def talk_at_once(numbers: Iterable[int], aborts: Callable[[int], bool]) -> list[threading.Thread]:
            threads = [threading.Thread(target=talk, args=(number, aborts(number))) for number in numbers]
            for thread in threads:
                thread.start()
            return threads

        talking = talk_at_once(range(4), lambda number: False)
        time.sleep(2)
        pair.decode.kill()
        (tmp_path / "decode.log").rename(tmp_path / "killed.log")
        pair.decode.start()
        for thread in talking:
            thread.join()
        answers.clear()
        for thread in talk_at_once(range(CONVERSATIONS), lambda number: number % 3 == 2):
            thread.join()
        assert not [number for number in range(CONVERSATIONS) if number % 3 != 2 and number not in answers]
        time.sleep(6)  # what waits for a prompt that was never written is given up after the grace
        # The latest first: what is asked for here is written, too, and takes the room of the oldest.
        turns = {number: [*prompts[number], *answer, *NEXT_QUESTION] for number, answer in reversed(answers.items())}
        found = {}
        for number, turn in turns.items():
            pair.prefill.flush_cache()
            asked = len(turn) - len(NEXT_QUESTION)
            answer = pair.generate(turn, 16, return_logprob=True, logprob_start_len=asked)
            found[number] = input_logprobs(answer.prefill.meta_info), answer.cached.storage
    counters = writer_counters(tmp_path / "decode.log")
    assert counters["host_used_tokens"] == 0 and counters["waiting_pages"] == 0 and counters["page.stored"] > 0
    assert "Testing retraction" in (tmp_path / "decode.log").read_text(errors="replace")
    for log in ("decode.log", "prefill.log"):
        assert not error_lines(tmp_path / log)
    beyond_prompt = {number: tokens - len(prompts[number]) for number, (_, tokens) in found.items()}
    # Some answers are there, and some prompts are not: the pool was full.
    assert max(beyond_prompt.values()) > 0 and min(beyond_prompt.values()) < -CHUNK, beyond_prompt
    with computing_server(model, kind, tmp_path) as server:
        for number, turn in turns.items():
            said, _ = found[number]
            computed = logprobs_of(server, turn)[-len(said) :]
            other = logprobs_of(server, [*turn[: len(prompts[number])][::-1], *turn[len(prompts[number]) :]])[
                -len(said) :
            ]
            error, of_others = (said - computed).abs().mean(), (other - computed).abs().mean()
            assert error < 0.15 * of_others, (number, beyond_prompt[number], error, of_others)


def computing_server(model: Path, kind: str, directory: Path, tp: int = 1) -> RigServer:
    """A server without any cache in storage, which adds up in the order of one with that TP size."""
    return RigServer(
        model,
        log_file=directory / "computes.log",
        tp=tp,
        page_size=PAGE_SIZE,
        hierarchical_cache=False,
        extra_arguments=ARGUMENTS.get(kind, ()),
        environment=hybrid_environment(),
    )


def input_logprobs(meta_info: Any) -> torch.Tensor:
    return torch.tensor([logprob for logprob, *_ in meta_info["input_token_logprobs"] if logprob is not None])

"""Pairs of models with more than one pool, and of nodes of unlike TP: the decode node writes windows and states beside
the KV, and the next turn's prefill goes on from them, with the log-probabilities of a server that computes everything.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from hicache_ext.sglang.used_names import DECODE_WRITER
from tests.e2e.conftest import file_tier_config
from tests.e2e.test_hybrid_models import ARGUMENTS, CHUNK, PAGE_SIZE, logprobs_of
from tests.e2e.test_pd_pair import PROMPT, as_file, error_lines, restored, writer_counters
from tests.releases.needs import needs, needs_release
from tests.rigs.network_namespace import missing_for_namespaces
from tests.rigs.pd_pair import PdPair
from tests.rigs.rig_server import RigServer
from tests.rigs.server_hooks import hybrid_environment
from tests.rigs.tiny_hybrid import make_tiny_hybrid
from tests.rigs.tiny_model import make_tiny_model

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    needs(DECODE_WRITER),
    needs_release("0.5.23", "older releases write one pool"),
]

GENERATED = 3 * CHUNK + 10
DECODE_ARGUMENTS = {
    "qwen3_next": (
        *("--disaggregation-decode-enable-radix-cache", "--mamba-radix-cache-strategy", "extra_buffer"),
        *("--mamba-track-interval", str(CHUNK)),
    )
}
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
    assert counters["host.used_tokens"] == 0 and counters["page.stored"] > 0
    for log in ("decode.log", "prefill.log"):
        assert not error_lines(tmp_path / log)

    with RigServer(
        model,
        log_file=tmp_path / "computes.log",
        page_size=PAGE_SIZE,
        hierarchical_cache=False,
        extra_arguments=ARGUMENTS.get(kind, ()),
        environment=hybrid_environment(),
    ) as server:
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


def input_logprobs(meta_info: Any) -> torch.Tensor:
    return torch.tensor([logprob for logprob, *_ in meta_info["input_token_logprobs"] if logprob is not None])

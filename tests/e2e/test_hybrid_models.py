"""Models with more than one kind of layer: a real server restores every pool of them from our tier, after a restart.

Every prompt is longer than the window and than what a recurrent state remembers in one chunk, and all share a prefix.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from tests.e2e.conftest import file_tier_config
from tests.rigs.rig_server import RigServer
from tests.rigs.server_hooks import hybrid_environment
from tests.rigs.tiny_hybrid import ARGUMENTS, CHUNK, WINDOW, Kind, make_tiny_hybrid

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PAGE_SIZE = 16
SHARED = [(11 * position * position + 5 * position) % 250 for position in range(640)]
PROMPTS = {
    "first": SHARED + [(3 * position * position + position) % 250 for position in range(100)],
    "second": SHARED + [(5 * position * position + 2 * position) % 250 for position in range(70)],
}
POOLS = {"gemma4": ("kv", "swa"), "qwen3_next": ("kv", "mamba")}


def restorable(kind: Kind, length: int) -> int:
    """Tokens of a prompt that a hit gives back: whole pages, or whole chunks where a state is needed at the end."""
    unit = CHUNK if kind == "qwen3_next" else PAGE_SIZE
    return (length - 1) // unit * unit


@pytest.mark.parametrize(("kind", "tp"), [("gemma4", 1), ("qwen3_next", 1), ("qwen3_next", 2)])
def test_all_pools_of_a_hybrid_model_are_restored_after_a_flush_and_a_restart(
    tmp_path: Path, kind: Kind, tp: int
) -> None:
    model = make_tiny_hybrid(tmp_path / kind, kind)
    config = file_tier_config(tmp_path / "l3")
    assert len(SHARED) > 4 * WINDOW

    def serve(name: str) -> RigServer:
        return RigServer(
            model,
            log_file=tmp_path / f"{name}.log",
            tp=tp,
            page_size=PAGE_SIZE,
            storage_backend="dynamic",
            extra_config=config,
            extra_arguments=ARGUMENTS.get(kind, ()),
            environment=hybrid_environment(),
        )

    with serve("first") as server:
        cold = {}
        for name, prompt in PROMPTS.items():
            cold[name] = server.generate(prompt)
            assert cold[name].cached_tokens == 0
            server.flush_cache()
            server.request("POST", "/hicache/storage-backend/clear")
        # Another prefix, the same end: were the answer a matter of the end alone, equal answers would prove nothing.
        other = server.generate(PROMPTS["first"][:320][::-1] + PROMPTS["first"][320:])
        assert other.output_ids != cold["first"].output_ids
        server.flush_cache()

        # The first request leaves the shared prefix in the tier, with what each pool needs at its end.
        server.generate(SHARED)
        for name, prompt in PROMPTS.items():
            server.flush_cache()
            forked = server.generate(prompt)
            assert forked.cached.storage == len(SHARED)
            assert forked.meta_info["cached_tokens_details"]["storage_backend"] == "HiCacheExtBackend"
            assert forked.output_ids == cold[name].output_ids
        server.flush_cache()

    log = (tmp_path / "first.log").read_text()
    for pool in POOLS[kind]:
        assert f"hicache_ext: pool {pool}, " in log

    with serve("second") as server:
        for _ in range(2):
            for name, prompt in PROMPTS.items():
                restored = server.generate(prompt)
                assert restored.cached.storage == restorable(kind, len(prompt))
                assert restored.output_ids == cold[name].output_ids
                server.flush_cache()

        logprobs = {name: logprobs_of(server, prompt) for name, prompt in PROMPTS.items()}

    # The rig's layers are the model's, as transformers has it. It computes in float32, the server in bfloat16: single
    # answers among near ties differ, what the whole prompt is worth does not (0.98 to 0.995 were seen).
    expected = reference_logprobs(model, PROMPTS)
    for name in PROMPTS:
        assert torch.corrcoef(torch.stack([logprobs[name], torch.tensor(expected[name])]))[0, 1] > 0.95


REFERENCE = """
import json, sys, torch
from tests.rigs.tiny_hybrid import load_reference
reference, found = load_reference(sys.argv[1]), {}
for name, prompt in json.load(sys.stdin).items():
    with torch.no_grad():
        logprobs = reference(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
    found[name] = logprobs.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
print(json.dumps(found))
"""


def reference_logprobs(model: Path, prompts: Mapping[str, list[int]]) -> dict[str, list[float]]:
    """Those of transformers, in a process of its own: where other tests have imported SGLang and mended torch for it,
    transformers computed anything."""
    command = [sys.executable, "-c", REFERENCE, str(model)]
    answer = subprocess.run(command, input=json.dumps(prompts), stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, list[float]] = json.loads(answer.stdout)
    return found


def logprobs_of(server: RigServer, prompt: list[int]) -> torch.Tensor:
    """Those of a prompt's tokens from the second on, as the server computes them without any cache."""
    request = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    answer = json.loads(server.request("POST", "/generate", request))
    return torch.tensor([logprob for logprob, *_ in answer["meta_info"]["input_token_logprobs"][1:]])

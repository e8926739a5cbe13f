"""What SGLang can be told that changes when and how it asks storage: a real server each, and a row of docs/pools.md."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.e2e.conftest import file_tier_config
from tests.e2e.modes import saw
from tests.e2e.test_file_tier import PROMPT
from tests.e2e.test_hybrid_models import PROMPTS, restorable
from tests.rigs.rig_server import RigServer
from tests.rigs.server_hooks import hybrid_environment
from tests.rigs.tiny_hybrid import make_tiny_hybrid
from tests.rigs.tiny_vision import IMAGE, make_tiny_vision

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

OTHERS = [[(number * 37 + 7 * p * p + 3 * p) % 250 for p in range(640)] for number in range(1, 7)]


@dataclass(frozen=True)
class Mode:
    name: str
    arguments: Sequence[str] = ()
    page_size: int = 16
    tp: int = 1
    request: dict[str, Any] = field(default_factory=dict)
    dp: int = 1
    """Replicas, which take turns."""


def argument(mode: Mode) -> Any:
    return pytest.param(mode, id=mode.name)


# Where modes do not touch each other, one server shows two. The rows of a mere buffer and of --tp 2 are of
# test_file_tier.py.
MODES = [
    Mode("`--page-size 1 --disable-overlap-schedule`", ("--disable-overlap-schedule",), page_size=1),
    Mode("`--page-size 64 --chunked-prefill-size 128`", ("--chunked-prefill-size", "128"), page_size=64),
    Mode(
        "`--hicache-mem-layout layer_first --hicache-storage-prefetch-policy timeout`",
        ("--hicache-mem-layout", "layer_first", "--hicache-storage-prefetch-policy", "timeout"),
    ),
    Mode(
        "`--hicache-mem-layout page_first_direct --enable-priority-scheduling`",
        ("--enable-priority-scheduling", "--hicache-mem-layout", "page_first_direct", "--hicache-io-backend", "direct"),
        request={"priority": 3},
    ),
    Mode("`--hicache-mem-layout page_head --dp 2`", ("--hicache-mem-layout", "page_head"), dp=2),
]


def serve(model: Path, directory: Path, mode: Mode, **more: Any) -> RigServer:
    settings = {
        "tp": mode.tp,
        "dp": mode.dp,
        "page_size": mode.page_size,
        "storage_backend": "dynamic",
        "extra_config": file_tier_config(directory / "l3"),
        "extra_arguments": mode.arguments,
        **more,
    }
    return RigServer(model, log_file=directory / "server.log", **settings)


@pytest.mark.parametrize("mode", [argument(mode) for mode in MODES])
def test_a_prompt_comes_back_from_storage_with_the_answer_it_had(tiny_model: Path, tmp_path: Path, mode: Mode) -> None:
    log = tmp_path / "server.log"
    with serve(tiny_model, tmp_path, mode) as server:
        cold = [server.generate(PROMPT, **mode.request) for _ in range(mode.dp)]
        server.flush_cache()
        warm = [server.generate(PROMPT, **mode.request) for _ in range(mode.dp)]
    assert "is answered as a miss" not in log.read_text()
    assert {answer.output_ids for answer in warm} == {cold[0].output_ids} == {answer.output_ids for answer in cold}
    saw(mode.name, *warm)


def test_a_server_that_writes_back_stores_what_leaves_the_device(tiny_model: Path, tmp_path: Path) -> None:
    """Nothing is stored before the device is full, and a flush throws away what was not."""
    mode = Mode(
        "`--hicache-write-policy write_back`",
        ("--hicache-write-policy", "write_back", "--max-total-tokens", "2048"),
    )
    with serve(tiny_model, tmp_path, mode) as server:
        cold = server.generate(PROMPT)
        for other in OTHERS:
            server.generate(other)
        server.flush_cache()
        warm = server.generate(PROMPT)
    assert warm.output_ids == cold.output_ids
    saw(mode.name, warm)


def test_with_best_effort_an_idle_server_takes_nothing_and_a_busy_one_what_comes_while_a_request_waits(
    tiny_model: Path, tmp_path: Path
) -> None:
    policy = "`--hicache-storage-prefetch-policy best_effort`"
    mode = Mode(policy, ("--max-running-requests", "1", "--hicache-storage-prefetch-policy", "best_effort"))
    with serve(tiny_model, tmp_path, mode) as server:
        cold = server.generate(PROMPT)
        server.flush_cache()
        idle = server.generate(PROMPT)
        server.flush_cache()
        sampling = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}
        other = server.events("/generate", {"input_ids": OTHERS[0], "sampling_params": sampling, "stream": True}, 240)
        next(other)
        busy = server.generate(PROMPT)
        assert list(other)
    assert idle.output_ids == busy.output_ids == cold.output_ids
    assert "on an idle server nothing comes from storage" in (tmp_path / "server.log").read_text()
    saw(f"{policy}, idle", idle)
    saw(f"{policy}, one request at a time", busy)


def test_replicas_of_dp_attention_restore_what_either_stored(tmp_path: Path) -> None:
    """The tiny Llama has no DP attention in SGLang; Qwen3-Next does."""
    model, prompt = make_tiny_hybrid(tmp_path / "model", "qwen3_next"), PROMPTS["first"]
    mode = Mode("`--tp 2 --dp 2 --enable-dp-attention` (Qwen3-Next)", ("--enable-dp-attention",), tp=2, dp=2)
    with serve(model, tmp_path, mode, environment=hybrid_environment()) as server:
        cold = [server.generate(prompt) for _ in range(mode.dp)]
        server.flush_cache()
        warm = [server.generate(prompt) for _ in range(mode.dp)]
    assert {answer.output_ids for answer in [*cold, *warm]} == {cold[0].output_ids}
    assert {answer.cached.storage for answer in warm} == {restorable("qwen3_next", len(prompt))}
    saw(mode.name, *warm)


def test_a_prompt_with_an_image_is_restored_with_that_image_alone(tmp_path: Path) -> None:
    """SGLang puts numbers made of what an image shows in the places of its tokens."""
    mode = Mode("a prompt with an image (Qwen2-VL)", ("--mm-attention-backend", "sdpa"))
    prompt = f"{'x' * 300}{IMAGE}{'What is on it? ' * 20}"
    with serve(make_tiny_vision(tmp_path / "model"), tmp_path, mode) as server:
        cold = [server.generate(prompt, image_data=[image_of(seed)]) for seed in (1, 2)]
        server.flush_cache()
        server.request("POST", "/hicache/storage-backend/clear")
        server.generate(prompt, image_data=[image_of(1)])
        server.flush_cache()
        same = server.generate(prompt, image_data=[image_of(1)])
        server.flush_cache()
        other = server.generate(prompt, image_data=[image_of(2)])
    assert cold[0].output_ids != cold[1].output_ids, "the image has to matter, or equal answers prove nothing"
    assert same.output_ids == cold[0].output_ids
    assert same.cached.storage == (same.prompt_tokens - 1) // 16 * 16
    assert other.output_ids == cold[1].output_ids
    assert other.cached.storage == 300 // 16 * 16, "what stands before the image"
    saw(mode.name, same)


def image_of(seed: int) -> str:
    """Noise as SGLang takes it: a PNG in base64."""
    pixels = np.random.default_rng(seed).integers(0, 256, (168, 168, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()

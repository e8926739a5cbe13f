"""Every configuration under examples/ loads and passes `config check`, and a pair's two files name the same pool."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hicache_ext.cli.main import main
from hicache_ext.config import load_config
from hicache_ext.config.load import read_document
from hicache_ext.config.tier import tier_types

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
FILES = sorted([*EXAMPLES.glob("*.yaml"), *EXAMPLES.glob("pd/*.yaml")])
"""Those of examples/kubernetes are manifests: tests/docs/test_kubernetes.py."""
PAIRS = sorted(file for file in FILES if file.stem.endswith("-prefill"))


def known_types(file: Path) -> None:
    types = {tier["type"] for tier in read_document(file)["hicache_ext"]["tiers"].values()}
    if unknown := types - set(tier_types()):
        pytest.skip(f"missing: tiers of type {', '.join(sorted(unknown))}")


@pytest.fixture(autouse=True)
def _secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POOL_PASSWORD", "KV_ACCESS_KEY", "KV_SECRET_KEY"):
        monkeypatch.setenv(name, "x")


def test_there_are_examples() -> None:
    assert len(FILES) >= 13
    assert len(PAIRS) >= 3
    combinations = {"aggregated", "shared-nfs", "nvme-redis", "nvme-s3", "nvme-mooncake"}
    assert combinations <= {file.stem for file in FILES}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_an_example_loads(file: Path) -> None:
    known_types(file)
    role = load_config(f"@{file}").role
    assert role in file.stem if file.parent.name == "pd" else role == "auto"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_check_has_nothing_to_remark_about_an_example(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known_types(file)
    assert main(["config", "check", str(file)]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"OK: {file}\n") and "note:" not in said


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_an_example_is_named_by_a_page(file: Path) -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    named = {name for page in pages for name in re.findall(r"examples/[\w/.-]+", page.read_text())}
    place = file.relative_to(ROOT)
    assert {str(place), f"{place.parent}/"} & named, f"{place}: no page of docs/ or README.md leads there"


@pytest.mark.parametrize("file", PAIRS, ids=lambda file: file.stem)
def test_both_nodes_of_a_pair_use_one_pool(file: Path) -> None:
    known_types(file)
    prefill = load_config(file)
    decode = load_config(file.with_stem(file.stem.removesuffix("prefill") + "decode"))
    (pool,) = decode.store_locations
    assert pool in prefill.retrieve_locations
    assert type(decode.tiers[pool]) is type(prefill.tiers[pool])

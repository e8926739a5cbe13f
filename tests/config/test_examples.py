"""Every configuration under examples/ loads, and a pair's two files name the same pool."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache_ext.config import load_config
from hicache_ext.config.load import read_document
from hicache_ext.config.tiers import tier_types

EXAMPLES = Path(__file__).parents[2] / "examples" / "pd"
FILES = sorted(EXAMPLES.rglob("*.yaml"))
PAIRS = sorted(file for file in FILES if file.stem.endswith("-prefill"))


def known_types(file: Path) -> None:
    types = {tier["type"] for tier in read_document(file)["hicache_ext"]["tiers"].values()}
    if unknown := types - set(tier_types()):
        pytest.skip(f"missing: tiers of type {', '.join(sorted(unknown))}")


def test_there_are_examples() -> None:
    assert len(FILES) >= 6
    assert len(PAIRS) >= 3


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_an_example_loads(file: Path) -> None:
    known_types(file)
    assert load_config(f"@{file}").role in file.stem


@pytest.mark.parametrize("file", PAIRS, ids=lambda file: file.stem)
def test_both_nodes_of_a_pair_use_one_pool(file: Path) -> None:
    known_types(file)
    prefill = load_config(file)
    decode = load_config(file.with_stem(file.stem.removesuffix("prefill") + "decode"))
    (pool,) = decode.store_locations
    assert pool in prefill.retrieve_locations
    assert type(decode.tiers[pool]) is type(prefill.tiers[pool])

"""A directory that was copied somewhere else while nobody used it is the same tier there (docs/troubleshooting.md)."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from hicache_ext.storage.tiers.file.pages.store import PageFileStore
from hicache_ext.storage.tiers.file.slab.store import SlabStore
from hicache_ext.testing.conformance.pages import assert_hits, page_keys, store_pages


@pytest.mark.parametrize("kind", [SlabStore, PageFileStore])
def test_a_copy_of_a_directory_serves_its_pages_and_takes_more(kind: Any, tmp_path: Path) -> None:
    keys = page_keys(50)
    store = kind("disk", tmp_path / "here", capacity=64 << 20)
    store_pages(store, keys, (5000,))
    store.close()
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    shutil.rmtree(tmp_path / "here")
    moved = kind("disk", tmp_path / "there", capacity=64 << 20)
    if isinstance(moved, SlabStore):
        assert moved.wait_until_rebuilt(30)
    assert_hits(moved, keys, (5000,))
    more = page_keys(20, "more")
    store_pages(moved, more, (5000,))
    assert_hits(moved, [*keys, *more], (5000,))
    moved.close()

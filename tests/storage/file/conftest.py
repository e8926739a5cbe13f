"""Fixtures of the file tier's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache_ext.storage.tiers.file.pages.directory import PageDirectory
from hicache_ext.storage.tiers.file.pages.store import PageFileStore
from hicache_ext.storage.tiers.file.slab.index import SlabIndex
from tests.rigs.bare_index import new_index_in
from tests.storage.file.indexes import CAPACITY
from tests.storage.raw_access import RawFiles


@pytest.fixture
def place(tmp_path) -> Path:
    return tmp_path / "tier"


@pytest.fixture
def raw(place) -> RawFiles:
    return RawFiles(place)


@pytest.fixture
def store(place):
    store = PageFileStore("disk", place, capacity=None)
    yield store
    store.close()


@pytest.fixture
def directory(place):
    directory = PageDirectory(place, "disk")
    yield directory
    directory.close()


@pytest.fixture
def open_store(place):
    """Opens further stores over ``place``, and closes them."""
    opened: list[PageFileStore] = []

    def open_one(capacity: int | None = None, **options) -> PageFileStore:
        opened.append(PageFileStore("disk", place, capacity=capacity, **options))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


@pytest.fixture
def index(tmp_path: Path) -> Iterator[SlabIndex]:
    """An index without slabs' files."""
    with new_index_in(tmp_path, CAPACITY) as index:
        yield index

"""Fixtures of the file tier's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache_ext.storage.tiers.file.pages.directory import PageDirectory
from hicache_ext.storage.tiers.file.pages.store import PageFileStore
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

"""What a file tier says it holds (``PageLister``), again and again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest

from hicache_ext.errors import StoreClosedError
from hicache_ext.storage.contract.abilities import PageLister, ability
from hicache_ext.storage.tiers.file.multipath import SpreadStore
from hicache_ext.storage.tiers.file.pages import catalogue as pages_contents
from hicache_ext.storage.tiers.file.slab import index_words
from hicache_ext.storage.tiers.file.slab import store as slab_contents
from hicache_ext.testing.conformance.pages import IDENTITY, OTHER_IDENTITY, page_keys, store_pages
from tests.rigs.event_tier import PAGE, open_tier
from tests.rigs.kv_events import block_of
from tests.storage.file.page_files import store_one_by_one

KEYS = page_keys(12)

Open = Callable[[], SpreadStore]


@pytest.fixture(params=["slab", "pages"])
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def open_one(layout: str, tmp_path: Path) -> Iterator[Open]:
    with ExitStack() as resources:
        yield lambda: resources.enter_context(closing(open_tier(layout, tmp_path / "tier")))


def held(store: SpreadStore, identity: bytes = IDENTITY) -> set[int]:
    lister = ability(store, PageLister)
    assert lister is not None
    found = lister.block_hashes(identity)
    assert found.dtype == np.int64
    return set(found.tolist())


def blocks(keys: list[bytes]) -> set[int]:
    return {block_of(key) for key in keys}


def test_pages_of_an_identity_come_and_go(open_one: Open) -> None:
    store = open_one()
    assert held(store) == set()
    store_pages(store, KEYS[:8], [PAGE])
    store_pages(store, page_keys(3, identity=OTHER_IDENTITY), [PAGE])
    assert held(store) == blocks(KEYS[:8])
    store.remove(KEYS[:2])
    store_pages(store, KEYS[8:], [PAGE])
    assert held(store) == blocks(KEYS[2:])
    store.clear([IDENTITY])
    assert held(store) == set()
    assert len(held(store, OTHER_IDENTITY)) == 3
    store_pages(store, KEYS[:1], [PAGE])
    assert held(store) == blocks(KEYS[:1])


def test_what_another_store_on_the_directory_does_is_seen(open_one: Open) -> None:
    store, other = open_one(), open_one()
    store_pages(other, KEYS, [PAGE])
    assert held(store) == blocks(KEYS)
    other.remove(KEYS[3:])
    assert held(store) == blocks(KEYS[:3])


def test_what_was_there_before_the_start_is_held(open_one: Open) -> None:
    first = open_one()
    store_pages(first, KEYS, [PAGE])
    first.close()
    again = open_one()
    (path,) = again.parts
    if path.layout == "slab":
        path.wait_until_rebuilt(30)  # type: ignore[attr-defined]
    assert held(again) == blocks(KEYS)


def test_after_close_nothing_is_told(open_one: Open) -> None:
    store = open_one()
    store.close()
    with pytest.raises(StoreClosedError):
        held(store)


def test_a_path_out_of_service_holds_nothing(layout: str, tmp_path: Path) -> None:
    with closing(open_tier(layout, tmp_path / "tier")) as store:
        store_pages(store, KEYS, [PAGE])
        store._usable = ()
        assert held(store) == set()
        store._usable = (0,)
        assert held(store) == blocks(KEYS)


# -- slabs -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def slabs(tmp_path: Path) -> Iterator[SpreadStore]:
    with closing(open_tier("slab", tmp_path / "tier")) as store:
        yield store


def test_a_header_is_read_once(slabs: SpreadStore, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    headers = slab_contents.read_headers
    monkeypatch.setattr(slab_contents, "read_headers", lambda *a: (read.append(a[2]), headers(*a))[1])
    store_pages(slabs, KEYS, [PAGE])
    assert held(slabs) == held(slabs) == blocks(KEYS)
    assert sum(read) == len(KEYS)
    store_pages(slabs, page_keys(1, "more"), [PAGE])
    assert len(held(slabs)) == len(KEYS) + 1
    assert sum(read) == len(KEYS) + 1


def test_a_header_of_another_page_is_believed_of_no_slot(slabs: SpreadStore, tmp_path: Path) -> None:
    """A slot may have been given to another page between the look at the index and that at the header."""
    store_pages(slabs, KEYS, [PAGE])
    (headers,) = (tmp_path / "tier").rglob("*.headers")
    right = headers.read_bytes()
    headers.write_bytes(right[128:256] + right[128:])
    assert len(held(slabs)) == len(KEYS) - 1
    headers.write_bytes(right)
    assert held(slabs) == blocks(KEYS)


def test_a_page_whose_slot_holds_another_one_now_is_not_held_any_more(slabs: SpreadStore) -> None:
    store_pages(slabs, KEYS, [PAGE])
    assert held(slabs) == blocks(KEYS)
    slabs.remove(KEYS)
    others = page_keys(12, "others")
    store_pages(slabs, others, [PAGE])
    assert held(slabs) == blocks(others)


def test_expired_pages_are_not_held(slabs: SpreadStore) -> None:
    (path,) = slabs.parts
    store_pages(slabs, KEYS, [PAGE])
    path._ttl = 3600.0
    index = path._directory.index  # type: ignore[attr-defined]
    (row,) = index.rows_of(KEYS[:1])
    index.memory.rows[row, index_words.CREATED] -= 3_700_000
    assert held(slabs) == blocks(KEYS[1:])


# -- page files --------------------------------------------------------------------------------------------------------


@pytest.fixture
def page_files(tmp_path: Path) -> Iterator[SpreadStore]:
    with closing(open_tier("pages", tmp_path / "tier")) as store:
        yield store


def _directories(place: Path) -> list[Path]:
    """Of files of pages."""
    return sorted({file.parent for file in [*place.rglob("*.page"), *place.rglob("*.pack")]})


def test_a_directory_that_has_long_been_as_it_is_is_not_read_again(
    page_files: SpreadStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_one_by_one(page_files, KEYS, [PAGE])
    store_pages(page_files, page_keys(2, "packed"), [PAGE])
    packed = blocks(page_keys(2, "packed"))
    long_ago = time.time() - 100
    for directory in _directories(tmp_path / "tier"):
        os.utime(directory, (long_ago, long_ago))
    read = []
    read_packs = []
    page_files_in, keys_in = pages_contents.page_files, pages_contents.keys_in
    monkeypatch.setattr(pages_contents, "page_files", lambda path: (read.append(path), page_files_in(path))[1])
    monkeypatch.setattr(
        pages_contents, "keys_in", lambda path, *pack: (read_packs.append(path), keys_in(path, *pack))[1]
    )
    assert held(page_files) == blocks(KEYS) | packed
    first = len(read)
    assert first == len(_directories(tmp_path / "tier"))
    assert held(page_files) == blocks(KEYS) | packed
    assert len(read) == first
    page_files.remove(KEYS[:1])
    assert held(page_files) == blocks(KEYS[1:]) | packed
    assert sum(path.endswith(".pack") for path in read_packs) == 1
    assert len(read) == first + 1


def test_a_change_within_one_tick_of_the_clock_of_the_disk_is_seen(page_files: SpreadStore, tmp_path: Path) -> None:
    """The time of the directory is the same before and after it."""
    store_one_by_one(page_files, KEYS, [PAGE])
    moment = time.time_ns()
    for directory in _directories(tmp_path / "tier"):
        os.utime(directory, ns=(moment, moment))
    assert held(page_files) == blocks(KEYS)
    before = _directories(tmp_path / "tier")
    page_files.remove(KEYS)
    for directory in before:
        os.utime(directory, ns=(moment, moment))
    assert held(page_files) == set()

"""What lies beside a bad page is read in the background, once, slowly, and no good page is lost by it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hicache_ext.storage.contract.store import GetResult, SetResult
from hicache_ext.storage.tiers.file import path_store
from hicache_ext.storage.tiers.file.pages.store import PageFileStore
from hicache_ext.storage.tiers.file.path_store import PathStore
from hicache_ext.storage.tiers.file.slab.store import SlabStore
from hicache_ext.testing.conformance.pages import page_keys, read_pages, store_pages
from tests.storage.raw_access import RawFiles, RawSlots
from tests.waiting import wait_until

KEYS = page_keys(15)
SIZES = [1000]
BAD = KEYS[::3]
GOOD = [key for key in KEYS if key not in BAD]


@pytest.fixture(params=[SlabStore, PageFileStore], ids=["slab", "pack"])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], PathStore]]:
    opened: list[PathStore] = []

    def open_() -> PathStore:
        opened.append(request.param("disk", tmp_path, capacity=64 << 20))
        return opened[-1]

    yield open_
    for store in opened:
        store.close()


@pytest.fixture
def store(open_store: Callable[[], PathStore], monkeypatch: pytest.MonkeyPatch) -> PathStore:
    """With pages, a third of them damaged; the scrub begins as soon as one of them was read."""
    monkeypatch.setattr(path_store, "SCRUB_AFTER", 0.0)
    store = open_store()
    assert store_pages(store, KEYS, SIZES) == [SetResult.STORED] * len(KEYS)
    damage(store, BAD)
    return store


def damage(store: PathStore, keys: list[bytes]) -> None:
    raw = RawSlots(store) if isinstance(store, SlabStore) else RawFiles(store._path)
    for key in keys:
        content = raw.read(key)
        assert content is not None
        raw.write(key, content[:-1] + bytes([content[-1] ^ 1]))


def scrubbed(store: PathStore, reason: str) -> int:
    return store.metrics.value("scrub", reason)


def test_one_bad_page_has_all_the_others_found(store: PathStore, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert read_pages(store, BAD[:1], SIZES)[0] == [GetResult.CORRUPT]
        wait_until(lambda: scrubbed(store, "ended") == 1)
    assert (scrubbed(store, "bad"), scrubbed(store, "good")) == (len(BAD) - 1, len(GOOD))
    assert "the pages beside a bad one were read: 14, of them 4 bad" in caplog.text
    assert [key for key, there in zip(KEYS, store.contains(KEYS), strict=True) if there] == GOOD
    assert not store._doubtful
    assert read_pages(store, GOOD, SIZES)[0] == [GetResult.HIT] * len(GOOD)


def test_a_scrub_reads_at_a_bounded_rate_and_within_bounded_memory(
    store: PathStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(path_store, "_VERIFY_BYTES", 4 * 4096)
    read: list[int] = []
    rests: list[float] = []
    look_at, rest = store._look_at, store._scrub.rest
    monkeypatch.setattr(store, "_look_at", lambda batch: read.append(len(batch)) or look_at(batch))
    monkeypatch.setattr(store._scrub, "rest", lambda seconds: rests.append(seconds) or rest(0.0))
    read_pages(store, BAD[:1], SIZES)
    wait_until(lambda: scrubbed(store, "ended") == 1)
    assert read == [4, 4, 4, 2]
    assert sum(rests) == pytest.approx(14 * SIZES[0] / path_store._SCRUB_RATE)


def test_a_scrub_that_reads_good_pages_wrongly_removes_none(store: PathStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of this machine's memory: what is read again is good."""
    damaged: list[int] = []
    look_at = store._look_at

    def damaging(batch):
        results = look_at(batch)
        damaged.append(len(results))
        return [GetResult.CORRUPT] * len(results)

    monkeypatch.setattr(store, "_look_at", damaging)
    read_pages(store, BAD[:1], SIZES)
    wait_until(lambda: scrubbed(store, "ended") == 1)
    assert damaged
    assert store.contains(GOOD) == [True] * len(GOOD)
    # Writes that think so, too, store nothing twice.
    assert store_pages(store, GOOD, SIZES) == [SetResult.EXISTS] * len(GOOD)


def test_a_store_closes_amid_a_scrub(store: PathStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path_store, "_SCRUB_RATE", 1)
    read_pages(store, BAD[:1], SIZES)
    wait_until(lambda: not store.contains(BAD[1:])[-1])
    store.close()
    assert scrubbed(store, "ended") == 0


def test_without_damage_a_write_reads_nothing(
    open_store: Callable[[], PathStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    store_pages(store, KEYS, SIZES)
    monkeypatch.setattr(store, "_look_at", lambda _: pytest.fail("it was read"))
    assert store_pages(store, KEYS, SIZES) == [SetResult.EXISTS] * len(KEYS)


def test_doubt_ends(store: PathStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path_store, "DOUBT", 0.0)
    read_pages(store, BAD[:1], SIZES)
    wait_until(lambda: scrubbed(store, "ended") == 1)
    monkeypatch.setattr(store, "_look_at", lambda _: pytest.fail("it was read"))
    assert store_pages(store, GOOD, SIZES) == [SetResult.EXISTS] * len(GOOD)


def test_what_was_computed_again_replaces_what_nobody_read(store: PathStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path_store, "SCRUB_AFTER", 3600.0)
    assert read_pages(store, BAD[:1], SIZES)[0] == [GetResult.CORRUPT]
    stored = dict(zip(KEYS, store_pages(store, KEYS, SIZES), strict=True))
    assert [key for key, result in stored.items() if result is SetResult.STORED] == BAD
    assert read_pages(store, KEYS, SIZES)[0] == [GetResult.HIT] * len(KEYS)


def test_a_restart_that_finds_a_damaged_header_has_the_slab_read(
    open_store: Callable[[], PathStore], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A page that a restart does not find is computed; what lay behind it was there, unread."""
    monkeypatch.setattr(path_store, "SCRUB_AFTER", 0.0)
    store = open_store()
    if not isinstance(store, SlabStore):
        pytest.skip("page files have no headers of their own")
    store_pages(store, KEYS, SIZES)
    damage(store, BAD[1:])
    store.close()
    (headers,) = (tmp_path / "v3" / "slabs").glob("*.headers")
    with headers.open("r+b") as file:
        file.seek(20)
        file.write(b"?")
    store = open_store()
    assert store.count_leading(KEYS) == 0
    wait_until(lambda: scrubbed(store, "ended") == 1)
    assert store.metrics.value("scrub", "bad") == len(BAD) - 1
    assert [key for key, there in zip(KEYS, store.contains(KEYS), strict=True) if there] == GOOD


def test_a_directory_that_others_have_too_is_not_looked_over_but_what_is_written_is(
    store: PathStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine with a fault would remove the pages of all others."""
    monkeypatch.setattr(store, "shared", True)
    assert read_pages(store, BAD[:1], SIZES)[0] == [GetResult.CORRUPT]
    assert not store._doubtful
    assert store_pages(store, BAD, SIZES) == [SetResult.STORED] * len(BAD)

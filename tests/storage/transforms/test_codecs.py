"""Encoded pages in stores: fewer bytes, back to the bit, beside pages that are stored as they are."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from hicache_ext.page.transforms.codec import Codec, Paying
from hicache_ext.storage.contract.store import GetResult, PageBatch, PageStore, SetResult
from hicache_ext.storage.contract.transforming.store import TransformedStore
from hicache_ext.storage.tiers.memory import MemoryPageStore
from tests.page.test_lossless import page_of
from tests.storage.transforms.rig import AUTHENTICATE, ENCRYPT, fresh, pages_of, seal

SIZE = 64 << 10
IDENTITY = bytes(range(16))
DOCUMENT: dict[str, Any] = {"pool": {"name": "kv", "dtype": "bfloat16", "segments": [SIZE // 2, SIZE // 2]}}
KEYS = [IDENTITY + bytes([number]) * 32 for number in range(6)]
CONTENTS = [page_of("bfloat16", SIZE, number) for number in range(6)]


class Counting(MemoryPageStore):
    """A memory tier that tells what it was given."""

    def __init__(self) -> None:
        super().__init__("memory")
        self.moved: list[tuple[str, list[int]]] = []

    def set(self, batch: PageBatch) -> list[SetResult]:
        self.moved.append(("set", list(batch.sizes)))
        return super().set(batch)

    def get(self, batch: PageBatch) -> list[GetResult]:
        self.moved.append(("get", list(batch.sizes)))
        return super().get(batch)


@pytest.fixture
def inner() -> Iterator[Counting]:
    store = Counting()
    yield store
    store.close()


def _opened(inner: PageStore, codec: Any, mode: Any = None) -> PageStore:
    store = TransformedStore(inner, codec, None if mode is None else seal(mode, "new"))
    store.register_identity(IDENTITY, DOCUMENT)
    return store


def _batch(contents: list[bytes]) -> PageBatch:
    """Pages of two segments, as MHA pages have them."""
    halves = [[memoryview(bytearray(one))[: SIZE // 2], memoryview(bytearray(one))[SIZE // 2 :]] for one in contents]
    return PageBatch(KEYS[: len(contents)], halves)


def _read(store: PageStore, count: int = len(KEYS)) -> list[bytes | None]:
    batch = PageBatch(KEYS[:count], [[fresh(SIZE // 2), fresh(SIZE // 2)] for _ in range(count)])
    results = store.get(batch)
    return [
        b"".join(map(bytes, segments)) if result is GetResult.HIT else None
        for result, segments in zip(results, batch.buffers, strict=True)
    ]


@pytest.mark.parametrize("mode", [None, AUTHENTICATE, ENCRYPT], ids=str)
def test_pages_take_fewer_bytes_and_come_back_to_the_bit(inner: Counting, mode: Any) -> None:
    store = _opened(inner, Codec("lossless"), mode)
    assert store.set(_batch(CONTENTS)) == [SetResult.STORED] * 6
    [(_, sizes)] = inner.moved
    assert max(sizes) < SIZE / 1.4
    assert store.contains(KEYS) == [True] * 6 and _read(store) == CONTENTS
    assert store.set(_batch(CONTENTS)) == [SetResult.EXISTS] * 6


def test_pages_that_do_not_shrink_stay_readable_without_the_codec(inner: Counting) -> None:
    store = _opened(inner, Codec("lossless"))
    noise = random.Random(1).randbytes(SIZE)
    contents = [noise, CONTENTS[1], noise, CONTENTS[3]]
    assert store.set(_batch(contents)) == [SetResult.STORED] * 4
    assert _read(store, 4) == contents
    assert _read(inner, 4) == [contents[0], None, contents[2], None]


def test_pages_of_the_time_before_the_codec_are_read_and_not_written_again(inner: Counting) -> None:
    assert inner.set(_batch(CONTENTS[:3])) == [SetResult.STORED] * 3
    store = _opened(inner, Codec("lossless"))
    assert store.set(_batch(CONTENTS)) == [SetResult.EXISTS] * 3 + [SetResult.STORED] * 3
    assert store.count_leading(KEYS) == 6 and _read(store) == CONTENTS


@pytest.mark.parametrize("paying", [None, Paying()], ids=["lossless", "auto"])
def test_clearing_and_removing_take_pages_in_every_form(inner: Counting, paying: Any) -> None:
    store = _opened(inner, Codec("lossless", paying))
    inner.set(_batch(CONTENTS[:2]))
    store.set(_batch(CONTENTS))
    assert store.remove(KEYS[:3]) == 3
    assert store.contains(KEYS) == [False] * 3 + [True] * 3
    assert store.clear([IDENTITY]) > 0
    assert store.contains(KEYS) == [False] * 6


def test_auto_gives_a_fast_medium_the_callers_memory_in_one_call(inner: Counting) -> None:
    store = _opened(inner, Codec("lossless", Paying()))
    assert store.set(_batch(CONTENTS)) == [SetResult.STORED] * 6
    assert _read(store) == CONTENTS
    assert inner.moved == [("set", [SIZE] * 6), ("get", [SIZE] * 6)]


def test_auto_encodes_for_a_slow_medium_and_reads_what_is_there(inner: Counting) -> None:
    paying = Paying()
    store = _opened(inner, Codec("lossless", paying))
    assert store.set(_batch(CONTENTS[:2])) == [SetResult.STORED] * 2
    for _ in range(20):
        paying.moved("set", 1 << 20, 1.0)
    assert store.set(_batch(CONTENTS)) == [SetResult.EXISTS] * 2 + [SetResult.STORED] * 4
    assert max(inner.moved[-1][1]) < SIZE / 1.4
    assert _read(store) == CONTENTS


def test_a_damaged_encoded_page_is_corrupt_and_can_be_written_again(inner: Counting) -> None:
    store = _opened(inner, Codec("lossless"))
    store.set(_batch(CONTENTS[:1]))
    [form] = [form for form in pages_of(store).forms(IDENTITY) if inner.contains([form.identity + KEYS[0][16:]])[0]]
    key = form.identity + KEYS[0][16:]
    length = form.stored_length(SIZE)
    page = fresh(length)
    assert inner.get(PageBatch([key], [[page]])) == [GetResult.HIT]
    # The frame of the exponents, not its checksum: as somebody with a checksum of his own would store it.
    page[80 + 8 + SIZE // 2 + 2] ^= 0xFF
    inner.remove([key])
    inner.set(PageBatch([key], [[page]]))
    assert _read(store, 1) == [None]
    assert store.contains(KEYS[:1]) == [False]
    store.set(_batch(CONTENTS[:1]))
    assert _read(store, 1) == CONTENTS[:1]

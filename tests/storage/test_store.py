"""What the PageStore contract itself brings along: batches, their results counted, keys and views of memory made when
they are needed."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hicache_ext.page.memory import Addresses, PageMemory, addresses_of
from hicache_ext.storage.contract.store import (
    GetResult,
    PageBatch,
    PageKeys,
    by_identity,
    chosen_keys,
    counted,
    key_words,
    portions,
)

HIT, MISS, ERROR = GetResult.HIT, GetResult.MISS, GetResult.ERROR


def a_batch() -> PageBatch:
    return PageBatch([b"a", b"b", b"c"], [[memoryview(bytes(size))] for size in (1, 20, 300)])


def test_the_keys_of_a_chain_are_a_sequence_like_any_other() -> None:
    hashes = [bytes([number]) * 32 for number in range(4)]
    plain = [b"i" * 16 + page_hash for page_hash in hashes]
    keys = PageKeys.of_joined(b"i" * 16, b"".join(hashes))
    assert list(keys) == plain
    assert (len(keys), keys[0], keys[-1]) == (4, plain[0], plain[-1])
    for part in (slice(1, 3), slice(99), slice(None, None, 2), slice(None, None, -1)):
        assert list(keys[part]) == plain[part]
        assert keys[part].words.flags.c_contiguous
    assert key_words(keys).tobytes() == key_words(plain).tobytes() == b"".join(plain)
    assert not PageKeys.of_joined(b"i" * 16, b"")
    with pytest.raises(IndexError):
        keys[4]


def test_some_keys_and_those_of_another_identity_are_made_of_what_there_is() -> None:
    hashes = [bytes([number]) * 32 for number in range(4)]
    known = PageKeys.of_joined(b"i" * 16, b"".join(hashes))
    for keys in (known, PageKeys(b"i" * 16, known.words)):
        assert list(keys[:2]) == list(known)[:2]
        assert keys[:2].words.tobytes() == b"".join(known[:2])
        assert not keys[:0]
        assert list(keys.chosen(np.array([0, 3]))) == [known[0], known[3]]
        assert chosen_keys(keys, np.arange(4)) is keys
        assert list(chosen_keys(keys, np.array([1]))) == chosen_keys(list(known), np.array([1])) == [known[1]]
        assert keys.under(b"i" * 16) is keys
        assert list(keys.under(b"j" * 16)) == [b"j" * 16 + page_hash for page_hash in hashes]
        assert list(keys[:3].under(b"j" * 16)) == [b"j" * 16 + page_hash for page_hash in hashes[:3]]


def test_pages_of_several_identities_are_told_apart_in_order() -> None:
    of_one = PageKeys.of_joined(b"i" * 16, bytes(32) + b"1" * 32)
    of_other = PageKeys.of_joined(b"j" * 16, b"2" * 32)
    mixed = [of_one[0], of_other[0], of_one[1]]
    assert [(list(at), list(some), some.identity) for at, some in by_identity(mixed)] == [
        ([0, 2], list(of_one), b"i" * 16),
        ([1], list(of_other), b"j" * 16),
    ]
    assert [(list(at), some is of_one) for at, some in by_identity(of_one)] == [([0, 1], True)]
    assert [*by_identity(of_one[:0])] == [*by_identity([])] == []


@pytest.mark.parametrize(
    ("sizes", "most", "most_items", "expected"),
    [
        ([], 10, 10, []),
        ([5, 5], 10, 10, ["ab"]),
        ([5, 5, 1], 10, 10, ["ab", "c"]),
        ([50, 1, 9], 10, 10, ["a", "bc"]),
        ([1, 1, 1], 10, 2, ["ab", "c"]),
        ([5, 0], 0, 10, ["a", "b"]),
    ],
)
def test_a_portion_is_within_its_limits_or_one_page(
    sizes: list[int], most: int, most_items: int, expected: list[str]
) -> None:
    assert ["".join(portion) for portion in portions("abc"[: len(sizes)], sizes, most, most_items)] == expected


def test_what_some_pages_are_answered_goes_to_their_places() -> None:
    results = [MISS] * 3
    a_batch().move_at([2, 0], lambda some: [HIT if size == 300 else ERROR for size in some.sizes], results)
    assert results == [ERROR, MISS, HIT]
    a_batch().move_at([], lambda some: pytest.fail("there is nothing to move"), results)
    with pytest.raises(ValueError, match="shorter"):
        a_batch().move_at([0, 1], lambda some: [HIT], results)


@pytest.mark.parametrize("results", [[], [HIT], [HIT, HIT], [MISS, HIT, HIT], [HIT, ERROR, MISS, ERROR]])
def test_results_are_counted_by_their_values(results: list[GetResult]) -> None:
    assert counted(results) == {result.value: results.count(result) for result in results}


@pytest.mark.parametrize(("results", "expected"), [([HIT] * 3, 321), ([MISS] * 3, 0), ([HIT, MISS, HIT], 301)])
def test_bytes_of_a_result_are_those_of_its_pages(results: list[GetResult], expected: int) -> None:
    assert a_batch().bytes_of(HIT, results) == expected


def test_a_selection_keeps_sizes_and_of_everything_it_is_the_batch_itself() -> None:
    batch = a_batch()
    assert batch.select(range(3)) is batch
    assert batch.select([0, 1, 2]) is batch
    assert list(batch.select([2, 0]).sizes) == [300, 1]
    assert batch.select([2, 0]).keys == [b"c", b"a"]


def test_keys_once_made_are_not_changed_by_who_asked_for_them() -> None:
    keys = PageKeys.of_joined(b"i" * 16, b"a" * 32 + b"b" * 32)
    taken = list(keys)
    taken.clear()
    assert list(keys) == [b"i" * 16 + b"a" * 32, b"i" * 16 + b"b" * 32]
    first = keys[0]
    assert keys[0] is first
    assert (keys[-2], keys.index(keys[1]), keys[1] in keys) == (keys[0], 1, True)
    with pytest.raises(IndexError):
        keys[-3]


def test_a_selection_of_keys_is_a_selection_of_their_bytes() -> None:
    keys = PageKeys.of_joined(b"i" * 16, bytes(range(96)))
    batch = PageBatch(keys, [[memoryview(bytes(8))] for _ in range(3)])
    assert list(batch.select([2, 0]).keys) == [b"i" * 16 + bytes(range(64, 96)), b"i" * 16 + bytes(range(32))]
    assert batch.select(iter([0, 1, 2])) is batch


def in_memory(pages: int, sizes: list[int]) -> tuple[bytearray, list[list[memoryview]], PageMemory, list[int]]:
    """Pages one behind the other, their views, the same known by address, and how often views were asked for."""
    arena, asked = bytearray(pages * sum(sizes)), []
    starts = np.cumsum([0, *(sizes * pages)]).tolist()
    segments = [memoryview(arena)[begin:end] for begin, end in itertools.pairwise(starts)]
    views = [segments[n * len(sizes) : (n + 1) * len(sizes)] for n in range(pages)]
    known = addresses_of(views, writable=True)
    assert known is not None

    def make() -> list[list[memoryview]]:
        asked.append(1)
        return views

    return arena, views, PageMemory(known, make), asked


def test_memory_known_by_address_is_a_sequence_of_views_made_once_and_only_when_asked_for() -> None:
    _, views, memory, asked = in_memory(4, [3, 5])
    batch = PageBatch([b"k"] * 4, memory, [8] * 4)
    assert (len(memory), memory.addresses.pages.shape, asked) == (4, (4, 2), [])
    assert (list(batch.buffers), memory[1], memory[-1], memory[1:3]) == (views, views[1], views[3], views[1:3])
    assert asked == [1]
    assert PageBatch([b"k"] * 4, memory).sizes == [8] * 4


@pytest.mark.parametrize("chosen", [[], [2], [3, 1], [0, 0, 2], [1, 2, 3]])
def test_a_selection_of_memory_known_by_address_has_the_addresses_and_the_views_of_its_pages(chosen: list[int]) -> None:
    arena, _, memory, asked = in_memory(4, [3, 5])
    batch = PageBatch([bytes([n]) for n in range(4)], memory, [8] * 4).select(chosen)
    again = batch.select(range(len(chosen) - 1, -1, -1))
    assert asked == []
    begin = memory.addresses.pages[0, 0]
    for of_batch, positions in ((batch, chosen), (again, chosen[::-1])):
        buffers = of_batch.buffers
        assert isinstance(buffers, PageMemory)
        assert buffers.addresses.pages.tolist() == [[begin + 8 * n, begin + 8 * n + 3] for n in positions]
        assert buffers.addresses.pages.flags.c_contiguous and buffers.addresses.pages.dtype == np.int64
        assert buffers.addresses.segment_sizes.tolist() == [3, 5]
        assert list(of_batch.keys) == [bytes([n]) for n in positions]
    for position, segments in zip(chosen, batch.buffers, strict=True):
        segments[1][:] = bytes([position + 1]) * 5
    assert [arena[8 * n + 3 : 8 * n + 8] for n in chosen] == [bytes([n + 1]) * 5 for n in chosen]


def test_addresses_are_known_only_of_pages_with_segments_of_the_same_sizes() -> None:
    def pages(*sizes: list[int]) -> list[list[memoryview]]:
        return [[memoryview(bytearray(size)) for size in of_page] for of_page in sizes]

    assert isinstance(addresses_of(pages([3, 5], [3, 5]), writable=True), Addresses)
    for unequal in ([[3, 5], [5, 3]], [[3, 5], [8]], [[3], [3, 3]], [[3, 0], [3, 0]], [[], []], []):
        assert addresses_of(pages(*unequal), writable=False) is None
    mixed = [*pages([8]), [memoryview(bytes(8))]]
    assert addresses_of(mixed, writable=True) is None
    assert addresses_of(mixed, writable=False) is not None

"""What the PageStore contract itself brings along: batches, their results counted, keys made when they are needed."""

from __future__ import annotations

import pytest

from hicache_ext.storage.store import GetResult, PageBatch, PageKeys, counted

HIT, MISS, ERROR = GetResult.HIT, GetResult.MISS, GetResult.ERROR


def a_batch() -> PageBatch:
    return PageBatch([b"a", b"b", b"c"], [[memoryview(bytes(size))] for size in (1, 20, 300)])


def test_the_keys_of_a_chain_are_a_sequence_like_any_other() -> None:
    hashes = [bytes([number]) * 32 for number in range(4)]
    plain = [b"i" * 16 + page_hash for page_hash in hashes]
    keys = PageKeys(b"i" * 16, b"".join(hashes))
    assert list(keys) == plain
    assert (len(keys), keys[0], keys[-1], keys[1:3], keys[:99]) == (4, plain[0], plain[-1], plain[1:3], plain)
    assert keys.behind(b"42") == [b"42" + key for key in plain]
    assert not PageKeys(b"i" * 16, b"")
    with pytest.raises(IndexError):
        keys[4]


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

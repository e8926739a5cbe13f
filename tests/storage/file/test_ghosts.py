"""The table of ghosts: first in, first out, shared, and never in the way."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hicache_ext.storage.tiers.file.slab import slot_code
from hicache_ext.storage.tiers.file.slab.ghosts import GhostTable
from hicache_ext.storage.tiers.file.slab.slot_code import HITS_BITS, RECORD_WORDS

SIZE = 2000


def hash_of(number: int) -> int:
    return number * 0x9E3779B97F4A7C15 & (1 << 62) - 1


def remember(table: GhostTable, numbers: range) -> None:
    """Page ``n`` was last used at ``n`` and had ``n % 8`` hits."""
    record = np.zeros((1, RECORD_WORDS), np.int64)
    for number in numbers:
        record[0, slot_code.HASH], record[0, slot_code.USED] = hash_of(number), number
        record[0, slot_code.STATE] = slot_code.PAGE | number % 8 << 8
        slot_code._remember(record, 0, table.places, table.remembered)


def recall(table: GhostTable, numbers: range, limit: int = SIZE) -> list[int]:
    """The numbers of the pages whose ghosts are there, each of which must be the right one."""
    oldest = max(0, int(table.remembered[0]) - limit)
    found = [slot_code._recall(hash_of(n), 0, table.places, oldest) for n in numbers]
    for number, uses in zip(numbers, found, strict=True):
        assert uses in (-1, number << HITS_BITS | number % 8)
    return [number for number, uses in zip(numbers, found, strict=True) if uses >= 0]


@pytest.fixture
def table(tmp_path: Path) -> GhostTable:
    return GhostTable(tmp_path, SIZE)


def test_nearly_all_of_the_last_ghosts_are_there_and_none_of_those_before(table: GhostTable) -> None:
    remember(table, range(3 * SIZE))
    found = recall(table, range(3 * SIZE))
    assert found[0] >= 2 * SIZE
    assert len(found) > 0.98 * SIZE


def test_a_lower_limit_forgets_more(table: GhostTable) -> None:
    remember(table, range(SIZE))
    assert recall(table, range(SIZE), 100)[0] == SIZE - 100


def test_a_ghost_is_recalled_once_and_the_younger_of_two_counts(table: GhostTable) -> None:
    remember(table, range(1, 2))
    table.places[2][table.places[0] != 0] = 900 << HITS_BITS
    remember(table, range(1, 2))
    assert recall(table, range(1, 2)) == [1]
    assert recall(table, range(1, 2)) == []


def test_the_ghost_of_another_generation_is_that_of_another_page(table: GhostTable) -> None:
    remember(table, range(1, 2))
    assert slot_code._recall(hash_of(1), 1, table.places, 0) == -1
    assert recall(table, range(1, 2)) == [1]


def test_a_larger_table_has_the_ghosts_of_the_smaller_one_whose_file_is_gone(table: GhostTable, tmp_path: Path) -> None:
    remember(table, range(2 * SIZE))
    larger = GhostTable.larger(tmp_path, 2 * SIZE, table)
    remember(larger, range(2 * SIZE, 3 * SIZE))
    assert len(recall(larger, range(SIZE, 3 * SIZE), 2 * SIZE)) > 0.98 * 2 * SIZE
    assert not table.path.exists()


def test_whoever_opens_the_table_next_finds_its_ghosts(tmp_path: Path) -> None:
    first = GhostTable(tmp_path, SIZE)
    remember(first, range(10))
    second = GhostTable(tmp_path, SIZE)
    assert recall(second, range(10)) == list(range(10))
    remember(second, range(10, 20))
    assert recall(first, range(20)) == list(range(10, 20))


def test_a_file_of_another_length_is_begun_anew(tmp_path: Path) -> None:
    remember(GhostTable(tmp_path, SIZE), range(10))
    path = tmp_path / f"ghosts-{SIZE}"
    path.write_bytes(path.read_bytes()[:5000])
    table = GhostTable(tmp_path, SIZE)
    assert recall(table, range(10)) == []
    remember(table, range(10))
    assert recall(table, range(10)) == list(range(10))


@pytest.mark.parametrize("garbage", [b"\xa5", b"\xff", b"\x7f", b"\x01"])
def test_garbage_in_the_file_is_ghosts_of_nobody(tmp_path: Path, garbage: bytes) -> None:
    table = GhostTable(tmp_path, SIZE)
    table.path.write_bytes(garbage * table.bytes)
    assert recall(GhostTable(tmp_path, SIZE), range(1000)) == []
    table = GhostTable.larger(tmp_path, 2 * SIZE, GhostTable(tmp_path, SIZE))
    remember(table, range(50))

"""The table of ghosts: first in, first out, shared, and never in the way."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache_ext.storage.file.eviction import Ghost, Rank
from hicache_ext.storage.file.slab import ghosts
from hicache_ext.storage.file.slab.ghosts import GhostTable

SIZE = 2000


def key(number: int) -> bytes:
    return number.to_bytes(50, "big")


def remember(table: GhostTable, numbers: range) -> None:
    """Page ``n`` was last used at ``n`` and had ``n % 8`` hits."""
    for first in range(numbers.start, numbers.stop, 100):
        some = range(first, min(first + 100, numbers.stop))
        table.remember([key(n) for n in some], b"".join(Rank(7, n, n % 8).pack() for n in some))


def recall(table: GhostTable, numbers: range, limit: int = SIZE) -> list[int]:
    """The numbers of the pages whose ghosts are there, each of which must be the right one."""
    found = table.recall([key(n) for n in numbers], limit)
    for number, ghost in zip(numbers, found, strict=True):
        assert ghost is None or ghost == Ghost(number, number % 8)
    return [number for number, ghost in zip(numbers, found, strict=True) if ghost is not None]


@pytest.fixture(params=[True, False], ids=["shared file", "memory of the process"])
def table(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GhostTable:
    monkeypatch.setattr(ghosts, "overwrites_in_place", lambda _: request.param)
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
    table.remember([key(1)], Rank(0, 900, 0).pack())
    remember(table, range(1, 2))
    assert recall(table, range(1, 2)) == [1]
    assert recall(table, range(1, 2)) == []


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


def test_garbage_in_the_file_is_ghosts_of_nobody(tmp_path: Path) -> None:
    table = GhostTable(tmp_path, SIZE)
    table.path.write_bytes(b"\xa5" * table.bytes)
    assert recall(GhostTable(tmp_path, SIZE), range(1000)) == []
    table = GhostTable.larger(tmp_path, 2 * SIZE, GhostTable(tmp_path, SIZE))
    remember(table, range(50))

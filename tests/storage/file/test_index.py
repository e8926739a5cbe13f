"""The index of a slab directory: what it answers, what other processes see, and what a kill or a fault leaves."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lmdb
import pytest

from hicache_ext.storage.file.slab import slot_code, slot_table
from hicache_ext.storage.file.slab.change import IndexChange
from hicache_ext.storage.file.slab.index import SlabIndex
from hicache_ext.storage.file.slab.placed import Located, Placed
from hicache_ext.storage.file.slab.records import Slab
from hicache_ext.storage.store import PageKeys

A, B = bytes(range(16)), bytes(range(16, 32))
SMALL, MIDDLE, LARGE = 4096, 1 << 20, 3 << 20
"""Of 32, 2 and 1 slots in a group."""
PATIENCE = 30


def key_of(number: int, identity: bytes = A) -> bytes:
    return identity + hashlib.sha256(b"%d" % number).digest()


def keys_of(numbers: Sequence[int], identity: bytes = A) -> PageKeys:
    return PageKeys(identity, b"".join(key_of(number)[16:] for number in numbers))


def add_slab(index: SlabIndex, slot_size: int = SMALL, slots: int = 40) -> Slab:
    with index.changing() as change:
        return change.add_slab(slot_size, slots)


def take(index: SlabIndex, slot_size: int, count: int) -> tuple[int, Placed]:
    """The portion, and slots for the first pages of a batch."""
    portion = index.next_portion()
    with index.changing() as change:
        slabs, slots = change.take_free_slots(slot_size, count, portion)
    return portion, Placed.of([Located(*place, 1000, n) for n, place in enumerate(zip(slabs, slots, strict=True))])


def store(index: SlabIndex, keys: Sequence[bytes], slot_size: int = SMALL) -> list[bool] | None:
    portion, taken = take(index, slot_size, len(keys))
    with index.changing() as change:
        return change.publish(portion, keys, taken, taken)


def remove(index: SlabIndex, key: bytes) -> bool:
    with index.changing() as change:
        return change.remove(key)


def clear(index: SlabIndex, identity: bytes = A) -> bool:
    with index.changing() as change:
        return change.clear(identity)


def drop(index: SlabIndex, slab: Slab) -> bool:
    with index.changing() as change:
        return change.drop_slab(slab)


def present(index: SlabIndex, keys: Sequence[bytes]) -> list[int]:
    placed, _ = index.locate(keys)
    return placed.positions.tolist()


def assert_sound(index: SlabIndex) -> None:
    assert index.check() == []


@pytest.fixture
def index(tmp_path: Path) -> Iterator[SlabIndex]:
    index = SlabIndex(tmp_path / "index")
    yield index
    index.close(sync=False)


class Peer:
    """Another process with the same index, forked before this one opens it."""

    def __init__(self, path: Path) -> None:
        context = multiprocessing.get_context("fork")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(path, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def do(self, action: Callable[..., Any], *arguments: Any) -> Any:
        """``action`` of the other process's index."""
        self._connection.send((action, arguments))
        assert self._connection.poll(PATIENCE)
        return self._connection.recv()

    def die(self, action: Callable[..., Any], *arguments: Any) -> None:
        """``action`` ends the other process."""
        self._connection.send((action, arguments))
        self._process.join(PATIENCE)
        assert self._process.exitcode is not None

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def _serve(path: Path, connection: Any) -> None:
    index = None
    while True:
        action, arguments = connection.recv()
        index = index or SlabIndex(path)
        connection.send(action(index, *arguments))


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    """To be asked for before ``index``: of LMDB only what is not open can be opened in a fork."""
    peer = Peer(tmp_path / "index")
    yield peer
    peer.kill()


# -- several processes -------------------------------------------------------------------------------------------------


def test_what_changes_while_the_slabs_are_being_read_is_seen_by_the_next_call(
    index: SlabIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot of LMDB from before a change must not pass for the epoch that the change has begun."""
    add_slab(index)
    index._view = index.table.view({}, -1)
    load, added = SlabIndex._load, []

    def load_late(self: SlabIndex, *arguments: Any) -> Any:
        if not added:
            added.append(None)
            added[0] = add_slab(index)
        return load(self, *arguments)

    monkeypatch.setattr(SlabIndex, "_load", load_late)
    index.slabs()
    assert added[0] in index.slabs()


def test_an_epoch_that_a_process_was_killed_over_is_ended_by_the_next_change(peer: Peer, index: SlabIndex) -> None:
    """Otherwise all processes would read the slabs anew with every call, in a full directory for ever."""
    peer.die(_add_slab_and_die, "begin_epoch_in_order")
    assert [slab.number for slab in index.slabs()] == [0]
    assert not index._current().lasts
    store(index, [key_of(1)])
    assert index._current().lasts
    assert present(index, [key_of(1)]) == [0]
    assert_sound(index)


def test_slabs_that_lmdb_never_heard_of_leave_nothing_behind(index: SlabIndex) -> None:
    """The change has ended, as far as the mapped words say, and is lost all the same when LMDB does not commit it."""
    slab = add_slab(index, SMALL, 33)
    store(index, keys_of(range(20)))
    with pytest.raises(OSError, match="no commit"):
        _replace_slab_without_commit(index, slab)
    assert index.slabs() == [slab]
    store(index, [key_of(50)])
    assert present(index, [key_of(50)]) == [0]
    assert_sound(index)


def _add_slab_and_die(index: SlabIndex, before: str) -> None:
    setattr(slot_table.SlotTable, before, lambda *_: os._exit(9))
    add_slab(index)


def _replace_slab_without_commit(index: SlabIndex, slab: Slab) -> None:
    real = slot_table.SlotTable.end_change

    def fail(table: slot_table.SlotTable) -> None:
        real(table)
        raise OSError("no commit")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slot_table.SlotTable, "end_change", fail)
        with index.changing() as change:
            assert change.drop_slab(slab)
            change.add_slab(MIDDLE, 20)
            change.take_free_slots(MIDDLE, 20, 0)


@pytest.mark.parametrize("free", ["remove_expired", "remove_cleared"])
def test_pages_looked_up_in_a_slab_that_is_dropped_meanwhile_are_nobody_s(index: SlabIndex, free: str) -> None:
    """Those whose records are no longer mapped must not raise: the threads that free pages would end with it."""
    slabs = [add_slab(index, SMALL, 10), add_slab(index, MIDDLE, 10)]
    store(index, keys_of(range(3)))
    store(index, keys_of(range(10, 13)), MIDDLE)
    clear(index)
    rows = index.of_identity(index._current(), A)
    assert drop(index, slabs[1])
    with index.changing() as change:
        assert (
            change.remove_expired(rows, 1 << 31) if free == "remove_expired" else change.remove_cleared(rows, A)
        ) == 3
    assert_sound(index)


def test_what_is_written_after_a_clear_survives_the_freeing_of_an_earlier_one(
    index: SlabIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_slab(index, SMALL, 2100)
    chain = keys_of(range(2060))
    store(index, chain)
    clear(index)
    real, written = IndexChange.remove_cleared, []

    def remove_late(change: IndexChange, rows: Any, *arguments: Any) -> int:
        freed = real(change, rows, *arguments)
        written.append(freed)
        return freed

    monkeypatch.setattr(IndexChange, "remove_cleared", remove_late)
    changing, changes = SlabIndex.changing, []

    def clear_between(self: SlabIndex) -> Any:
        changes.append(None)
        if len(changes) == 2:
            # All slots of the second portion get pages of a second clear's generation.
            with changing(self) as change:
                change.evict(SMALL, 2060)
            store(self, [key_of(5000)])
            clear(self)
            store(self, keys_of(range(2060)))
        return changing(self)

    monkeypatch.setattr(SlabIndex, "changing", clear_between)
    index.free_cleared(A)
    assert len(written) == 2
    assert index.count_leading(chain) == 2060


def test_a_mapping_that_fails_is_a_change_that_never_was(index: SlabIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room takes an OSError of ``add_slab`` for "nothing has changed" and goes on with the same change."""
    slab = add_slab(index)
    store(index, keys_of(range(20)))

    def fail(*_: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(slot_table, "map_words", fail)
        with pytest.raises(lmdb.Error):
            add_slab(index, MIDDLE, 3000)
    assert index.slabs() == [slab]
    store(index, keys_of([50]))
    assert index.count_leading(keys_of(range(20))) == 20
    assert_sound(index)


@pytest.mark.parametrize("full", ["records", "groups", "buckets"])
def test_a_full_disk_is_no_slab_and_nothing_else(index: SlabIndex, monkeypatch: pytest.MonkeyPatch, full: str) -> None:
    """For each of the three files that a slab makes larger."""
    slab = add_slab(index)
    store(index, keys_of(range(20)))
    refused = []
    real = slot_table.extend

    def fail(path: Path, wanted: int) -> None:
        if path.name.startswith(full):
            refused.append(path)
            raise OSError(28, "No space left on device")
        real(path, wanted)

    monkeypatch.setattr(slot_table, "extend", fail)
    with index.changing() as change:
        with pytest.raises(OSError, match="No space"):
            change.add_slab(MIDDLE, 4000)
        assert change.take_free_slots(SMALL, 3, 0).shape == (2, 3)
    assert refused
    assert index.slabs() == [slab]
    assert index.count_leading(keys_of(range(20))) == 20
    assert_sound(index)


def test_the_size_is_known_while_the_hash_table_is_being_replaced(index: SlabIndex) -> None:
    """Its file may be gone between a look at its name and one at its size."""
    add_slab(index)
    size = index.size()
    for path in index._path.glob("buckets-*"):
        path.unlink()
    assert index.size() == size


def test_a_hash_table_that_a_killed_process_replaced_is_deleted_by_the_next_to_open_it(tmp_path: Path) -> None:
    index = SlabIndex(tmp_path / "index")
    add_slab(index)
    store(index, [key_of(1)])
    index.close(sync=False)
    left = tmp_path / "index" / "buckets-512"
    left.write_bytes(bytes(4096))
    index = SlabIndex(tmp_path / "index")
    assert not left.exists()
    assert present(index, [key_of(1)]) == [0]
    index.close(sync=False)


def test_a_slab_more_costs_no_look_at_the_others(index: SlabIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory of terabytes has thousands of slabs, and a rebuild adds them one by one."""
    add_slab(index, SMALL, 400)
    store(index, keys_of(range(20)))
    made_anew = []
    real = slot_code.settle_all
    monkeypatch.setattr(slot_code, "settle_all", lambda *table: made_anew.append(None) or real(*table))
    add_slab(index, SMALL, 40)
    assert made_anew == []
    # Unless the hash table becomes larger, which has room for half as many.
    add_slab(index, SMALL, 600)
    assert made_anew == [None]
    assert index.count_leading(keys_of(range(20))) == 20
    assert_sound(index)

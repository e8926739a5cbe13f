"""The index of a slab directory: what it answers, what other processes see, and what a kill or a fault leaves."""

from __future__ import annotations

import hashlib
import itertools
import multiprocessing
import os
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from hicache_ext.storage.contract.store import PageKeys
from hicache_ext.storage.tiers.file.slab import change as change_module
from hicache_ext.storage.tiers.file.slab import slot_code, slot_table
from hicache_ext.storage.tiers.file.slab.change import IndexChange
from hicache_ext.storage.tiers.file.slab.index import SlabIndex
from hicache_ext.storage.tiers.file.slab.records import Slab
from hicache_ext.storage.tiers.file.slab.slot_references import SlotReference, SlotReferences
from hicache_ext.storage.tiers.file.slab.slot_table import View

A, B = bytes(range(16)), bytes(range(16, 32))
SMALL, MIDDLE, LARGE = 4096, 1 << 20, 3 << 20
"""Of 32, 2 and 1 slots in a group."""
PATIENCE = 30


def key_of(number: int, identity: bytes = A) -> bytes:
    return identity + hashlib.sha256(b"%d" % number).digest()


def keys_of(numbers: Sequence[int], identity: bytes = A) -> PageKeys:
    return PageKeys.of_joined(identity, b"".join(key_of(number)[16:] for number in numbers))


def add_slab(index: SlabIndex, slot_size: int = SMALL, slots: int = 40) -> Slab:
    with index.changing() as change:
        return change.add_slab(slot_size, slots)


def take(index: SlabIndex, slot_size: int, count: int) -> tuple[int, SlotReferences]:
    """The portion, and slots for the first pages of a batch."""
    portion = index.next_portion()
    with index.changing() as change:
        slabs, slots = change.take_free_slots(slot_size, count, portion)
    return portion, SlotReferences.of(
        [SlotReference(*place, 1000, n) for n, place in enumerate(zip(slabs, slots, strict=True))]
    )


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
    assert index._current().epoch % 2 == 1
    store(index, [key_of(1)])
    assert index._current().epoch % 2 == 0
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


@pytest.mark.parametrize("look", ["contains", "count_leading", "locate"])
def test_pages_that_a_change_hid_from_a_look_up_are_looked_up_again(
    index: SlabIndex, monkeypatch: pytest.MonkeyPatch, look: str
) -> None:
    """The freeing of a cleared copy moves the entry of the page that was written after it, under the same hash."""
    add_slab(index)
    keys = keys_of(range(3))
    store(index, keys)
    current, looks = SlabIndex._current, itertools.count()

    def without_entries_at_first(self: SlabIndex) -> View:
        view = current(self)
        if next(looks):
            return view
        index.table.begin_change()
        index.table.end_change()
        return replace(view, buckets=np.zeros_like(view.buckets))

    monkeypatch.setattr(SlabIndex, "_current", without_entries_at_first)
    match look:
        case "contains":
            assert index.contains(keys) == [True] * 3
        case "count_leading":
            assert index.count_leading(keys) == 3
        case "locate":
            assert len(index.locate(keys)[0]) == 3
    assert next(looks) == 2


def test_what_one_process_changes_the_other_sees_with_its_next_call(peer: Peer, index: SlabIndex) -> None:
    """Slabs, a larger hash table, an identity cleared; and pages, of course."""
    chain = keys_of(range(1200))
    peer.do(_add_and_store, 40, range(30))
    assert index.count_leading(chain) == 30
    small = len(index._current().buckets)
    peer.do(_add_and_store, 2000, range(30, 1200))
    assert index.count_leading(chain) == 1200
    assert len(index._current().buckets) > small
    assert index.contains(list(chain)) == [True] * 1200
    assert clear(index)
    assert peer.do(_count_leading, range(1200)) == 0
    assert peer.do(_free_cleared) == 1200
    store(index, chain)
    assert peer.do(_count_leading, range(1200)) == 1200
    assert peer.do(SlabIndex.check) == []


def test_records_given_to_a_slab_of_another_size_are_those_of_nobody_s_old_slab(peer: Peer, index: SlabIndex) -> None:
    """The other process has looked at the first slab and has no reason to look at the slabs again until it asks."""
    slab = add_slab(index, SMALL, 100)
    store(index, keys_of(range(80)))
    assert peer.do(_count_leading, range(80)) == 80
    assert drop(index, slab)
    other = add_slab(index, LARGE, 50)
    assert other.first_record == slab.first_record
    store(index, keys_of(range(200, 230)), LARGE)
    assert peer.do(_count_leading, range(200, 230)) == 30
    assert peer.do(_count_leading, range(80)) == 0
    assert peer.do(_remove_all, range(80)) == 0
    assert peer.do(_remove_all, range(200, 215)) == 15
    assert index.counts() == {"pages": 15, "free": 35, "pending": 0, "slabs": 1}
    assert_sound(index)


def test_slots_of_a_killed_process_are_free_once_somebody_looks(peer: Peer, index: SlabIndex) -> None:
    peer.do(add_slab)
    peer.do(take, SMALL, 25)
    take(index, SMALL, 5)
    peer.kill()
    with index.changing() as change:
        assert change.release_dead_writers() == 25
    assert index.counts() == {"pages": 0, "free": 35, "pending": 5, "slabs": 1}
    assert_sound(index)


def _add_and_store(index: SlabIndex, slots: int, numbers: Sequence[int]) -> None:
    add_slab(index, SMALL, slots)
    store(index, keys_of(numbers))


def _count_leading(index: SlabIndex, numbers: Sequence[int]) -> int:
    return index.count_leading(keys_of(numbers))


def _free_cleared(index: SlabIndex) -> int:
    return index.free_cleared(A)


def _remove_all(index: SlabIndex, numbers: Sequence[int]) -> int:
    return sum(remove(index, key) for key in keys_of(numbers))


# -- kills and faults --------------------------------------------------------------------------------------------------


def use_everything(index: SlabIndex) -> None:
    """Every kind of change there is, each kernel in it."""
    slabs = [add_slab(index, SMALL, 70), add_slab(index, LARGE, 4)]
    store(index, keys_of(range(50)))
    portion, taken = take(index, SMALL, 20)
    with index.changing() as change:
        change.publish(portion, keys_of(range(40, 60)), taken, taken.select(slice(5, 15)))
    portion, taken = take(index, SMALL, 3)
    with index.changing() as change:
        change.give_back(portion, taken)
        change.touch(keys_of(range(30)))
    with index.changing() as change:
        change.evict(SMALL, 10)
    remove(index, key_of(3))
    store(index, keys_of(range(100, 103)), LARGE)
    clear(index)
    index.free_cleared(A)
    store(index, keys_of(range(20)))
    drop(index, slabs[1])
    add_slab(index, MIDDLE, 1000)
    store(index, keys_of(range(60, 70), B), MIDDLE)


_WRITABLE = [
    *[(slot_code, name) for name in ("settle_all", "settle_new", "take_free", "evict_pages", "forget_pages")],
    *[(slot_code, name) for name in ("give_back", "describe_pages", "publish_pages", "touch_chain")],
    *[(slot_table.SlotTable, name) for name in ("begin_change", "end_change", "begin_epoch", "begin_epoch_in_order")],
    *[(slot_table, "extend"), (slot_table, "map_words"), (IndexChange, "_look_at")],
]


def die_at(step: int, before: bool, kill: Callable[[], None]) -> None:
    """This process ends at the so-manyth call, from now on, of what writes words or files."""
    calls = iter(range(1 << 20))

    def replaced(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            now = next(calls) == step
            if now and before:
                kill()
            answer = real(*arguments, **options)
            if now:
                kill()
            return answer

        return call

    for owner, name in _WRITABLE:
        setattr(owner, name, replaced(getattr(owner, name)))


def assert_repaired(path: Path, *, alive: bool = False) -> None:
    """The next change makes all sound: what is found has a whole record, and no slot is lost; what a process that is
    still ``alive`` was writing is its own."""
    index = SlabIndex(path)
    slab = add_slab(index, SMALL, 40)
    assert_sound(index)
    assert index._current().epoch % 2 == 0
    with index.changing() as change:
        change.release_dead_writers()
    counts = index.counts()
    assert alive or counts["pending"] == 0
    assert counts["pages"] + counts["free"] + counts["pending"] == sum(slab.slots for slab in index.slabs())
    for page in index.pages():
        assert page.place.length == 1000
        assert index.find(page.key) == page.place
    with index.changing() as change:
        assert change.drop_slab(slab)
    use_everything(index)
    assert_sound(index)
    index.close(sync=False)


@pytest.mark.parametrize("before", [True, False])
def test_a_process_killed_anywhere_in_a_change_leaves_what_the_next_change_repairs(
    tmp_path: Path, before: bool
) -> None:
    left = 0
    for step in range(0, 1 << 20, 2):
        path = tmp_path / str(step)
        pid = os.fork()
        if pid == 0:
            try:
                die_at(step + before, before, lambda: os.kill(os.getpid(), signal.SIGKILL))
                use_everything(SlabIndex(path))
            finally:
                os._exit(0)
        killed = os.waitpid(pid, 0)[1] == signal.SIGKILL
        index = SlabIndex(path)
        left += index.table.was_left_changing
        index.close(sync=False)
        assert_repaired(path)
        if not killed:
            break
    assert step > 60
    assert left > 20


def test_an_exception_anywhere_in_a_change_leaves_what_the_next_change_repairs(tmp_path: Path) -> None:
    class FaultError(Exception):
        pass

    for step in range(0, 1 << 20, 3):
        path = tmp_path / str(step)
        index, failed = SlabIndex(path), False

        def fail() -> None:
            raise FaultError

        with pytest.MonkeyPatch.context() as patch:
            for owner, name in _WRITABLE:
                # What is restored is what die_at replaces.
                patch.setattr(owner, name, getattr(owner, name))
            die_at(step, False, fail)
            try:
                use_everything(index)
            except FaultError:
                failed = True
        index.close(sync=False)
        assert_repaired(path, alive=True)
        if not failed:
            break
    assert step > 60


@pytest.mark.parametrize("seed", range(8))
def test_torn_records_of_a_change_that_died_are_free_slots(index: SlabIndex, seed: int) -> None:
    rng = random.Random(seed)
    slabs = [add_slab(index, SMALL, 70), add_slab(index, MIDDLE, 9)]
    store(index, keys_of(range(50)))
    store(index, keys_of(range(100, 105)), MIDDLE)
    take(index, SMALL, 9)
    records = index._current().records
    torn = rng.sample([row for slab in slabs for row in range(slab.first_record, slab.first_record + slab.slots)], 30)
    whole = set(range(len(records))) - set(torn)
    kept = {key for key in [*keys_of(range(50)), *keys_of(range(100, 105))] if int(rows_of(index, [key])[0]) in whole}
    for row in torn:
        for word in rng.sample(range(slot_code.RECORD_WORDS), rng.randint(1, 4)):
            records[row, word] = rng.choice([rng.randrange(-(1 << 63), 1 << 63), rng.randrange(-2, 5000)])
    index.table.begin_change()
    with index.changing():
        pass
    assert_sound(index)
    assert all(index.contains(sorted(kept)))
    counts = index.counts()
    assert counts["pages"] + counts["free"] + counts["pending"] == 79
    view = index._current()
    for row in view.pages:
        record = view.records[row]
        assert int(slot_code._hash_of(view.records, row)) == record[slot_code.HASH]
    for page in index.pages():
        assert index.find(page.key) == page.place
        assert 0 < page.place.length <= {slab.number: slab.slot_size for slab in slabs}[page.place.slab]


def rows_of(index: SlabIndex, keys: Sequence[bytes]) -> list[int]:
    rows: list[int] = index.rows(index._current(), keys).tolist()
    return rows


# -- against a model ---------------------------------------------------------------------------------------------------


class Model:
    """What is in an index, by the key and generation of a page: its slab and slot."""

    def __init__(self, index: SlabIndex, rng: random.Random) -> None:
        self.index, self.rng = index, rng
        self.slabs: dict[int, Slab] = {}
        self.pages: dict[tuple[bytes, int], tuple[int, int]] = {}
        self.written: dict[tuple[bytes, int], int] = {}
        self.generations = {A: 0, B: 0}
        self.pending: list[tuple[int, SlotReferences, int]] = []
        self.now = 1000

    def chain(self) -> list[bytes]:
        first, identity = self.rng.randrange(150), self.rng.choice([A, B])
        return list(keys_of(range(first, first + self.rng.randint(1, 40)), identity))

    def current(self, key: bytes) -> tuple[bytes, int]:
        return key, self.generations[key[:16]]

    def sizes(self, slot_size: int) -> set[tuple[bytes, int]]:
        return {page for page, place in self.pages.items() if self.slabs[place[0]].slot_size == slot_size}

    def forget(self, pages: set[tuple[bytes, int]]) -> None:
        for page in pages:
            del self.pages[page]

    def stored(self) -> dict[tuple[bytes, int], tuple[int, int]]:
        view = self.index._current()
        return {
            (record[:6].tobytes(), int(record[slot_code.STATE]) >> 16): divmod(int(record[slot_code.PLACE]), 1 << 32)
            for record in view.records[view.pages]
        }

    # -- steps

    def add_slab(self) -> None:
        if len(self.slabs) < 8:
            slab = add_slab(self.index, self.rng.choice([SMALL, SMALL, MIDDLE, LARGE]), self.rng.randint(1, 80))
            assert slab.number not in self.slabs
            self.slabs[slab.number] = slab

    def drop_slab(self) -> None:
        slab = self.rng.choice(list(self.slabs.values()))
        busy = any(slab.number in taken.slabs for _, taken, _ in self.pending)
        assert drop(self.index, slab) is not busy
        if not busy:
            del self.slabs[slab.number]
            self.forget({page for page, place in self.pages.items() if place[0] == slab.number})

    def take(self) -> None:
        slot_size, count = self.rng.choice([SMALL, SMALL, MIDDLE, LARGE]), self.rng.randint(1, 30)
        used = len(self.sizes(slot_size)) + sum(
            len(taken) for _, taken, of_size in self.pending if of_size == slot_size
        )
        slots = sum(slab.slots for slab in self.slabs.values() if slab.slot_size == slot_size)
        portion, taken = take(self.index, slot_size, count)
        assert len(taken) == min(count, slots - used)
        self.pending.append((portion, taken, slot_size))

    def publish(self) -> None:
        if not self.pending:
            return
        portion, taken, _ = self.pending.pop(self.rng.randrange(len(self.pending)))
        keys = self.chain()[: len(taken)]
        # Some twice in the same batch, some not written.
        keys = [self.rng.choice(keys) if self.rng.random() < 0.1 else key for key in (keys * 40)[: len(taken)]]
        written = taken.select(np.array([self.rng.random() < 0.9 for _ in range(len(taken))], bool))
        expected = []
        for slab, slot, _, position in written.pages():
            page = self.current(keys[position])
            expected.append(page not in self.pages)
            if expected[-1]:
                self.pages[page], self.written[page] = (slab, slot), self.now
        with self.index.changing() as change:
            assert change.publish(portion, keys, taken, written) == expected
        if len(taken):
            with self.index.changing() as change:
                assert change.publish(portion, keys, taken, taken) is None

    def give_back(self) -> None:
        if self.pending:
            portion, taken, _ = self.pending.pop()
            with self.index.changing() as change:
                change.give_back(portion, taken)

    def remove(self) -> None:
        key = self.rng.choice(self.chain())
        assert remove(self.index, key) is (self.pages.pop(self.current(key), None) is not None)

    def touch(self) -> None:
        with self.index.changing() as change:
            change.touch(self.chain())

    def evict(self) -> None:
        slot_size, count = self.rng.choice([SMALL, MIDDLE]), self.rng.randint(1, 20)
        before = self.sizes(slot_size)
        pinned = set(self.rng.sample(sorted(before), min(len(before), self.rng.choice([0, 3]))))
        spared = np.unique(np.array([np.frombuffer(key, np.int64)[2] for key, _ in pinned], np.int64))
        with self.index.changing() as change:
            change.evict(slot_size, count, spared)
            evicted = change.evicted
        gone = self.pages.keys() - self.stored().keys()
        assert gone <= before
        assert len(gone) == evicted >= min(count, len(before))
        if len(before) - len(pinned) >= count + len(pinned):
            assert not gone & pinned
        self.forget(gone)

    def clear(self) -> None:
        identity = self.rng.choice([A, B])
        pages = any(key[:16] == identity and of == self.generations[identity] for key, of in self.pages)
        assert clear(self.index, identity) is pages
        self.generations[identity] += pages
        if self.rng.random() < 0.7:
            cleared = {(k, of) for k, of in self.pages if k[:16] == identity and of != self.generations[identity]}
            assert self.index.free_cleared(identity) == len(cleared)
            self.forget(cleared)

    def expire(self) -> None:
        oldest = self.now - self.rng.randint(5, 40)
        expired = {page for page in self.pages if self.written[page] < oldest}
        begin: int | None = 0
        while begin is not None:
            rows, begin = self.index.expired(oldest, begin, 50)
            with self.index.changing() as change:
                change.remove_expired(rows, oldest)
        self.forget(expired)

    # -- what must be true after each

    def assert_same(self) -> None:
        index, rng = self.index, self.rng
        assert_sound(index)
        assert self.stored() == self.pages
        pending = sum(len(taken) for _, taken, _ in self.pending)
        slots = sum(slab.slots for slab in self.slabs.values())
        counts = {"pages": len(self.pages), "pending": pending, "slabs": len(self.slabs)}
        assert index.counts() == counts | {"free": slots - len(self.pages) - pending}
        every = [key_of(number, identity) for number in range(200) for identity in (A, B)]
        rng.shuffle(every)
        for keys in (every, list(keys_of(range(200), B)), keys_of(range(200), A)):
            expected = [self.pages.get(self.current(key)) for key in keys]
            placed, _ = index.locate(keys)
            assert [(p.position, (p.slab, p.slot)) for p in placed.pages()] == [
                (n, place) for n, place in enumerate(expected) if place
            ]
            assert index.contains(keys) == [place is not None for place in expected]
        oldest = rng.choice([0, self.now - 20])
        first = rng.randrange(190)
        for keys in (self.chain(), keys_of(range(first, 200), rng.choice([A, B])), self.chain() + self.chain()):
            there = [self.current(key) in self.pages and self.written[self.current(key)] >= oldest for key in keys]
            assert index.count_leading(keys, oldest) == [*there, False].index(False)
            assert index.contains(keys, oldest) == there


@pytest.mark.parametrize("seed", range(6))
def test_an_index_answers_what_a_model_of_it_does(index: SlabIndex, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng = random.Random(seed)
    model = Model(index, rng)
    monkeypatch.setattr(change_module, "time", type("Clock", (), {"time": staticmethod(lambda: model.now)}))
    steps = [model.add_slab, model.drop_slab, model.remove, model.touch, model.evict, model.clear, model.expire]
    steps += [model.take, model.publish] * 4 + [model.touch, model.give_back]
    model.add_slab()
    most = 0
    for _ in range(150):
        step = rng.choice(steps) if len(model.slabs) > 1 else model.add_slab
        step()
        model.now += rng.randrange(3)
        model.assert_same()
        most = max(most, len(model.pages))
    assert most > 20


# -- chains ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 4159, 4160, 4161, 4300])
def test_a_chain_looked_up_in_portions_ends_where_its_pages_end(index: SlabIndex, length: int) -> None:
    chain = keys_of(range(4300))
    add_slab(index, SMALL, 4400)
    store(index, keys_of(range(length)))
    for oldest in (0, 1):
        assert index.count_leading(chain, oldest) == length
        assert index.count_leading(list(chain), oldest) == length
        assert index.count_leading([*chain[:length], key_of(0, B), *chain], oldest) == length


@pytest.mark.parametrize("gone", [0, 1, 63, 64, 65, 299])
def test_a_chain_with_a_gap_ends_there_whoever_has_the_slot(index: SlabIndex, gone: int) -> None:
    chain = keys_of(range(300))
    add_slab(index, SMALL, 300)
    store(index, chain)
    remove(index, chain[gone])
    assert index.count_leading(chain) == gone
    store(index, [key_of(1000)])
    assert index.count_leading(chain) == gone
    remove(index, key_of(1000))
    store(index, [chain[gone]])
    assert index.count_leading(chain) == 300


def test_pages_of_another_identity_or_generation_are_none_of_the_chain(index: SlabIndex) -> None:
    add_slab(index, SMALL, 300)
    store(index, keys_of(range(100)))
    store(index, keys_of(range(100, 200), B))
    assert index.count_leading(keys_of(range(200))) == 100
    assert index.count_leading([*keys_of(range(100)), *keys_of(range(100, 200), B)]) == 200
    clear(index)
    assert index.count_leading(keys_of(range(200))) == 0
    store(index, keys_of(range(1)))
    assert index.count_leading(keys_of(range(200))) == 1


def test_of_no_pages_none_are_there(index: SlabIndex) -> None:
    for keys in ([], keys_of([])):
        assert index.contains(keys) == []
        assert index.count_leading(keys) == 0
        assert not index.locate(keys)[0]

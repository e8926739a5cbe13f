"""The index of a slab directory: what it answers, against a model of it; identities; slots of dead members."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hicache_ext.errors import IndexBusyError
from hicache_ext.runtime.file_lock import OfdLock
from hicache_ext.storage.contract.store import PageKeys
from hicache_ext.storage.tiers.file.slab import index_words
from hicache_ext.storage.tiers.file.slab.index import EVERY, SlabIndex, milliseconds
from hicache_ext.storage.tiers.file.slab.index_words import CREATED, HASH, HITS, LAST, WRITTEN
from tests.rigs.bare_index import counts, new_index_in
from tests.storage.file.indexes import (
    CAPACITY,
    LARGE,
    MIDDLE,
    SMALL,
    A,
    B,
    add_slab,
    assert_no_slot_lost,
    join,
    key_of,
    keys_of,
    members_of,
    present,
    publish,
    references,
    remove,
    states,
    store,
    take,
)

# -- against a model ---------------------------------------------------------------------------------------------------

_SIZES = st.sampled_from([SMALL, SMALL, MIDDLE, LARGE])
_CHAINS = st.tuples(st.integers(0, 60), st.integers(1, 25), st.sampled_from([A, B]))


class Model(RuleBasedStateMachine):
    """A page may be gone, because its slot was wanted. One that is found is the one that was written last under its
    key since its identity was cleared, and no slot belongs to two."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.context = new_index_in(Path(self.directory.name), CAPACITY)
        self.index = self.context.__enter__()
        self.pages: dict[bytes, tuple[int, int, int]] = {}
        """Key: row, length, when written."""
        self.pending: dict[int, tuple[int, set[int]]] = {}
        """By ticket: slot size, rows."""
        self.now = 1000

    def teardown(self) -> None:
        self.context.__exit__(None, None, None)
        self.directory.cleanup()

    @initialize()
    def begin(self) -> None:
        self.index.register([A, B])
        add_slab(self.index, SMALL, 50)

    @rule(size=_SIZES, slots=st.integers(1, 70))
    def adds_a_slab(self, size: int, slots: int) -> None:
        if len(self.index.view().slabs) < 5:
            add_slab(self.index, size, slots)

    @precondition(lambda self: len(self.index.view().slabs) > 1)
    @rule(data=st.data())
    def drops_a_slab(self, data: st.DataObject) -> None:
        slab = data.draw(st.sampled_from(sorted(self.index.view().slabs.values(), key=lambda slab: slab.number)))
        rows = set(range(slab.first_row, slab.first_row + slab.slots))
        busy = any(rows & taken for _, taken in self.pending.values())
        assert self.index.drop_slab(slab) is not busy
        if not busy:
            gone = [key for key, page in self.pages.items() if page[0] in rows]
            for key in gone:
                del self.pages[key]
            assert not any(self.index.contains(gone))
            self.index.forget_slab(slab)

    @rule(size=_SIZES, count=st.integers(1, 30), evict=st.booleans())
    def takes(self, size: int, count: int, evict: bool) -> None:
        ticket, rows, evicted = take(self.index, count, size, evict=evict)
        others = set().union(*[taken for _, taken in self.pending.values()], set())
        assert len(set(rows.tolist())) == len(rows)
        assert not others & set(rows.tolist())
        slabs = self.index.view().slabs
        numbers, slots = self.index.places_of(rows)
        assert all(slabs[number].slot_size == size for number in numbers.tolist())
        assert all(0 <= slot < slabs[number].slots for number, slot in zip(numbers, slots, strict=True))
        if evict:
            reachable = sum(slab.slots for slab in slabs.values() if slab.slot_size == size)
            used = sum(len(taken) for of, taken in self.pending.values() if of == size)
            assert len(rows) == min(count, reachable - used)
        else:
            assert evicted == 0
        self.pending[ticket] = size, set(rows.tolist())

    @precondition(lambda self: self.pending)
    @rule(data=st.data(), chain=_CHAINS, missing=st.integers(0, 3), back=st.integers(0, 40))
    def publishes(self, data: st.DataObject, chain: tuple[int, int, bytes], missing: int, back: int) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.pending)))
        first, count, identity = chain
        _, taken = self.pending.pop(ticket)
        rows = np.array(sorted(taken), np.int64)
        keys = keys_of(range(first, first + max(count, len(rows))), identity)
        self.now += 1
        lengths = np.arange(len(rows)) % 4096 + self.now % 7
        all_taken = references(rows, np.arange(len(rows)), lengths)
        written = all_taken.select(slice(missing, None))
        oldest = self.now - back
        there = self.index.rows_of(keys, oldest)
        published = self.index.publish(ticket, keys, all_taken, written, oldest, self.now)
        for page, answer in zip(written.pages(), published, strict=True):
            assert answer == int(there[page.position] < 0)
            if answer == 1:
                self.pages[keys[page.position]] = page.row, page.length, self.now
        # Nobody can publish there any more.
        assert set(publish(self.index, ticket, keys, rows)) <= {-1}

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def gives_back(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.pending)))
        _, rows = self.pending.pop(ticket)
        self.index.give_back(np.array(sorted(rows), np.int64), ticket)

    @rule(chain=_CHAINS)
    def removes(self, chain: tuple[int, int, bytes]) -> None:
        first, count, identity = chain
        keys = keys_of(range(first, first + count), identity)
        there = sum(self.index.contains(keys))
        assert remove(self.index, keys) == there
        assert not any(self.index.contains(keys))

    @rule(chain=_CHAINS)
    def uses(self, chain: tuple[int, int, bytes]) -> None:
        first, count, identity = chain
        keys = keys_of(range(first, first + count), identity)
        found = self.index.locate(keys)
        self.index.note_hits(found, keys, len(found))

    @rule(identities=st.sampled_from([[A], [B], None]))
    def clears(self, identities: list[bytes] | None) -> None:
        cleared = [A, B] if identities is None else identities
        self.index.clear(identities)
        self.pages = {key: page for key, page in self.pages.items() if key[:16] not in cleared}
        for identity in cleared:
            assert not any(self.index.contains(keys_of(range(90), identity)))

    @invariant()
    def what_is_found_is_what_was_written(self) -> None:
        every = [key_of(number, identity) for identity in (A, B) for number in range(90)]
        found = self.index.locate(every)
        rows = self.index.memory.rows[found.rows]
        hashes = index_words.hashes_of(np.frombuffer(bytearray(b"".join(every)), np.int64).reshape(-1, 6))
        assert (rows[:, HASH] == hashes[found.positions]).all()
        for page, created in zip(found.pages(), rows[:, CREATED].tolist(), strict=True):
            assert (page.row, page.length, created) == self.pages[every[page.position]]
        assert len(set(found.rows.tolist())) == len(found)
        assert self.index.contains(every) == [n in set(found.positions.tolist()) for n in range(len(every))]
        for identity in (A, B):
            chain = keys_of(range(90), identity)
            there = self.index.contains(chain)
            assert self.index.count_leading(chain) == [*there, False].index(False)
            assert self.index.memory.identities[self.index.number_of(identity)[0], WRITTEN] >= any(there)
        pages = index_words.PAGE
        current = sum(int((states(self.index, slab) == pages).sum()) for slab in self.index.view().slabs.values())
        assert counts(self.index)["pages"] == len(found) <= current

    @invariant()
    def no_slot_is_lost(self) -> None:
        assert_no_slot_lost(self.index)
        assert counts(self.index)["pending"] == sum(len(rows) for _, rows in self.pending.values())


TestIndexLikeAModel = Model.TestCase
TestIndexLikeAModel.settings = settings(max_examples=150, stateful_step_count=35)


# -- chains ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 64, 4299, 4300])
def test_a_chain_ends_where_its_pages_end(index: SlabIndex, length: int) -> None:
    chain = keys_of(range(4300))
    add_slab(index, SMALL, 4400)
    store(index, keys_of(range(length)), evict=False)
    for oldest in (0, 1000):
        assert index.count_leading(chain, oldest) == length
        assert index.count_leading(list(chain), oldest) == length
        assert index.count_leading([*chain[:length], key_of(0, B), *chain], oldest) == length
    assert index.count_leading(chain, 1001) == 0


@pytest.mark.parametrize("gone", [0, 1, 63, 64, 65, 299])
def test_a_chain_with_a_gap_ends_there_whoever_has_the_slot(index: SlabIndex, gone: int) -> None:
    chain = keys_of(range(300))
    add_slab(index, SMALL, 300)
    store(index, chain)
    assert remove(index, [chain[gone]]) == 1
    assert index.count_leading(chain) == gone
    store(index, [key_of(1000)])
    assert index.count_leading(chain) == gone
    remove(index, [key_of(1000)])
    store(index, [chain[gone]])
    assert index.count_leading(chain) == 300


def test_pages_of_another_identity_or_generation_are_none_of_the_chain(index: SlabIndex) -> None:
    add_slab(index, SMALL, 300)
    store(index, keys_of(range(100)))
    store(index, keys_of(range(100, 200), B))
    assert index.count_leading(keys_of(range(200))) == 100
    assert index.count_leading([*keys_of(range(100)), *keys_of(range(100, 200), B)]) == 200
    index.clear([A])
    assert index.count_leading(keys_of(range(200))) == 0
    store(index, keys_of(range(1)))
    assert index.count_leading(keys_of(range(200))) == 1


def test_a_slab_that_cannot_be_is_not_taken_for_an_empty_one(index: SlabIndex) -> None:
    """Who clears drops the empty ones, and looks at every row of them."""
    slab = add_slab(index, SMALL, 50)
    index.memory.slabs[5] = [99, 4096, 10, 1 << 50, index_words.READY, 10, 0, 0]
    assert [empty.number for empty in index.empty_slabs()] == [slab.number]


def test_of_no_pages_none_are_there(index: SlabIndex) -> None:
    keys: list[list[bytes] | PageKeys] = [[], keys_of([])]
    for none in keys:
        assert index.contains(none) == []
        assert index.count_leading(none) == 0
        assert not index.locate(none)


def test_pages_are_known_by_all_of_their_key(index: SlabIndex) -> None:
    add_slab(index, SMALL, 300)
    key = key_of(1)
    store(index, [key])
    others = [key[:at] + bytes([key[at] ^ 1]) + key[at + 1 :] for at in range(len(key))]
    index.register([other[:16] for other in others])
    assert present(index, others) == []
    store(index, others)
    assert len(set(index.rows_of([key, *others]).tolist())) == 49


# -- slabs -------------------------------------------------------------------------------------------------------------


def test_pages_of_a_slab_that_was_dropped_are_gone_before_its_files_are(index: SlabIndex) -> None:
    """Where the files cannot be deleted, they were said to be there for ever, and could not be read."""
    slab = add_slab(index)
    keys = keys_of(range(20))
    store(index, keys)
    assert index.drop_slab(slab)
    assert present(index, keys) == []
    assert index.count_leading(keys) == 0
    add_slab(index)
    assert store(index, keys) == [1] * 20
    assert index.clear([A])[1] == 1


def test_an_identity_whose_pages_went_with_their_slab_has_none(index: SlabIndex) -> None:
    slab = add_slab(index)
    store(index, keys_of(range(20)))
    index.drop_slab(slab)
    assert index.clear([A])[1] == 0


def test_a_slab_that_is_forgotten_twice_leaves_the_next_one_in_its_rows_alone(index: SlabIndex) -> None:
    """Two threads of one process, of which one has come late."""
    slab = add_slab(index)
    index.drop_slab(slab)
    assert index.left_slabs() == [slab]
    index.forget_slab(slab)
    other = add_slab(index)
    assert other.first_row == slab.first_row
    store(index, keys_of(range(20)))
    index.forget_slab(slab)
    assert len(present(index, keys_of(range(20)))) == 20
    assert_no_slot_lost(index)


def test_the_pages_of_a_slab_whose_dropper_died_at_once_go_with_it(index: SlabIndex) -> None:
    members = members_of(index)
    slab = add_slab(index)
    store(index, keys_of(range(20)))
    join(index, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SlabIndex, "_forget_pages", lambda *_: (np.empty(0, np.int64), np.empty(0, np.int64)))
        index.drop_slab(slab)
    join(index, 1)
    assert index.left_slabs() == []
    members.dead.add(2)
    assert index.left_slabs() == [slab]
    assert present(index, keys_of(range(20))) == []
    index.forget_slab(slab)
    assert index.all_slabs() == []


def test_a_slab_with_a_slot_that_somebody_writes_is_not_dropped(index: SlabIndex) -> None:
    members = members_of(index)
    slab = add_slab(index)
    join(index, 2)
    take(index, 1)
    join(index, 1)
    assert not index.drop_slab(slab)
    members.dead.add(2)
    assert index.drop_slab(slab)


# -- slots of the dead -------------------------------------------------------------------------------------------------


def test_slots_of_dead_members_are_free_once_somebody_looks_those_of_live_ones_never(index: SlabIndex) -> None:
    slab, members = add_slab(index), members_of(index)
    kept = {}
    for member in (1, 2, 3):
        join(index, member)
        kept[member] = set(take(index, 10)[1].tolist())
    join(index, 1)
    assert index.free_dead() == 0
    members.dead.add(2)
    assert index.free_dead() == 10
    free = {slab.first_row + slot for slot in np.flatnonzero(states(index, slab) == index_words.FREE).tolist()}
    assert free >= kept[2] and not free & (kept[1] | kept[3])
    assert len(take(index, 40, evict=False)[1]) == 20


def test_what_came_to_a_slot_after_somebody_looked_is_not_seized(index: SlabIndex) -> None:
    """Another process may take the slot for another page, or write the same page once more, before the lock is got."""
    (page, other) = keys_of(range(2))
    add_slab(index, SMALL, 1)
    store(index, [page], now=1000)
    (row,) = index.rows_of([page]).tolist()
    ticket = index.next_ticket()
    assert len(index.seize([page], ticket, only=(row, 999))) == 0
    assert len(index.seize([page], ticket, only=(row + 1, 1000))) == 0
    remove(index, [page])
    store(index, [other], now=1000)
    assert index.rows_of([other]).tolist() == [row]
    assert len(index.seize([page], ticket, only=(row, 1000))) == 0
    assert len(index.seize([page], ticket)) == 0
    assert present(index, [other]) == [0]
    remove(index, [other])
    store(index, [page], now=2000)
    assert len(index.seize([page], ticket, only=(row, 1000))) == 0
    seized = index.seize([page], ticket, only=(row, 2000))
    assert seized.rows.tolist() == [row] and present(index, [page]) == []
    index.give_back(seized.rows, ticket)
    assert_no_slot_lost(index)


def test_a_writer_whose_slots_were_given_to_another_one_publishes_nothing(index: SlabIndex) -> None:
    """It was taken for dead, or the slot was seized."""
    add_slab(index, SMALL, 5)
    members = members_of(index)
    index.register([A])
    join(index, 2)
    ticket, rows, _ = take(index, 5)
    join(index, 1)
    members.dead.add(2)
    assert index.free_dead() == 5
    other, others_rows, _ = take(index, 5)
    members.id = 2
    assert publish(index, ticket, keys_of(range(5)), rows) == [-1] * 5
    index.give_back(rows, ticket)
    members.id = 1
    assert publish(index, other, keys_of(range(5)), others_rows) == [1] * 5


def test_of_a_batch_that_is_given_back_only_what_was_not_published_counts_as_free(index: SlabIndex) -> None:
    """Otherwise the next ones look through whole slabs under the lock."""
    add_slab(index)
    index.register([A])
    ticket, rows, _ = take(index, 8)
    free = int(index.memory.slabs[0, index_words.FREE_SLOTS])
    assert publish(index, ticket, keys_of(range(7)), rows[:7]) == [1] * 7
    index.give_back(rows, ticket)
    assert int(index.memory.slabs[0, index_words.FREE_SLOTS]) == free + 1


def test_a_lock_that_another_process_keeps_costs_its_bound_once(index: SlabIndex, tmp_path: Path) -> None:
    slab = add_slab(index)
    store(index, keys_of(range(5)))
    index._lock._bound = 0.2
    other = OfdLock(tmp_path / "lock", 0)
    assert other.try_acquire()
    waited = []
    for _ in range(3):
        begun = time.monotonic()
        with pytest.raises(IndexBusyError):
            take(index, 1)
        waited.append(time.monotonic() - begun)
    assert waited[0] >= 0.2
    assert index._lock._stuck
    assert max(waited[1:]) < 0.2
    # To look up and to clear takes no lock.
    assert present(index, keys_of(range(5))) == [0, 1, 2, 3, 4]
    index.clear([A])
    assert present(index, keys_of(range(5))) == []
    other.release()
    assert len(take(index, 1)[1]) == 1
    other.close()
    assert slab in index.all_slabs()


# -- identities --------------------------------------------------------------------------------------------------------


def test_a_cleared_identity_is_listed_again_once_it_is_written(index: SlabIndex) -> None:
    add_slab(index)
    store(index, keys_of(range(3)))
    store(index, keys_of(range(3), B))
    assert index.identities() == [A, B]
    assert index.clear([A]) == ([A], 1)
    assert index.identities() == [B]
    # Headers of a writer that was killed before it published them may be on the disk: it is noted again.
    assert index.clear([A]) == ([A], 0)
    assert index.clear(None) == ([EVERY], 1)
    assert index.identities() == []
    assert index.clear(None) == ([EVERY], 0)
    store(index, keys_of(range(3)))
    assert index.identities() == [A]


def test_an_identity_nobody_has_heard_of_is_cleared_while_a_rebuild_may_find_its_pages(index: SlabIndex) -> None:
    assert index.clear([A]) == ([], 0)
    index.memory.header[index_words.REBUILT] = 0
    begun = milliseconds()
    assert index.clear([A]) == ([A], 0)
    assert index.memory.identities[index.register([A])[A], index_words.CLEARED] >= begun


def test_what_was_cleared_of_all_during_a_rebuild_stays_cleared_when_it_is_found(index: SlabIndex) -> None:
    index.memory.header[index_words.REBUILT] = 0
    begun = milliseconds()
    assert index.clear(None) == ([EVERY], 0)
    number = index.register([A])[A]
    assert index.memory.identities[number, index_words.CLEARED] >= begun


def test_a_clear_of_all_while_an_identity_gets_its_number_counts_for_it(index: SlabIndex) -> None:
    index.memory.header[index_words.REBUILT] = 0
    begun = milliseconds()
    real = index._changing

    @contextmanager
    def cleared_just_before() -> Iterator[None]:
        index.clear(None)
        with real():
            yield

    index._changing = cleared_just_before
    number = index.register([A])[A]
    assert index.memory.identities[number, index_words.CLEARED] >= begun


def test_uses_are_counted_until_a_clear(index: SlabIndex) -> None:
    add_slab(index)
    keys = keys_of(range(5))
    store(index, keys)
    uses = index.memory.identities[index.number_of(A)[0], [HITS, LAST]]
    assert uses.tolist() == [0, 0]
    begun = int(time.time())
    index.note_hits(index.locate(keys), keys, 5)
    index.note_hits(index.locate(keys), keys, 3)
    hits, last = index.memory.identities[index.number_of(A)[0], [HITS, LAST]].tolist()
    assert hits == 8
    assert last >= begun
    index.clear([A])
    assert index.memory.identities[index.number_of(A)[0], [HITS, LAST]].tolist() == [0, 0]


def test_a_full_table_of_identities_has_no_number_for_one_more(index: SlabIndex) -> None:
    known = len(index.memory.identities)
    index.register([A])
    index.memory.identities[1:known, 0] = np.arange(1, known)
    index.memory.header[index_words.IDENTITIES] = known
    assert index.register([B, A]) == {B: -1, A: 0}
    add_slab(index)
    assert present(index, keys_of(range(5), B)) == []


def test_bytes_of_pages_are_counted_by_hash_over_all_identities(index: SlabIndex) -> None:
    add_slab(index)
    add_slab(index, MIDDLE)
    store(index, keys_of(range(2)))
    store(index, keys_of(range(1), B), MIDDLE)
    hashes = [key_of(number)[16:] for number in range(3)]
    assert index.occupied_by(hashes) == [SMALL + MIDDLE, SMALL, 0]
    assert index.occupied_by([]) == []


def test_a_slab_that_is_finished_twice_keeps_its_pages(tmp_path: Path) -> None:
    with new_index_in(tmp_path, CAPACITY) as index:
        slab = index.begin_slab(SMALL, lambda _: 40)
        assert slab is not None
        index.finish_slab(slab)
        index.register([A])
        store(index, keys_of(range(10)))
        index.finish_slab(slab)
        assert present(index, keys_of(range(10))) == list(range(10))

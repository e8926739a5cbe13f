"""The index of packs says what the names say, whatever came, went and came again, in whatever order."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from hicache_ext.page.pack import HASH_BYTES, Pack, Tombstone, new_id, short_hash
from hicache_ext.storage.contract import pack_index
from hicache_ext.storage.contract.pack_index import PackIndex, Place, runs

IDENTITY = bytes(16)
KEYS = [IDENTITY + number.to_bytes(6, "big") + bytes(26) for number in range(12)]


def pack_of(numbers: Sequence[int], milliseconds: int = 0, size: int = 1128) -> Pack:
    return Pack.of_keys(new_id(milliseconds), size, [KEYS[number] for number in numbers])


def places(index: PackIndex, keys: Sequence[bytes] = KEYS) -> list[tuple[str, int] | None]:
    return [None if place is None else (place.pack.id, place.position) for place in index.find(keys)]


class _Model(RuleBasedStateMachine):
    """Beside a model: packs and tombstones as sets."""

    packs = Bundle("packs")

    def __init__(self) -> None:
        super().__init__()
        self.index = PackIndex()
        self.known: dict[str, Pack] = {}
        self.dead: set[tuple[str, int]] = set()
        self.tombstones: dict[str, set[Tombstone]] = {}

    @rule(target=packs, numbers=st.lists(st.integers(0, 11), min_size=1, max_size=12), at=st.integers(0, 9))
    def name(self, numbers: list[int], at: int) -> Pack:
        return pack_of(numbers, at)

    @rule(pack=packs)
    def add(self, pack: Pack) -> None:
        assert self.index.add(pack) is (pack.id not in self.known)
        self.known[pack.id] = pack

    @rule(pack=packs, mask=st.integers(0, 2**12 - 1))
    def bury(self, pack: Pack, mask: int) -> None:
        tombstone = Tombstone(new_id(3), pack.id, mask)
        self.tombstones.setdefault(pack.id, set()).add(tombstone)
        self.dead |= {(pack.id, position) for position in range(pack.count) if mask >> position & 1}
        every = all((pack.id, position) in self.dead for position in range(pack.count))
        assert self.index.add_tombstone(tombstone) == (pack if pack.id in self.known and every else None)

    @rule(pack=consumes(packs))
    def forget(self, pack: Pack) -> None:
        self.index.forget(pack.id)
        self.known.pop(pack.id, None)
        self.tombstones.pop(pack.id, None)

    @invariant()
    def the_newest_living_page_is_found(self) -> None:
        expected: list[list[tuple[str, int]]] = []
        for key in KEYS:
            found = [
                (pack.id, position)
                for pack in self.known.values()
                for position in range(pack.count)
                if pack.hashes[position * HASH_BYTES :][:HASH_BYTES] == short_hash(key)
                and (pack.id, position) not in self.dead
            ]
            expected.append(sorted(found))
        assert [sorted((p.pack.id, p.position) for p in some) for some in map(self.index.find_all, KEYS)] == expected
        newest = [max(some)[0] if some else None for some in expected]
        assert [None if place is None else place[0] for place in places(self.index)] == newest

    @invariant()
    def the_rest_is_told(self) -> None:
        assert self.index.ids() == set(self.known)
        assert self.index.page_count == sum(pack.count for pack in self.known.values())
        assert {one for some in self.tombstones.values() for one in some} == {
            one for pack_id in self.tombstones for one in self.index.tombstones_of(pack_id)
        }
        orphans = {one for pack_id, some in self.tombstones.items() if pack_id not in self.known for one in some}
        assert {one for some in self.index.without_packs() for one in some} == orphans


TestIndexBesideAModel = _Model.TestCase
TestIndexBesideAModel.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


@pytest.fixture(autouse=True)
def merged_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that pages are in the arrays, too."""
    monkeypatch.setattr(pack_index, "_FEWEST_MERGED", 5)


def test_a_page_written_again_is_found_in_its_newest_pack_and_then_in_the_older_one() -> None:
    index, old, new = PackIndex(), pack_of([0, 1, 2], 1), pack_of([1], 2)
    # The newer one comes first, as a listing from its own time on would have it.
    index.add(new)
    index.add(old)
    assert places(index)[:3] == [(old.id, 0), (new.id, 0), (old.id, 2)]
    assert index.add_tombstone(Tombstone(new_id(3), new.id, 1)) == new
    assert places(index)[:3] == [(old.id, 0), (old.id, 1), (old.id, 2)]


def test_a_tombstone_that_comes_before_its_pack_counts() -> None:
    index, pack = PackIndex(), pack_of([0, 1])
    assert index.add_tombstone(Tombstone(new_id(3), pack.id, 0b10)) is None
    index.add(pack)
    assert places(index)[:2] == [(pack.id, 0), None]
    index.forget(pack.id)
    index.add(pack)
    assert places(index)[:2] == [(pack.id, 0), (pack.id, 1)]


def test_a_page_that_was_another_one_is_forgotten_alone_and_survives_sorting_in() -> None:
    index, pack = PackIndex(), pack_of([0, 1])
    index.add(pack)
    index.forget_pages(pack.id, 1)
    for at in range(5):
        index.add(pack_of([4, 5, 6], at))
    assert places(index)[:2] == [None, (pack.id, 1)]
    assert index.dead_mask(pack.id) == 0


def test_neighbours_make_one_run_whatever_their_order() -> None:
    pack, other = pack_of(range(6), 1, 1000), pack_of(range(3), 2, 1000)
    wanted = [Place(pack, 3), None, Place(pack, 1), Place(other, 0), Place(pack, 2), Place(pack, 5), Place(pack, 1)]
    found = [(run.pack.id, run.first, run.members, run.offset, run.end) for run in runs(wanted, 1 << 20)]
    assert found == [
        (pack.id, 1, [2], 1000, 2000),
        (pack.id, 1, [6, 4, 0], 1000, 4000),
        (pack.id, 5, [5], 5000, 6000),
        (other.id, 0, [3], 0, 1000),
    ]
    short = runs([Place(pack, position) for position in range(6)], 2500)
    assert [(run.first, len(run.members)) for run in short] == [(0, 2), (2, 2), (4, 2)]
    assert [len(run.members) for run in runs([Place(pack, 0), Place(pack, 1)], 1)] == [1, 1]


def test_packs_that_are_known_longest_make_room_for_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused, a pack that was just stored would be a miss, and be stored again and again."""
    monkeypatch.setattr(pack_index, "MOST_BYTES", 100 * 444)
    index = PackIndex()
    keys = [[IDENTITY + (number * 2 + n).to_bytes(32, "big") for n in range(2)] for number in range(1000)]
    for number in range(1000):
        assert index.add(Pack.of_keys(f"{number:011x}-0000000000", 131_200, keys[number]))
        assert None not in index.find(keys[number])
    assert len(index.packs) <= 101
    assert index.find(keys[0]) == [None, None]
    assert None not in index.find(keys[950])


@pytest.mark.thorough
def test_a_million_pages_take_the_memory_that_is_stated() -> None:
    import tracemalloc

    def measure(packs: int) -> int:
        index = PackIndex()
        for number in range(packs):
            keys = [IDENTITY + (number * 32 + n).to_bytes(32, "big") for n in range(32)]
            index.add(Pack.of_keys(f"{number:011x}-0000000000", 131_200, keys))
        index._merge()
        size, _ = tracemalloc.get_traced_memory()
        assert index.find([IDENTITY + (packs * 32 - 1).to_bytes(32, "big")])[0] is not None
        return size

    tracemalloc.start()
    try:
        assert measure(2000) < 64_000 * (22 + 500 / 32)
    finally:
        tracemalloc.stop()

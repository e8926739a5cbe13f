"""Pages and their slots column by column: what is done with many at once is what is done with each."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hicache_ext.storage.file.slab.groups import Groups
from hicache_ext.storage.file.slab.placed import NONE_PLACED, Located, Placed
from hicache_ext.storage.file.slab.records import Slab

SLABS = {number: Slab(number, size, 500) for number, size in ((0, 4096), (1, 4096), (5, 1 << 20), (9, 1 << 22))}

_pages = st.lists(
    st.builds(
        Located,
        st.integers(0, (1 << 31) - 1) | st.sampled_from([0, 1]),
        st.integers(0, (1 << 32) - 1) | st.integers(0, 5),
        st.integers(0, (1 << 32) - 1),
        st.integers(0, 1 << 20),
    ),
    max_size=30,
)


@given(_pages, _pages)
def test_pages_in_columns_are_the_same_pages(pages: list[Located], others: list[Located]) -> None:
    placed = Placed.of(pages)
    assert (len(placed), placed.pages()) == (len(pages), pages)
    assert [page[:2] for page in placed.by_place().pages()] == sorted(page[:2] for page in pages)
    assert sorted(placed.by_place().pages()) == sorted(pages)
    assert [page.position for page in placed.by_position().pages()] == sorted(page.position for page in pages)
    assert Placed.joined([placed, NONE_PLACED, Placed.of(others)]).pages() == pages + others
    assert placed.select(placed.slots > 3).pages() == [page for page in pages if page.slot > 3]
    in_order = [page.position for page in pages] == list(range(len(pages)))
    assert (placed.are_all(len(pages)), placed.are_all(len(pages) + 1)) == (in_order, False)


@given(
    st.lists(
        st.tuples(st.sampled_from([*SLABS]), st.integers(0, 70), st.integers(0, (1 << 64) - 1), st.binary(max_size=50)),
        max_size=60,
        unique_by=lambda page: page[:2],
    ),
    st.booleans(),
)
def test_many_slots_are_held_as_one_after_the_other(pages: list[tuple[int, int, int, bytes]], neighbours: bool) -> None:
    pages = [(*page[:3], page[3].ljust(50, b"k")) for page in (sorted(pages) if neighbours else pages)]
    one_by_one, together = (Groups(None, None, None, None) for _ in range(2))
    for number, slot, priority, key in pages:
        one_by_one.hold(SLABS[number], slot, priority, key)
    slots, priorities = [page[:2] for page in pages], np.array([page[2] for page in pages], np.uint64)
    together.hold_all(SLABS.__getitem__, slots, priorities, [page[3] for page in pages])
    assert together._held == one_by_one._held

"""Pages and their slots column by column: what is done with many at once is what is done with each."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hicache_ext.storage.tiers.file.slab.shapes import NO_SLOTS, SlotReference, SlotReferences

_pages = st.lists(
    st.builds(
        SlotReference,
        st.integers(0, (1 << 31) - 1) | st.sampled_from([0, 1]),
        st.integers(0, (1 << 32) - 1) | st.integers(0, 5),
        st.integers(0, (1 << 32) - 1),
        st.integers(0, 1 << 20),
        st.integers(-1, 1 << 40),
    ),
    max_size=30,
)


@given(_pages, _pages)
def test_pages_in_columns_are_the_same_pages(pages: list[SlotReference], others: list[SlotReference]) -> None:
    placed = SlotReferences.of(pages)
    assert (len(placed), placed.pages()) == (len(pages), pages)
    assert [page[:2] for page in placed.by_place().pages()] == sorted(page[:2] for page in pages)
    assert sorted(placed.by_place().pages()) == sorted(pages)
    assert [page.position for page in placed.by_position().pages()] == sorted(page.position for page in pages)
    assert SlotReferences.joined([placed, NO_SLOTS, SlotReferences.of(others)]).pages() == pages + others
    assert placed.select(placed.slots > 3).pages() == [page for page in pages if page.slot > 3]

"""What changed between two looks at the tiers."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hicache_ext.storage.serving.events import LONGEST_EVENT, Blocks, Kind, blocks_in, changes_between
from hicache_ext.storage.tiers.memory import MemoryPageStore
from hicache_ext.testing.conformance.pages import IDENTITY, OTHER_IDENTITY
from tests.rigs.kv_events import MEDIA

_BLOCKS = st.dictionaries(st.sampled_from(["DISK", "EXTERNAL"]), st.frozensets(st.integers(-(2**63), 2**63 - 1)))


def blocks(of: dict[str, frozenset[int]]) -> Blocks:
    return {medium: np.array(sorted(found), np.int64) for medium, found in of.items()}


@given(before=_BLOCKS, now=_BLOCKS)
def test_who_applies_the_changes_to_what_was_before_has_what_is_now(before, now):
    index = {medium: set(found) for medium, found in before.items()}
    for change in changes_between(blocks(before), blocks(now)):
        of_medium = index.setdefault(change.medium, set())
        if change.kind is Kind.STORED:
            assert of_medium.isdisjoint(change.blocks)
            of_medium.update(change.blocks)
        else:
            assert of_medium.issuperset(change.blocks)
            of_medium.difference_update(change.blocks)
    assert {medium: found for medium, found in index.items() if found} == {m: set(f) for m, f in now.items() if f}


def test_no_event_is_longer_than_a_subscriber_can_be_asked_to_take():
    now = blocks({"DISK": frozenset(range(LONGEST_EVENT * 3 + 1))})
    assert [len(change.blocks) for change in changes_between({}, now)] == [*[LONGEST_EVENT] * 3, 1]


class ListingStore(MemoryPageStore):
    """Holds what it is told to hold."""

    def __init__(self, name: str, held: dict[bytes, list[int]], *, shared: bool = False) -> None:
        super().__init__(name)
        self.held, self.shared = held, shared

    def block_hashes(self, digest):
        return np.array(self.held.get(digest, []), np.int64)


def test_a_page_counts_where_all_its_parts_are_and_the_medium_is_that_of_the_tier():
    near = ListingStore("near", {IDENTITY: [3, 1, 2, 3], OTHER_IDENTITY: [2, 3, 9]})
    far = ListingStore("far", {IDENTITY: [7], OTHER_IDENTITY: [7]}, shared=True)
    silent = MemoryPageStore("silent")
    found = blocks_in([near, far, silent], [IDENTITY, OTHER_IDENTITY], **MEDIA)
    assert {medium: of.tolist() for medium, of in found.items()} == {"DISK": [2, 3], "EXTERNAL": [7]}


def test_a_page_in_two_tiers_of_one_medium_is_told_once_and_goes_with_the_second():
    first, second = ListingStore("first", {IDENTITY: [1]}), ListingStore("second", {IDENTITY: [1]})
    both = blocks_in([first, second], [IDENTITY], **MEDIA)
    assert {medium: of.tolist() for medium, of in both.items()} == {"DISK": [1]}
    first.held = {}
    one = blocks_in([first, second], [IDENTITY], **MEDIA)
    assert list(changes_between(both, one)) == []
    second.held = {}
    (change,) = changes_between(one, blocks_in([first, second], [IDENTITY], **MEDIA))
    assert (change.kind, list(change.blocks)) == (Kind.REMOVED, [1])


def test_without_an_identity_nothing_is_stored():
    assert blocks_in([ListingStore("near", {b"": [1]})], [], **MEDIA) == {}

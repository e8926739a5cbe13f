"""Pages that a process looks up while others make and drop slabs."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hicache_ext.storage.contract.store import key_words
from hicache_ext.storage.tiers.file.slab.index import SlabIndex, milliseconds
from hicache_ext.storage.tiers.file.slab.index_words import FACTS
from hicache_ext.storage.tiers.file.slab.shapes import SlotReferences
from hicache_ext.testing.conformance.pages import page_keys
from tests.rigs.bare_index import new_index_in


def write(index: SlabIndex, keys: list[bytes], slot_size: int) -> None:
    """Pages in a slab of their own."""
    slab = index.begin_slab(slot_size, lambda _: len(keys))
    assert slab is not None
    index.finish_slab(slab)
    index.register([keys[0][:16]])
    ticket, none = index.next_ticket(), np.empty(0, np.int64)
    rows, *_ = index.take(slot_size, len(keys), ticket, 0, none, evicting=False)
    taken = SlotReferences(*index.places_of(rows), np.full(len(rows), slot_size), np.arange(len(rows)), rows)
    assert index.publish(ticket, keys, taken, taken, 0, milliseconds()) == [1] * len(keys)


def test_pages_of_a_slab_that_is_not_known_yet_are_not_looked_for_in_another_one(tmp_path: Path) -> None:
    """Another process has just made it. Its rows were taken for those of the last slab that was known: good pages were
    read from there, and removed as bad ones."""
    keys = page_keys(12)
    with new_index_in(tmp_path, 1 << 26) as index:
        for first, slot_size in ((0, 4096), (4, 8192), (8, 12288)):
            write(index, keys[first : first + 4], slot_size)
        # The second slab is the one that is not known.
        known = index.view().by_first[[0, 2]]
        chain = [*keys[:2], *keys[4:8], *keys[2:4], *keys[8:]]
        numbers = np.array([index.register([chain[0][:16]])[chain[0][:16]]])
        located = np.empty((5, len(chain)), np.int64)
        count = index.memory.table.locate(key_words(chain), numbers, 0, known, located) >> FACTS
        places = [(slab, slot, chain[position]) for slab, slot, _, position, _ in located[:, :count].T.tolist()]
        assert places == [*((0, n, keys[n]) for n in range(4)), *((2, n, keys[8 + n]) for n in range(4))]


def test_pages_of_a_slab_that_a_killed_process_was_dropping_are_gone_and_can_be_written_again(tmp_path: Path) -> None:
    """They counted as there, and could neither be read nor written, until somebody looked for what was left."""
    keys = page_keys(8)
    with new_index_in(tmp_path, 1 << 26) as index:
        write(index, keys[:4], 4096)
        write(index, keys[4:], 8192)
        assert index.drop_slab(index.view().slabs[0])
        assert index.contains(keys) == [False] * 4 + [True] * 4
        write(index, keys[:4], 4096)
        assert index.contains(keys) == [True] * 8
        assert index.drop_slab(index.view().slabs[1])
        assert index.drop_slab(index.view().slabs[2])
        assert index.clear([keys[0][:16]])[1] == 0, "no identity has pages"

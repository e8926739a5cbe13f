"""An index of pages without their files, for tests and benchmarks of the index alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from hicache_ext.runtime.file_lock import ChangeLock
from hicache_ext.runtime.members import Members
from hicache_ext.storage.tiers.file.slab.index import SlabIndex
from hicache_ext.storage.tiers.file.slab.index_memory import IndexMemory, new_index
from hicache_ext.storage.tiers.file.slab.index_words import FREE, PAGE, PENDING, REBUILT, STATE, STATES, UNKNOWN


@contextmanager
def new_index_in(directory: Path, capacity: int) -> Iterator[SlabIndex]:
    """An empty one. ``directory`` gets locks."""
    members, lock = Members(directory / "members"), ChangeLock(directory / "lock", 0, str(directory))
    memory = IndexMemory(new_index(capacity))
    try:
        index = SlabIndex(memory, lock, members, lambda _: -1)
        index.join()
        index.memory.header[REBUILT] = 1
        yield index
    finally:
        lock.close()
        members.close()
        memory.close()


def counts(index: SlabIndex) -> dict[str, int]:
    """How many slots there are of each kind, and slabs. Cleared pages count as free."""
    slabs = index.view().slabs.values()
    rows = np.concatenate([np.empty(0, np.int64), *[slab.first_row + np.arange(slab.slots) for slab in slabs]])
    states = np.bincount(index.memory.rows[rows, STATE] & STATES, minlength=STATES + 1).tolist()
    pages = int(index.are_found(rows, 0).sum())
    kinds = {"pages": pages, "free": states[FREE] + states[PAGE] - pages, "pending": states[PENDING]}
    return {**kinds, "unknown": states[UNKNOWN], "slabs": len(slabs)}

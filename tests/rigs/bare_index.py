"""An index of pages without their files, for tests and benchmarks of the index alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hicache_ext.runtime.file_lock import ChangeLock
from hicache_ext.runtime.members import Members
from hicache_ext.storage.tiers.file.slab.index import SlabIndex
from hicache_ext.storage.tiers.file.slab.index_memory import IndexMemory, new_index
from hicache_ext.storage.tiers.file.slab.index_words import FREE, PAGE, PENDING, REBUILT, UNKNOWN


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
    of_slabs = [index._count(slab, 0) for slab in index.view().slabs.values()]
    pages = sum(found for found, _ in of_slabs)
    states = sum(kinds for _, kinds in of_slabs) if of_slabs else [0] * 4
    free = int(states[FREE] + states[PAGE]) - pages
    kinds = {"pages": pages, "free": free, "pending": int(states[PENDING]), "unknown": int(states[UNKNOWN])}
    return {**kinds, "slabs": len(of_slabs)}

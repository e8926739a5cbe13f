"""An index of pages without their files, for tests and benchmarks of the index alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hicache_ext.runtime.file_lock import ChangeLock, OfdLock
from hicache_ext.runtime.members import Members
from hicache_ext.storage.tiers.file.slab.index import SlabIndex
from hicache_ext.storage.tiers.file.slab.index_memory import IndexMemory, new_index
from hicache_ext.storage.tiers.file.slab.index_words import REBUILT


@contextmanager
def new_index_in(directory: Path, capacity: int) -> Iterator[SlabIndex]:
    """An empty one. ``directory`` gets locks."""
    members, lock = Members(directory / "members"), ChangeLock(OfdLock(directory / "lock", 0), str(directory))
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

"""What campaigns and tests of processes know of the inside of a slab directory; everything else they ask of stores.

``path`` is always the directory of a tier (PATH of the documents).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from hicache_ext.page.envelope import IDENTITY_LENGTH
from hicache_ext.runtime.file_lock import OfdLock
from hicache_ext.storage.tiers.file.layouts import slab_home
from hicache_ext.storage.tiers.file.slab import index_words
from hicache_ext.storage.tiers.file.slab.directory import SlabDirectory
from hicache_ext.storage.tiers.file.slab.index_words import Words, hashes_of
from hicache_ext.storage.tiers.file.slab.shapes import (
    KEY,
    PAYLOAD_LENGTH,
    Slab,
    SlabFile,
    checked_headers,
    read_headers,
)
from tests.rigs.bare_index import counts

Hold = Literal["change", "joining", "rebuild"]
HOLDS: tuple[Hold, ...] = ("change", "joining", "rebuild")
"""The bytes of PATH/v3/lock, in this order."""
_LONGER_THAN_A_CHANGE = 0.05
_LONG = 60.0
"""Seconds in which any rebuild must end."""


class IndexedPage(NamedTuple):
    """A page that the index has and that was not cleared."""

    slab: Slab
    slot: int
    words: Words
    """Its row."""
    digest: bytes
    """Of its identity."""


@contextmanager
def _opened(path: Path) -> Iterator[SlabDirectory]:
    # The capacity bounds what is written, and nothing is.
    with closing(SlabDirectory(path, "disk", 0)) as directory:
        yield directory


def faults(path: Path) -> list[str]:
    """Every contradiction between the index, the headers and the files of the directory, one sentence each. Nobody may
    be writing."""
    with _opened(path) as directory:
        if not directory.rebuild.wait(_LONG):
            return ["the rebuild of the index does not end"]
        found = []
        wrong = [page for page in indexed_pages(directory) if not _has_its_header(directory, page)]
        if wrong:
            found.append(f"{len(wrong)} pages whose header or seal is another's")
        pages = Counter((page.digest, int(page.words[index_words.HASH])) for page in indexed_pages(directory))
        if several := sum(count > 1 for count in pages.values()):
            found.append(f"{several} pages that are in two slots")
        slabs = sorted(directory.index.all_slabs(), key=lambda slab: slab.first_row)
        if any(one.first_row + one.slots > other.first_row for one, other in pairwise(slabs)):
            found.append("two slabs have rows in common")
        files = {file.name: file.stat().st_size for file in (directory.home / "slabs").iterdir()}
        # Not of those that a killed process was making or dropping.
        for name, size in _files_of(directory.index.view().slabs.values()).items():
            if files.get(name) != size:
                found.append(f"a file of a slab has {files.get(name, 'no')} bytes in place of {size}")
    return found


def follow(path: Path, policy: int) -> None:
    """Have the tier follow another policy from now on, as its miniatures do, whoever is writing."""
    with _opened(path) as directory:
        index = directory.index
        index.memory.header[[index_words.POLICY, index_words.TO_RANK]] = policy, index.view().rows


def unknown_files(path: Path) -> list[str]:
    """Files that belong to no slab of the index."""
    with _opened(path) as directory:
        files = {file.name for file in (directory.home / "slabs").iterdir()}
        return sorted(files - set(_files_of(directory.index.all_slabs())))


def slots_by_state(path: Path) -> dict[str, int]:
    """How many slots hold a page (``pages``), are free (``free``) or are being written (``pending``)."""
    with _opened(path) as directory:
        found = counts(directory.index)
    return {state: found[state] for state in ("pages", "free", "pending")}


def wait_until_rebuilt(path: Path, within: float) -> bool:
    """Whether the index that is being made anew is complete, after ``within`` seconds at most. Some process must have
    the directory open."""
    with _opened(path) as directory:
        return directory.rebuild.wait(within)


def is_being_changed(path: Path) -> bool:
    """Whether a process is amid a change that does not end: stopped, that is. The directory must be in use."""
    lock = OfdLock(slab_home(path) / "lock", HOLDS.index("change"))
    try:
        if lock.acquire(_LONGER_THAN_A_CHANGE):
            lock.release()
            return False
        return True
    finally:
        lock.close()


def hold(path: Path, what: Hold) -> Callable[[], None]:
    """Do in this process, for as long as others like, what takes microseconds: a change of the index, the joining of a
    process, a rebuild. Ends with the returned function or with the process. The directory must be in use."""
    lock = OfdLock(slab_home(path) / "lock", HOLDS.index(what))
    if not lock.acquire(_LONG):
        raise TimeoutError(f"another process holds {what!r} for more than {_LONG:g} s")

    def end() -> None:
        lock.release()
        lock.close()

    return end


def indexed_pages(directory: SlabDirectory) -> Iterator[IndexedPage]:
    memory = directory.index.memory
    for slab in directory.index.view().slabs.values():
        rows = memory.rows[slab.first_row : slab.first_row + slab.slots]
        for slot in np.flatnonzero(rows[:, index_words.STATE] & index_words.STATES == index_words.PAGE).tolist():
            state = int(rows[slot, index_words.STATE])
            if index_words.is_current(memory.identities, state):
                identity = memory.identities[state >> index_words.NUMBER_SHIFT]
                yield IndexedPage(slab, slot, rows[slot].copy(), identity[:2].tobytes())


def _has_its_header(directory: SlabDirectory, page: IndexedPage) -> bool:
    """Whether the header in the place of the page is one of this key, length and seal."""
    with directory.opened(page.slab, SlabFile.HEADERS) as fd:
        headers = read_headers(fd, page.slot, 1)
    seals, valid = checked_headers(headers)
    keys = np.ascontiguousarray(headers[:, KEY])
    return bool(
        valid[0]
        and keys[0].tobytes()[:IDENTITY_LENGTH] == page.digest
        and hashes_of(keys)[0] == page.words[index_words.HASH]
        and headers[0, PAYLOAD_LENGTH] == page.words[index_words.LENGTH]
        and (seals.view(np.int64)[0] == page.words[index_words.SEAL : index_words.SEAL + 2]).all()
    )


def _files_of(slabs: Iterable[Slab]) -> dict[str, int]:
    """Name and size of each file."""
    files: dict[str, int] = {}
    for slab in slabs:
        name = f"{slab.number:08x}-{slab.slot_size}"
        files |= {f"{name}.slab": slab.size, f"{name}.headers": slab.headers_size}
    return files

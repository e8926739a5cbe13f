"""Lists a slab directory for tools that only read (inspection.py): no lock, no change, read permission is enough.

The headers of the pages tell what a start would find. If servers are running and this account may ask them, the index
that they share says which of these pages count. They may be writing, so the list is approximate.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hicache_ext.page.envelope import IDENTITY_LENGTH
from hicache_ext.runtime.access import opened
from hicache_ext.runtime.members import living_members
from hicache_ext.storage.contract.tenants import DEFAULT
from hicache_ext.storage.tiers.file.inspector import Inspector, StoredPage
from hicache_ext.storage.tiers.file.layouts import slab_home
from hicache_ext.storage.tiers.file.slab import index_words
from hicache_ext.storage.tiers.file.slab.directory import cleared_at, slabs_in
from hicache_ext.storage.tiers.file.slab.index import IN_USE, slabs_of
from hicache_ext.storage.tiers.file.slab.index_memory import IndexMemory, index_of_others
from hicache_ext.storage.tiers.file.slab.index_words import Words, are_remembered, hashes_of
from hicache_ext.storage.tiers.file.slab.shapes import (
    CREATED_MS,
    HEADER,
    KEY,
    PAYLOAD_LENGTH,
    Slab,
    SlotReference,
    checked_headers,
    read_headers,
)

_PORTION = 4096
_PATIENCE = 2.0
"""Seconds to wait for servers to hand over their index."""


class SlabListing(Inspector):
    """One directory of slabs."""

    layout = "slab"

    def __init__(self, path: Path) -> None:
        """Read the slabs. Raises OSError as the disk does."""
        super().__init__(path)
        self._slabs_path = slab_home(path) / "slabs"
        self._memory, self.servers_out_of_reach = _memory_of_servers(slab_home(path))
        slabs: list[Slab] = []
        if self._memory is not None:
            table = self._memory.slab_table()
            slabs = slabs_of(table[np.isin(table[:, index_words.SLAB_STATE], IN_USE)])
        else:
            with suppress(FileNotFoundError):
                slabs, _ = slabs_in(self._slabs_path)
        self._slabs = {slab.number: slab for slab in sorted(slabs, key=lambda slab: slab.number)}

    @property
    def remark(self) -> str:
        if not self.servers_out_of_reach:
            return ""
        return (
            "servers use it, and do not tell what is there (they are stopped, or this account may not ask them): "
            "this is what the headers of the pages tell; some of these pages may be gone"
        )

    def pages(self) -> Iterator[StoredPage]:
        if self._memory is not None:
            for slab in self._slabs.values():
                yield from self._pages_of(slab)
            return
        newest: dict[bytes, StoredPage] = {}
        cleared: dict[bytes, float] = {}
        for slab in self._slabs.values():
            for page in self._pages_of(slab):
                if page.identity not in cleared:
                    cleared[page.identity] = cleared_at(self.path, page.identity) / 1000
                known = newest.get(page.key)
                written = page.written or 0.0
                if written > cleared[page.identity] and (known is None or (known.written or 0.0) < written):
                    newest[page.key] = page
        yield from newest.values()

    @property
    def no_space_since(self) -> int:
        """Known only while servers are running."""
        return 0 if self._memory is None else int(self._memory.header[index_words.NO_SPACE_SINCE])

    def uses(self, digest: bytes) -> tuple[int, float] | None:
        """Return an identity's hits and the time of the last; known only while servers are running."""
        if self._memory is None:
            return None
        number = self._numbers(self._memory).get(digest)
        if number is None:
            return None
        hits, last = self._memory.identities[number, [index_words.HITS, index_words.LAST]].tolist()
        return (hits, float(last)) if hits else None

    def tenant_pages(self, names: Sequence[str]) -> dict[str, int]:
        """Return about how many pages these tenants have; known only while servers are running."""
        if self._memory is None:
            return {}
        pages = dict(self._memory.tenants[:, [index_words.TENANT_NAME, index_words.TENANT_PAGES]].tolist()[1:])
        of_default = int(self._memory.tenants[0, index_words.TENANT_PAGES])
        named = {name: pages.get(index_words.tenant_word(name), 0) for name in names if name != DEFAULT}
        return {**named, DEFAULT: of_default}

    def evicted(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return which of these pages are remembered as evicted; known only while servers are running."""
        if self._memory is None or not keys:
            return []
        numbers = self._numbers(self._memory)
        of_known = [key for key in keys if key[:IDENTITY_LENGTH] in numbers]
        of = np.array([numbers[key[:IDENTITY_LENGTH]] for key in of_known], np.int64)
        words = np.frombuffer(bytearray(b"".join(of_known)), np.int64).reshape(-1, index_words.KEY_WORDS)
        remembered = are_remembered(self._memory.identities, self._memory.ghosts, words, of).tolist()
        return [key for key, is_one in zip(of_known, remembered, strict=True) if is_one]

    @staticmethod
    def _numbers(memory: IndexMemory) -> dict[bytes, int]:
        """Return digest -> number for each identity that servers know."""
        known = memory.identities[: int(memory.header[index_words.IDENTITIES]), :2].copy()
        return {digest.tobytes(): number for number, digest in enumerate(known)}

    def _content(self, page: StoredPage) -> bytes | None:
        slab = self._slabs.get(page.place.slab)
        if slab is None or not self._is_there(page):
            return None
        try:
            content = _read_at(self._file(slab, "headers"), HEADER, page.place.slot * HEADER)
            content += _read_at(self._file(slab, "slab"), page.place.length, page.place.slot * slab.slot_size)
        except FileNotFoundError:
            # The slab was dropped meanwhile.
            return None
        return content if self._is_there(page) else None

    def occupied_by(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the bytes of slots that the pages under each of these page hashes take, over all identities."""
        wanted = {page_hash: position for position, page_hash in enumerate(hashes)}
        taken = [0] * len(hashes)
        for page in self.pages() if wanted else ():
            position = wanted.get(page.key[IDENTITY_LENGTH:])
            if position is not None:
                taken[position] += self._slabs[page.place.slab].slot_size
        return taken

    def left_overs(self) -> int:
        """Return the number of slots that killed processes were writing; servers reclaim them on their own."""
        if self._memory is None:
            return 0
        living, left = living_members(slab_home(self.path) / "members"), 0
        for slab in self._slabs.values():
            states = self._memory.rows[slab.first_row : slab.first_row + slab.slots, index_words.STATE].copy()
            pending = states[states & index_words.STATES == index_words.PENDING] >> 8
            left += int((~np.isin(pending, living)).sum())
        return left

    def _pages_of(self, slab: Slab) -> Iterator[StoredPage]:
        """Yield a slab's pages from its headers; if there is an index, only those that it has."""
        with suppress(FileNotFoundError), opened(self._file(slab, "headers")) as fd:
            for begin in range(0, slab.slots, _PORTION):
                headers = read_headers(fd, begin, min(_PORTION, slab.slots - begin))
                seals, valid = checked_headers(headers)
                valid &= (headers[:, PAYLOAD_LENGTH] >= 0) & (headers[:, PAYLOAD_LENGTH] <= slab.slot_size)
                keys = np.ascontiguousarray(headers[:, KEY])
                if self._memory is not None:
                    valid &= self._counts(slab.first_row + begin, keys)
                for at in np.flatnonzero(valid).tolist():
                    length = int(headers[at, PAYLOAD_LENGTH])
                    row = -1 if self._memory is None else slab.first_row + begin + at
                    yield StoredPage(
                        keys[at].tobytes(),
                        HEADER + length,
                        written=int(headers[at, CREATED_MS]) / 1000,
                        place=SlotReference(slab.number, begin + at, length, row=row),
                        seal=seals[at].tobytes(),
                    )

    def _counts(self, first: int, keys: Words) -> npt.NDArray[np.bool_]:
        """Return for each row from ``first`` on whether the index has this page there, and it was not cleared."""
        assert self._memory is not None
        rows, identities = self._memory.rows[first : first + len(keys)], self._memory.identities
        states = rows[:, index_words.STATE].copy()
        of = identities[(states >> index_words.NUMBER_SHIFT) & (len(identities) - 1)]
        counts: npt.NDArray[np.bool_] = (states & index_words.STATES == index_words.PAGE) & (
            rows[:, index_words.HASH] == hashes_of(keys)
        )
        counts &= (of[:, :2] == keys[:, :2]).all(axis=1)
        counts &= index_words.is_current(identities, states)
        return counts

    def _is_there(self, page: StoredPage) -> bool:
        key = np.frombuffer(bytearray(page.key), np.int64).reshape(1, -1)
        return self._memory is None or page.place.row < 0 or bool(self._counts(page.place.row, key)[0])

    def _file(self, slab: Slab, kind: str) -> Path:
        return self._slabs_path / f"{slab.number:08x}-{slab.slot_size}.{kind}"


def servers_out_of_reach(home: Path) -> bool:
    """Return whether servers use the directory but none hands over its index; waits for them up to ``_PATIENCE``."""
    return _memory_of_servers(home)[1]


def _memory_of_servers(home: Path) -> tuple[IndexMemory | None, bool]:
    """Return the index that servers share, read-only, and whether there are servers that cannot be asked."""
    try:
        home_fd = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fd, living = index_of_others(home, home_fd, _PATIENCE)
        finally:
            os.close(home_fd)
        return (None if fd is None else IndexMemory(fd, to_change=False)), fd is None and bool(living)
    except FileNotFoundError:
        return None, False
    except (OSError, ValueError):
        return None, True


def _read_at(path: Path, length: int, offset: int) -> bytes:
    with opened(path) as fd:
        return os.pread(fd, length, offset)

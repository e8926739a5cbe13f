"""Pinned pages: eviction keeps them. Recorded in the directory itself.

::

    PATH/pins/<name>.json      since when, until when, and the hashes of the pages in the order of their chain

A pin names page hashes, which follow from the tokens of a prompt alone: it holds for every model, rank and pool with a
page under such a hash, now or later. All processes on the directory see it within seconds. Pins survive restarts and
rebuilds of the index.

Pinned pages take at most half of a directory's capacity: the pins made first count, and of a pin the first pages of its
chain. A page older than the tier's ``ttl`` goes although it is pinned. Reasons: docs/decisions/layout-and-io-auto.md.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hicache_ext.errors import StoreError
from hicache_ext.page.envelope import PAGE_HASH_LENGTH
from hicache_ext.runtime.access import make_directory
from hicache_ext.runtime.shown import shown_text
from hicache_ext.runtime.whole_file import parsed, read_small, write_whole

logger = logging.getLogger(__name__)

LARGEST_PIN = 1 << 20
"""Most pages of one pin."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LOOK_INTERVAL = 2.0
"""Seconds between two checks for new pins."""
_COUNT_INTERVAL = 10.0
"""Seconds between two counts of what the pinned pages take."""

_LATEST = 1 << 36
"""Seconds since 1970; the year 4147."""

_reported_unreadable: set[Path] = set()

ResidentBytes = Callable[[Sequence[bytes]], list[int]]
"""For page hashes: the bytes of disk that the pages under each take in the directory, over all identities."""


@dataclass(frozen=True, slots=True)
class Pin:
    """Times are wall-clock seconds; ``until`` None: without end."""

    name: str
    created: float
    until: float | None
    hashes: tuple[bytes, ...]

    def over(self, now: float) -> bool:
        return self.until is not None and now >= self.until


def add_pin(path: Path, name: str, hashes: Sequence[bytes], seconds: float | None) -> Pin:
    """Record a pin in the directory ``path``; one of the same name is replaced.

    Raises StoreError on a name that cannot be used, ValueError on hashes that are none, OSError as the disk does.
    """
    if not _NAME.fullmatch(name):
        raise StoreError(f"{name!r} cannot name a pin: up to 64 letters, digits, '.', '_' and '-'")
    if not 0 < len(hashes) <= LARGEST_PIN or any(len(page_hash) != PAGE_HASH_LENGTH for page_hash in hashes):
        raise ValueError(f"{len(hashes)} hashes: 1 to {LARGEST_PIN}, of {PAGE_HASH_LENGTH} bytes each")
    now = time.time()
    pin = Pin(name, now, None if seconds is None else now + seconds, tuple(hashes))
    document = {"created": pin.created, "until": pin.until, "hashes": [page_hash.hex() for page_hash in pin.hashes]}
    directory = path / "pins"
    make_directory(directory)
    write_whole(directory / f"{name}.json", json.dumps(document) + "\n")
    return pin


def remove_pin(path: Path, name: str) -> bool:
    """False when there was none. Raises StoreError where it cannot be removed."""
    if not _NAME.fullmatch(name):
        return False
    try:
        (path / "pins" / f"{name}.json").unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise StoreError(f"{error.filename!r} cannot be removed: {error.strerror}") from error
    return True


def read_pins(path: Path) -> list[Pin]:
    """The pins of a directory that are in force, oldest first."""
    now = time.time()
    pins = [pin for pin in _recorded(path) if not pin.over(now)]
    return sorted(pins, key=lambda pin: (pin.created, pin.name))


def pins_that_are_over(path: Path) -> list[str]:
    """The names of expired pins whose records still exist."""
    now = time.time()
    return [pin.name for pin in _recorded(path) if pin.over(now)]


def honoured(pins: Iterable[Pin], resident: ResidentBytes, limit: int | None) -> tuple[frozenset[bytes], int, bool]:
    """The page hashes that are pinned, the bytes of their pages, and whether some had to be left out.

    ``limit`` is in bytes, None without one.
    """
    ordered = list(dict.fromkeys(page_hash for pin in pins for page_hash in pin.hashes))
    taken = 0
    for position, size in enumerate(resident(ordered) if ordered else []):
        if limit is not None and taken + size > limit:
            return frozenset(ordered[:position]), taken, True
        taken += size
    return frozenset(ordered), taken, False


class PinnedPages:
    """The pinned pages of one directory, kept up to date. Any thread; never raises."""

    def __init__(self, tier: str, path: Path, limit: int | None, resident: ResidentBytes) -> None:
        """``limit``: bytes that pinned pages may take; ``resident`` may raise whatever the directory does."""
        self._tier = tier
        self._path = path
        self._limit = limit
        self._resident = resident
        self._lock = threading.Lock()
        self._look_at = 0.0
        self._count_at = 0.0
        # When the records changed last and the limit, as of the last count.
        self._counted: tuple[int | None, int | None] = (None, limit)
        self._spared: frozenset[bytes] = frozenset()
        self._warned = False

    def set_limit(self, limit: int | None) -> None:
        """Change the limit in bytes; the next ``spared()`` counts anew."""
        self._limit = limit
        self._look_at = 0.0

    def spared(self) -> frozenset[bytes]:
        """The page hashes that are pinned. Mostly free; a few system calls every two seconds."""
        if time.monotonic() >= self._look_at and self._lock.acquire(blocking=False):
            try:
                self._look()
            except Exception:
                # On a failing disk the last known pins stay in force, and eviction goes on.
                logger.exception("tier %s: pins of %s", self._tier, self._path)
            finally:
                self._lock.release()
        return self._spared

    def _look(self) -> None:
        now = time.monotonic()
        self._look_at = now + _LOOK_INTERVAL
        try:
            changed = os.stat(self._path / "pins").st_mtime_ns
        except FileNotFoundError:
            changed = None
        counted = (changed, self._limit)
        if counted == self._counted and (changed is None or now < self._count_at):
            return
        self._counted, self._count_at = counted, now + _COUNT_INTERVAL
        self._spared, taken, left_out = honoured(read_pins(self._path), self._resident, counted[1])
        if left_out and not self._warned:
            logger.warning(
                "tier %s: pinned pages would take more than half of %s; those pinned last are not spared, %d bytes are",
                self._tier,
                self._path,
                taken,
            )
        self._warned = left_out


def _recorded(path: Path) -> Iterator[Pin]:
    """Every pin, also of the past. Unreadable ones are left out, with one warning: pins are read every few seconds."""
    try:
        files = sorted((path / "pins").glob("*.json"))
    except OSError:
        return
    for file in files:
        try:
            yield _read_pin(file)
        except FileNotFoundError:
            continue
        except (OSError, ValueError, KeyError, TypeError) as error:
            if file not in _reported_unreadable:
                _reported_unreadable.add(file)
                logger.warning("pin %s cannot be read and does not count: %s", shown_text(file), shown_text(error))


def _read_pin(file: Path) -> Pin:
    """Raises OSError, ValueError, KeyError or TypeError when the file holds no pin."""
    document = parsed(read_small(file))
    if document is None:
        raise ValueError("not a JSON object")
    until = document["until"]
    hashes = tuple(bytes.fromhex(text) for text in document["hashes"])
    if any(len(page_hash) != PAGE_HASH_LENGTH for page_hash in hashes):
        raise ValueError("a hash of another length")
    created = _moment(document["created"])
    if created >= _LATEST:
        raise ValueError("made at a time that no calendar has")
    return Pin(file.stem, created, None if until is None else _moment(until), hashes)


def _moment(seconds: object) -> float:
    if isinstance(seconds, int | float) and 0 <= seconds < sys.float_info.max:
        return float(seconds)
    raise ValueError("a time that is none")

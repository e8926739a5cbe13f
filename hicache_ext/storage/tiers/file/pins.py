"""Pinned pages, which eviction keeps. Pins are recorded in the directory itself.

::

    PATH/pins/<name>.json      start and end, and the hashes of the pages in the order of their chain
    PATH/pins/@<hash>.<until>.<pages>.<namespace>.json     a lease, which a request asked for: a pin that always ends

A pin names page hashes, which follow from the tokens of a prompt alone: it applies to every model, rank and pool with a
page under such a hash, now or later. All processes on the directory see it within seconds. Pins survive restarts and
rebuilds of the index.

Pinned pages take at most half of a directory's capacity: older pins take precedence, and within a pin the first pages
of its chain. Pins do not protect from the tier's ``ttl``. Reasons: docs/decisions/layout-and-io-auto.md.

Leases get what pins leave of that half, for pages that are there. Each namespace (salt, extra key) first gets the lease
that ends first, whose prompt is wanted soonest; then each gets its next one, and so on. The name of a lease,
which no ``pin`` can have, gives the last page's hash, the end in seconds since 1970, the number of pages and the
namespace, so that leases can be counted and removed without reading them. If there are too many, the first lease of a
namespace displaces the last-ending lease of the namespace that holds the most. Reasons: docs/decisions/tenants.md.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import re
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hicache_ext.errors import StoreError
from hicache_ext.page.envelope import PAGE_HASH_LENGTH
from hicache_ext.runtime.access import make_directory
from hicache_ext.runtime.shown import shown_text
from hicache_ext.runtime.whole_file import parsed, read_small, write_whole

logger = logging.getLogger(__name__)

LARGEST_PIN = 1 << 20
"""Most pages of one pin."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LEASE = re.compile(r"@([0-9a-f]{32})\.([0-9]{1,11})\.([0-9]{1,7})\.([0-9a-z]{0,16})")
_MOST_LEASED = 1 << 17
"""Most pages of all leases of a directory together: their hashes take 8 MiB as files."""
_LEAST_LEASED = 128
"""Fewest pages that a lease counts as, so that there are at most 1,024 leases."""
_MAX_RUN = 16
"""Longest run of consecutive pages of a leased prompt that may all be in one other directory. If a run is longer, its
pages are missing, and the pages after it are not kept."""
_MOST_PATHS = 64
_FIRST_LEASES = 16
_COUNT_PART = 32
"""Pages are counted again once 1/32 as many were stored as the last count looked up."""
_PAUSE = 20
"""Pause between two counts, as a multiple of the time that a count takes."""
_LONGEST_LEASE = 366 * 86400.0
_LARGEST_SKEW = 3600.0
"""Seconds. A lease that starts later or lasts longer than this allows comes from a wrong clock, and is over."""
_LOOK_INTERVAL = 2.0
"""Seconds between two checks for new pins."""
_COUNT_INTERVAL = 10.0
"""Seconds between two counts of what the pinned pages take."""

_LATEST = 1 << 36
"""Seconds since 1970; the year 4147."""

_reported_unreadable: set[Path] = set()

ResidentBytes = Callable[[Sequence[bytes]], list[int]]
"""Returns the bytes of disk that the pages under each page hash take in the directory, over all identities."""


@dataclass(frozen=True, slots=True)
class Pin:
    """A pin or a lease. Times are wall-clock seconds; ``until`` None: it does not end."""

    name: str
    created: float
    until: float | None
    hashes: tuple[bytes, ...]
    paths: int = 1
    """Number of directories over which a lease's pages are spread: most pages are not in this one."""

    @property
    def namespace(self) -> str:
        """Namespace in the name of a lease."""
        return self.name.rpartition(".")[2]

    @property
    def is_lease(self) -> bool:
        return self.name.startswith("@")

    def is_over(self, now: float) -> bool:
        if self.is_lease and (self.created > now + _LARGEST_SKEW or _is_over(self.until or 0.0, now)):
            return True
        return self.until is not None and now >= self.until


def _is_over(until: float, now: float) -> bool:
    """Return whether a lease with this end is over."""
    return not now < until <= now + _LONGEST_LEASE + _LARGEST_SKEW


PinCache = dict[Path, tuple[tuple[int, int, int], Pin]]
"""File of a pin -> its signature (mtime, size, inode), which shows changes, and the pin read from it."""


def add_pin(path: Path, name: str, hashes: Sequence[bytes], seconds: float | None) -> Pin:
    """Record a pin in the directory ``path``, replacing one of the same name.

    Raises StoreError for an invalid name, ValueError for invalid hashes, and the disk's OSError.
    """
    if not _NAME.fullmatch(name):
        raise StoreError(f"{name!r} cannot name a pin: up to 64 letters, digits, '.', '_' and '-'")
    if not 0 < len(hashes) <= LARGEST_PIN or any(len(page_hash) != PAGE_HASH_LENGTH for page_hash in hashes):
        raise ValueError(f"{len(hashes)} hashes: 1 to {LARGEST_PIN}, of {PAGE_HASH_LENGTH} bytes each")
    now = time.time()
    pin = Pin(name, now, None if seconds is None else now + seconds, tuple(hashes))
    _record(path, pin)
    return pin


def _record(path: Path, pin: Pin) -> None:
    document: dict[str, Any] = {"created": pin.created, "until": pin.until, "paths": pin.paths}
    document["hashes"] = [page_hash.hex() for page_hash in pin.hashes]
    directory = path / "pins"
    make_directory(directory)
    write_whole(directory / f"{pin.name}.json", json.dumps(document) + "\n")


def add_lease(path: Path, hashes: Sequence[bytes], seconds: float, namespace: str, paths: int = 1) -> bool:
    """Record a lease on the pages of a prompt, unless one exists that ends no sooner. It replaces leases on prefixes of
    this prompt that end no later. ``namespace``: up to 16 digits and lowercase letters; ``paths``: the number of
    directories over which its pages are spread. Return False if there are too many leases. Raises OSError."""
    now, seconds = time.time(), min(seconds, _LONGEST_LEASE)
    short_hashes, leases = {_lease_hash(page_hash) for page_hash in hashes}, _leases(path)
    until, last = now + seconds, _lease_hash(hashes[-1])
    if any(lease[0] == last and lease[1] + 1 >= until and lease[2] == len(hashes) for lease in leases.values()):
        return True
    replaced = {name: lease for name, lease in leases.items() if lease[0] in short_hashes and lease[1] <= until + 1}
    left = {name: lease for name, lease in leases.items() if name not in replaced}
    if (displaced := _displaced(left, len(hashes), namespace)) is None:
        return False
    name = f"@{last}.{math.ceil(until)}.{len(hashes)}.{namespace}"
    _record(path, Pin(name, now, until, tuple(hashes), paths))
    _remove_leases(path, (replaced.keys() | displaced) - {name})
    return True


def _displaced(leases: Mapping[str, _Lease], pages: int, namespace: str) -> set[str] | None:
    """Return the names of leases to remove for one of ``pages`` pages; None if it gets no room."""
    left = {name: max(lease[2], _LEAST_LEASED) for name, lease in leases.items()}
    wanted = max(pages, _LEAST_LEASED)
    if sum(left.values()) + wanted <= _MOST_LEASED:
        return set()
    if any(lease[3] == namespace for lease in leases.values()):
        return None
    while sum(left.values()) + wanted > _MOST_LEASED:
        by_namespace: dict[str, list[str]] = defaultdict(list)
        for name in left:
            by_namespace[leases[name][3]].append(name)
        most = max(by_namespace.values(), key=lambda names: sum(left[name] for name in names), default=[])
        if sum(left[name] for name in most) <= wanted:
            return None
        del left[max(most, key=lambda name: leases[name][1])]
    return leases.keys() - left.keys()


def end_leases(path: Path, hashes: Sequence[bytes]) -> int:
    """End the leases on prompts whose last page is one of these; return their number. Raises OSError."""
    last_pages = {_lease_hash(page_hash) for page_hash in hashes}
    return _remove_leases(path, {name for name, lease in _leases(path).items() if lease[0] in last_pages})


def _lease_hash(page_hash: bytes) -> str:
    return page_hash.hex()[:32]


_Lease = tuple[str, int, int, str]
"""Hash of the last page, end, number of pages, and namespace."""


def _leases(path: Path) -> dict[str, _Lease]:
    """Return the leases by name, parsed from their names. Removes those that are over."""
    try:
        names = [file.removesuffix(".json") for file in os.listdir(path / "pins")]
    except FileNotFoundError:
        return {}
    matches = {name: lease for name in names if (lease := _LEASE.fullmatch(name))}
    found = {name: (lease[1], int(lease[2]), int(lease[3]), lease[4]) for name, lease in matches.items()}
    now = time.time()
    expired = {name for name, lease in found.items() if _is_over(lease[1], now)}
    _remove_leases(path, expired)
    return {name: lease for name, lease in found.items() if name not in expired}


def _remove_leases(path: Path, names: Set[str]) -> int:
    removed = 0
    for name in names:
        with suppress(OSError):  # a directory under such a name, say
            (path / "pins" / f"{name}.json").unlink(missing_ok=True)
            removed += 1
    return removed


def remove_pin(path: Path, name: str) -> bool:
    """Remove a pin or lease; return False if there was none. Raises StoreError if it cannot be removed."""
    if not (_NAME.fullmatch(name) or _LEASE.fullmatch(name)):
        return False
    try:
        (path / "pins" / f"{name}.json").unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise StoreError(f"{error.filename!r} cannot be removed: {error.strerror}") from error
    return True


def read_pins(path: Path, known: PinCache | None = None) -> list[Pin]:
    """Return the pins of a directory that are in force, including leases, oldest first. ``known``: files read before;
    changed ones are read again, and those that are gone are forgotten."""
    now = time.time()
    pins = [pin for pin in _recorded_pins(path, known) if not pin.is_over(now)]
    return sorted(pins, key=lambda pin: (pin.created, pin.name))


def pins_that_are_over(path: Path) -> list[str]:
    """Return the names of expired pins whose records still exist."""
    now = time.time()
    return [pin.name for pin in _recorded_pins(path) if pin.is_over(now)]


def _by_precedence(pins: Sequence[Pin]) -> list[Pin]:
    """Order by precedence: pins in the given order; then the lease of each namespace that ends first, then the next of
    each, and so on."""
    by_end = sorted((pin for pin in pins if pin.is_lease), key=lambda lease: lease.until or 0.0)
    numbers: dict[str, Iterator[int]] = defaultdict(itertools.count)
    turns = [(next(numbers[lease.namespace]), lease) for lease in by_end]
    leases = [lease for _, lease in sorted(turns, key=lambda turn: turn[0])]
    return [*(pin for pin in pins if not pin.is_lease), *leases]


def kept_pages(
    pins: Sequence[Pin], resident: ResidentBytes, limit: int | None
) -> tuple[frozenset[bytes], frozenset[bytes], int]:
    """Return the page hashes that are pinned, those that are pinned or leased, up to ``limit`` bytes, and the number of
    hashes looked up.

    Pins include absent pages. A lease covers only the prefix that is there: nobody can use pages after a gap.
    """
    left, is_full = math.inf if limit is None else limit, False
    pinned: set[bytes] = set()
    leased: set[bytes] = set()
    sizes: dict[bytes, int] = {}
    ordered, step = _by_precedence(pins), sum(not pin.is_lease for pin in pins) + _FIRST_LEASES
    while ordered:
        # Take few, growing steps: each one lists all page files.
        some, ordered, step = ordered[:step], ordered[step:], 8 * step
        named = list({page_hash: None for pin in some for page_hash in pin.hashes if page_hash not in sizes})
        sizes.update(zip(named, resident(named), strict=True))
        for pin in some:
            missing, max_missing = 0, _MAX_RUN * (pin.paths - 1) if pin.is_lease else math.inf
            kept = leased if pin.is_lease else pinned
            if is_full and not pin.is_lease:
                continue
            for page_hash in pin.hashes:
                missing = 0 if sizes[page_hash] else missing + 1
                if missing > max_missing:
                    break
                if page_hash in pinned or page_hash in leased or (missing and kept is leased):
                    continue
                if sizes[page_hash] > left:
                    if pin.is_lease:
                        return frozenset(pinned), frozenset(pinned | leased), len(sizes)
                    is_full = True
                    break
                left -= sizes[page_hash]
                kept.add(page_hash)
    return frozenset(pinned), frozenset(pinned | leased), len(sizes)


def count_after(looked_up: int) -> int:
    """Return how many pages may be stored before the next count, after one that looked up ``looked_up`` pages."""
    return looked_up // _COUNT_PART + 1


class PinnedPages:
    """The pinned pages of one directory, kept up to date. Thread-safe; never raises."""

    def __init__(
        self,
        tier: str,
        path: Path,
        limit: int | None,
        resident: ResidentBytes,
        stored: Callable[[], int] = lambda: 0,
    ) -> None:
        """``limit``: bytes that pinned pages may take. ``resident`` may raise any error of the directory. ``stored``
        returns the number of pages ever stored, where that is known."""
        self._tier = tier
        self._path = path
        self._limit = limit
        self._resident = resident
        self._stored = stored
        self._lock = threading.Lock()
        self._look_at = 0.0
        self._count_at = 0.0
        self._count_at_stored = 0
        """Number of pages ever stored at which to count again."""
        self._pause_until = 0.0
        # The mtime of the records and the limit, as of the last count.
        self._counted: tuple[int | None, int | None] = (None, limit)
        self._pinned = self._spared = frozenset[bytes]()
        self._known: PinCache = {}
        self._warned = False

    def set_limit(self, limit: int | None) -> None:
        """Change the limit in bytes; the next ``spared()`` counts again."""
        self._limit = limit
        self._pause_until = 0.0
        self.look_soon()

    def look_soon(self) -> None:
        """Check the records on the next ``spared()``, because one has changed."""
        self._look_at = 0.0

    def spared(self, *, leased: bool = True) -> frozenset[bytes]:
        """Return the page hashes that are pinned or ``leased``. Cheap: a few system calls every two seconds."""
        now = time.monotonic()
        if now < self._pause_until:
            return self._spared if leased else self._pinned
        changed = self._known and self._stored() >= self._count_at_stored
        if (changed or now >= self._look_at) and self._lock.acquire(blocking=False):
            try:
                self._look()
            except Exception:
                # On a failing disk, the last known pins stay in force and eviction continues.
                self._pause_until = time.monotonic() + _COUNT_INTERVAL
                logger.exception("tier %s: pins of %s", self._tier, self._path)
            finally:
                self._lock.release()
        return self._spared if leased else self._pinned

    def _look(self) -> None:
        now, stored = time.monotonic(), self._stored()
        self._look_at = now + _LOOK_INTERVAL
        try:
            changed = os.stat(self._path / "pins").st_mtime_ns
        except FileNotFoundError:
            changed = None
        counted = (changed, self._limit)
        is_due = now >= self._count_at or stored >= self._count_at_stored
        if counted == self._counted and (changed is None or not is_due):
            return
        self._counted, self._count_at = counted, now + _COUNT_INTERVAL
        recorded = read_pins(self._path, self._known)
        self._pinned, self._spared, looked_up = kept_pages(recorded, self._resident, counted[1])
        is_limited = not all(self._pinned.issuperset(pin.hashes) for pin in recorded if not pin.is_lease)
        self._count_at_stored = stored + count_after(looked_up)
        ended = time.monotonic()
        self._pause_until = ended + _PAUSE * (ended - now)
        if is_limited and not self._warned:
            logger.warning(
                "tier %s: pinned pages would take more than half of %s; those pinned last are not spared, %d pages are",
                self._tier,
                self._path,
                len(self._pinned),
            )
        self._warned = is_limited


def _recorded_pins(path: Path, known: PinCache | None = None) -> Iterator[Pin]:
    """Yield every pin, expired ones, too. Skips unreadable ones, warning once: pins are read every few seconds."""
    try:
        files = sorted((path / "pins").glob("*.json"))
    except OSError:
        return
    known = {} if known is None else known
    for gone in known.keys() - set(files):
        del known[gone]
    for file in files:
        try:
            status = os.stat(file)
            signature = status.st_mtime_ns, status.st_size, status.st_ino
            if known.get(file, (None,))[0] != signature:
                known[file] = signature, _read_pin(file)
            yield known[file][1]
        except FileNotFoundError:
            continue
        except (OSError, ValueError, KeyError, TypeError) as error:
            if file not in _reported_unreadable:
                _reported_unreadable.add(file)
                logger.warning("pin %s cannot be read and does not count: %s", shown_text(file), shown_text(error))


def _read_pin(file: Path) -> Pin:
    """Read a pin. Raises OSError, ValueError, KeyError or TypeError if the file holds none."""
    document = parsed(read_small(file))
    if document is None:
        raise ValueError("not a JSON object")
    until = document["until"]
    hashes = tuple(bytes.fromhex(text) for text in document["hashes"])
    if any(len(page_hash) != PAGE_HASH_LENGTH for page_hash in hashes):
        raise ValueError("a hash of another length")
    created = _parse_time(document["created"])
    if created >= _LATEST:
        raise ValueError("made at a time that no calendar has")
    if (lease := _LEASE.fullmatch(file.stem)) is None and file.stem.startswith("@"):
        raise ValueError("no lease has such a name")
    if lease is None:
        return Pin(file.stem, created, None if until is None else _parse_time(until), hashes)
    # The name limits the lease, because leases are counted by their names.
    hashes = hashes[: int(lease[3])]
    paths = document.get("paths")
    paths = paths if isinstance(paths, int) and 0 < paths <= _MOST_PATHS else 1
    return Pin(file.stem, created, min(_parse_time(until), float(lease[2])), hashes, paths)


def _parse_time(seconds: object) -> float:
    if isinstance(seconds, int | float) and not isinstance(seconds, bool) and 0 <= seconds < sys.float_info.max:
        return float(seconds)
    raise ValueError("a time that is none")

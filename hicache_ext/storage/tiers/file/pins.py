"""Pinned pages: eviction keeps them. Recorded in the directory itself.

::

    PATH/pins/<name>.json      since when, until when, and the hashes of the pages in the order of their chain
    PATH/pins/@<hash>.<until>.<pages>.<namespace>.json     a lease, which a request asked for: a pin that always ends

A pin names page hashes, which follow from the tokens of a prompt alone: it holds for every model, rank and pool with a
page under such a hash, now or later. All processes on the directory see it within seconds. Pins survive restarts and
rebuilds of the index.

Pinned pages take at most half of a directory's capacity: the pins made first count, and of a pin the first pages of its
chain. A page older than the tier's ``ttl`` goes although it is pinned. Reasons: docs/decisions/layout-and-io-auto.md.

Leases take what pins leave of that half, for the pages that are there: each namespace (salt, extra key) gets the lease
that ends first, whose prompt is wanted soonest, then each its next one. No ``pin`` has the name of a lease, which says
what it is about (the last page's hash, an end in seconds since 1970, a number of pages, whose): records need not be
read to be counted or removed. Where there are too many, the first lease of a namespace displaces the one that ends last
of the namespace that has the most. Reasons: docs/decisions/tenants.md.
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
"""Pages of all leases of a directory: their hashes take 8 MiB as files."""
_LEAST_LEASED = 128
"""Pages that each lease counts as, at least: so there are at most 1,024."""
_ELSEWHERE = 16
"""Pages of a leased prompt, one after another, that may all lie in one other directory. One more is missing, and what
is behind it is not kept."""
_MOST_PATHS = 64
_FIRST_LEASES = 16
_COUNT_PART = 32
"""Pages are counted again as soon as a 32nd part as many were stored as the last count looked up, but counting takes no
more than a 20th part of the time."""
_PAUSE = 20
_LONGEST_LEASE = 366 * 86400.0
_LARGEST_SKEW = 3600.0
"""Seconds. A lease that would last longer, or is from later, was made by a clock that was wrong, and is over."""
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
    paths: int = 1
    """Over which these pages are spread, so that most are not in this directory."""

    @property
    def namespace(self) -> str:
        """Of a lease."""
        return self.name.rpartition(".")[2]

    @property
    def is_lease(self) -> bool:
        return self.name.startswith("@")

    def over(self, now: float) -> bool:
        if self.is_lease and (self.created > now + _LARGEST_SKEW or _is_over(self.until or 0.0, now)):
            return True
        return self.until is not None and now >= self.until


def _is_over(until: float, now: float) -> bool:
    """Of a lease."""
    return not now < until <= now + _LONGEST_LEASE + _LARGEST_SKEW


Known = dict[Path, tuple[tuple[int, int, int], Pin]]
"""Of files of pins: what told that they changed (time, size, inode), and what was read."""


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
    _record(path, pin)
    return pin


def _record(path: Path, pin: Pin) -> None:
    document: dict[str, Any] = {"created": pin.created, "until": pin.until, "paths": pin.paths}
    document["hashes"] = [page_hash.hex() for page_hash in pin.hashes]
    directory = path / "pins"
    make_directory(directory)
    write_whole(directory / f"{pin.name}.json", json.dumps(document) + "\n")


def add_lease(path: Path, hashes: Sequence[bytes], seconds: float, namespace: str, paths: int = 1) -> bool:
    """Record a lease on the pages of a prompt, unless there is one that ends no sooner; it takes the place of those on
    the beginnings of this prompt that end no later. ``namespace``: up to 16 digits and small letters; ``paths``: over
    how many directories its pages are spread. False where there are too many leases. Raises OSError."""
    now, seconds = time.time(), min(seconds, _LONGEST_LEASE)
    own, leases = {_lease_hash(page_hash) for page_hash in hashes}, _leases(path)
    until, last = now + seconds, _lease_hash(hashes[-1])
    if any(lease[0] == last and lease[1] + 1 >= until and lease[2] == len(hashes) for lease in leases.values()):
        return True
    replaced = {name: lease for name, lease in leases.items() if lease[0] in own and lease[1] <= until + 1}
    left = {name: lease for name, lease in leases.items() if name not in replaced}
    if (displaced := _displaced(left, len(hashes), namespace)) is None:
        return False
    name = f"@{last}.{math.ceil(until)}.{len(hashes)}.{namespace}"
    _record(path, Pin(name, now, until, tuple(hashes), paths))
    _remove_leases(path, (replaced.keys() | displaced) - {name})
    return True


def _displaced(leases: Mapping[str, _Lease], pages: int, namespace: str) -> set[str] | None:
    """The names of leases that make room for one of so many pages; None where there is none for it."""
    left = {name: max(lease[2], _LEAST_LEASED) for name, lease in leases.items()}
    wanted = max(pages, _LEAST_LEASED)
    if sum(left.values()) + wanted <= _MOST_LEASED:
        return set()
    if any(lease[3] == namespace for lease in leases.values()):
        return None
    while sum(left.values()) + wanted > _MOST_LEASED:
        of_each: dict[str, list[str]] = defaultdict(list)
        for name in left:
            of_each[leases[name][3]].append(name)
        most = max(of_each.values(), key=lambda names: sum(left[name] for name in names), default=[])
        if sum(left[name] for name in most) <= wanted:
            return None
        del left[max(most, key=lambda name: leases[name][1])]
    return leases.keys() - left.keys()


def end_leases(path: Path, hashes: Sequence[bytes]) -> int:
    """End the leases on prompts whose last page is one of these; how many. Raises OSError."""
    own = {_lease_hash(page_hash) for page_hash in hashes}
    return _remove_leases(path, {name for name, lease in _leases(path).items() if lease[0] in own})


def _lease_hash(page_hash: bytes) -> str:
    return page_hash.hex()[:32]


_Lease = tuple[str, int, int, str]
"""The last page, the end, how many pages, and the namespace."""


def _leases(path: Path) -> dict[str, _Lease]:
    """What the name of each says. Those that are over are removed."""
    try:
        names = [file.removesuffix(".json") for file in os.listdir(path / "pins")]
    except FileNotFoundError:
        return {}
    matches = {name: lease for name in names if (lease := _LEASE.fullmatch(name))}
    found = {name: (lease[1], int(lease[2]), int(lease[3]), lease[4]) for name, lease in matches.items()}
    now = time.time()
    over = {name for name, lease in found.items() if _is_over(lease[1], now)}
    _remove_leases(path, over)
    return {name: lease for name, lease in found.items() if name not in over}


def _remove_leases(path: Path, names: Set[str]) -> int:
    removed = 0
    for name in names:
        with suppress(OSError):  # a directory under such a name, say
            (path / "pins" / f"{name}.json").unlink(missing_ok=True)
            removed += 1
    return removed


def remove_pin(path: Path, name: str) -> bool:
    """False when there was none. Raises StoreError where it cannot be removed."""
    if not (_NAME.fullmatch(name) or _LEASE.fullmatch(name)):
        return False
    try:
        (path / "pins" / f"{name}.json").unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise StoreError(f"{error.filename!r} cannot be removed: {error.strerror}") from error
    return True


def read_pins(path: Path, known: Known | None = None) -> list[Pin]:
    """The pins of a directory that are in force, oldest first, leases among them. ``known``: files that were read
    before, which are read again where they changed, and forgotten where they are gone."""
    now = time.time()
    pins = [pin for pin in _recorded(path, known) if not pin.over(now)]
    return sorted(pins, key=lambda pin: (pin.created, pin.name))


def pins_that_are_over(path: Path) -> list[str]:
    """The names of expired pins whose records still exist."""
    now = time.time()
    return [pin.name for pin in _recorded(path) if pin.over(now)]


def _in_order(pins: Sequence[Pin]) -> list[Pin]:
    """The order in which they count: pins as they come; then of each namespace the lease that ends first, then the next
    one of each."""
    by_end = sorted((pin for pin in pins if pin.is_lease), key=lambda lease: lease.until or 0.0)
    numbers: dict[str, Iterator[int]] = defaultdict(itertools.count)
    turns = [(next(numbers[lease.namespace]), lease) for lease in by_end]
    leases = [lease for _, lease in sorted(turns, key=lambda turn: turn[0])]
    return [*(pin for pin in pins if not pin.is_lease), *leases]


def kept_pages(
    pins: Sequence[Pin], resident: ResidentBytes, limit: int | None
) -> tuple[frozenset[bytes], frozenset[bytes], int]:
    """The page hashes that are pinned, those that are pinned or leased, up to so many bytes; how many were looked up.

    Pinned are also pages that are not there. Of each lease the beginning of its prompt counts that is there: nobody can
    use what is behind pages that are gone.
    """
    left, is_full = math.inf if limit is None else limit, False
    pinned: set[bytes] = set()
    leased: set[bytes] = set()
    sizes: dict[bytes, int] = {}
    ordered, at_once = _in_order(pins), sum(not pin.is_lease for pin in pins) + _FIRST_LEASES
    while ordered:
        # In few steps: page files are all listed in each.
        some, ordered, at_once = ordered[:at_once], ordered[at_once:], 8 * at_once
        named = list({page_hash: None for pin in some for page_hash in pin.hashes if page_hash not in sizes})
        sizes.update(zip(named, resident(named), strict=True))
        for pin in some:
            missing, most_missing = 0, _ELSEWHERE * (pin.paths - 1) if pin.is_lease else math.inf
            its = leased if pin.is_lease else pinned
            if is_full and not pin.is_lease:
                continue
            for page_hash in pin.hashes:
                missing = 0 if sizes[page_hash] else missing + 1
                if missing > most_missing:
                    break
                if page_hash in pinned or page_hash in leased or (missing and its is leased):
                    continue
                if sizes[page_hash] > left:
                    if pin.is_lease:
                        return frozenset(pinned), frozenset(pinned | leased), len(sizes)
                    is_full = True
                    break
                left -= sizes[page_hash]
                its.add(page_hash)
    return frozenset(pinned), frozenset(pinned | leased), len(sizes)


def count_after(looked_up: int) -> int:
    """How many pages are stored until the leased ones are counted again, after a count that looked up so many."""
    return looked_up // _COUNT_PART + 1


class PinnedPages:
    """The pinned pages of one directory, kept up to date. Any thread; never raises."""

    def __init__(
        self,
        tier: str,
        path: Path,
        limit: int | None,
        resident: ResidentBytes,
        stored: Callable[[], int] = lambda: 0,
    ) -> None:
        """``limit``: bytes that pinned pages may take; ``resident`` may raise whatever the directory does. ``stored``:
        pages that were ever stored, where that is known."""
        self._tier = tier
        self._path = path
        self._limit = limit
        self._resident = resident
        self._stored = stored
        self._lock = threading.Lock()
        self._look_at = 0.0
        self._count_at = 0.0
        self._count_when = 0
        """Pages stored, when they are to be counted again."""
        self._pause_until = 0.0
        # When the records changed last and the limit, as of the last count.
        self._counted: tuple[int | None, int | None] = (None, limit)
        self._pinned = self._spared = frozenset[bytes]()
        self._known: Known = {}
        self._warned = False

    def set_limit(self, limit: int | None) -> None:
        """Change the limit in bytes; the next ``spared()`` counts anew."""
        self._limit = limit
        self._pause_until = 0.0
        self.look_soon()

    def look_soon(self) -> None:
        """Look at the records at the next question: one has changed."""
        self._look_at = 0.0

    def spared(self, *, leased: bool = True) -> frozenset[bytes]:
        """The page hashes that are pinned or ``leased``. Mostly free; a few system calls every two seconds."""
        now = time.monotonic()
        if now < self._pause_until:
            return self._spared if leased else self._pinned
        changed = self._known and self._stored() >= self._count_when
        if (changed or now >= self._look_at) and self._lock.acquire(blocking=False):
            try:
                self._look()
            except Exception:
                # On a failing disk the last known pins stay in force, and eviction goes on.
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
        is_due = now >= self._count_at or stored >= self._count_when
        if counted == self._counted and (changed is None or not is_due):
            return
        self._counted, self._count_at = counted, now + _COUNT_INTERVAL
        recorded = read_pins(self._path, self._known)
        self._pinned, self._spared, looked_up = kept_pages(recorded, self._resident, counted[1])
        left_out = not all(self._pinned.issuperset(pin.hashes) for pin in recorded if not pin.is_lease)
        self._count_when = stored + count_after(looked_up)
        ended = time.monotonic()
        self._pause_until = ended + _PAUSE * (ended - now)
        if left_out and not self._warned:
            logger.warning(
                "tier %s: pinned pages would take more than half of %s; those pinned last are not spared, %d pages are",
                self._tier,
                self._path,
                len(self._pinned),
            )
        self._warned = left_out


def _recorded(path: Path, known: Known | None = None) -> Iterator[Pin]:
    """Every pin, also of the past. Unreadable ones are left out, with one warning: pins are read every few seconds."""
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
    if (lease := _LEASE.fullmatch(file.stem)) is None and file.stem.startswith("@"):
        raise ValueError("no lease has such a name")
    if lease is None:
        return Pin(file.stem, created, None if until is None else _moment(until), hashes)
    # What the name says bounds it: it is what is counted.
    hashes = hashes[: int(lease[3])]
    paths = document.get("paths")
    paths = paths if isinstance(paths, int) and 0 < paths <= _MOST_PATHS else 1
    return Pin(file.stem, created, min(_moment(until), float(lease[2])), hashes, paths)


def _moment(seconds: object) -> float:
    if isinstance(seconds, int | float) and not isinstance(seconds, bool) and 0 <= seconds < sys.float_info.max:
        return float(seconds)
    raise ValueError("a time that is none")

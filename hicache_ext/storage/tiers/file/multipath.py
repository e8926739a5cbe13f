"""Several directories as one tier: spreads pages over them, and takes a failing one out of service until it recovers.

Each path has a store of its own (slabs or page files) and an equal share of the capacity. A call is split by path, and
the paths work on their parts in parallel; if only one path is in service, it gets the call unchanged.

A path goes out of service when several consecutive calls met errors of its device and did not move a single page. From
then on no call touches it: its pages are misses, and new pages go to the other paths, by the same rule that reads use.
A background probe closes what was open there, writes and syncs a small file and, once that works, opens the path again:
its index is trusted, or rebuilt from the pages. What was written elsewhere meanwhile is no longer looked up and ages
out. Pages of identities cleared meanwhile are cleared before the path comes back.

A path also goes out of service if its directory is no longer the one that was opened: its file system was detached
(``umount -l``), another one was mounted over it, or the directory was renamed. It comes back with what is there now,
which may be empty, but not with the bare mount point that a vanished mount leaves behind.

A path that accepts no writes (a read-only file system, a device that accepts nothing more) is still read. New pages go
to the other paths and are looked up there. After a while, one call's pages are written to it again; once it accepts
one, it is used as before.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
import xxhash
from numpy.typing import NDArray

from hicache_ext.errors import ClearLaterError, StoreClosedError, StoreSetupError
from hicache_ext.runtime.background import Backoff
from hicache_ext.runtime.breaker import Breaker, BreakerState, WritePause
from hicache_ext.runtime.call_gate import CallGate
from hicache_ext.runtime.file_systems import mount_points
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.runtime.threads import ThreadPool
from hicache_ext.storage.contract.base import leading
from hicache_ext.storage.contract.reports import LastLook, RecentMean
from hicache_ext.storage.contract.store import (
    GetResult,
    PageBatch,
    SetResult,
    StoreInfo,
    chosen_keys,
    grouped,
    key_words,
    put_back,
)
from hicache_ext.storage.tiers.file import hints, pins
from hicache_ext.storage.tiers.file.devices import Trouble, is_device_error
from hicache_ext.storage.tiers.file.layouts import layout_in, members_file
from hicache_ext.storage.tiers.file.path_store import PathStore, clear_each, gauges_of_paths

_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
"""From the finalizer of splitmix64 (Steele, Lea, Flood 2014)."""


Seeds = NDArray[np.uint64]


def path_seeds(names: Sequence[str]) -> Seeds:
    """Return the seeds for ``choose_paths`` from the names of the paths as written in the configuration."""
    return np.array([xxhash.xxh3_64_intdigest(os.fsencode(name)) for name in names], dtype=np.uint64)


def choose_paths(keys: Sequence[bytes], seeds: Seeds, usable: Sequence[int]) -> list[int]:
    """Return one of the path numbers ``usable`` (at least one) for each 48-byte key."""
    if len(usable) == 1 or not keys:
        return [usable[0]] * len(keys)
    # Use the end of a page hash: page files use its start for the fan-out directory.
    ends = key_words(keys)[:, -1].view(np.uint64)
    scores = _mixed(ends[:, np.newaxis] ^ seeds[list(usable)][np.newaxis, :])
    return [usable[best] for best in scores.argmax(axis=1).tolist()]


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash each value: every bit of a value changes about half of the bits of the result."""
    values = (values ^ (values >> np.uint64(30))) * _MULTIPLIERS[0]
    values = (values ^ (values >> np.uint64(27))) * _MULTIPLIERS[1]
    return values ^ (values >> np.uint64(31))


logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")
_Result = TypeVar("_Result")

CALLS_BEFORE_OUT = 3
"""Consecutive failed calls of one kind that take a path out of service: one bad block is not a bad device."""
FIRST_PROBE = 1.0
_LONGEST_PAUSE = 60.0
"""Longest pause in seconds between probes of a path out of service; each failed probe doubles ``FIRST_PROBE``."""
_CLOSE_TIMEOUT = 10.0
"""Seconds that close() waits for probes: on a hanging device, one may never end."""
_LOOK_INTERVAL = 5.0
"""Seconds between two looks at how full the paths are, while the gauges are read."""
_CLEAR_IN_DOUBT = 60.0
"""Seconds after which a clear has reached the disk: by a sync in the background, or written by the kernel."""
_SUCCESS = (GetResult.HIT, SetResult.STORED, SetResult.EXISTS, True)
"""Results of a call for a page that it moved or found."""


OpenPath = Callable[[Path, Trouble], PathStore]
"""Opens the store of one path. Raises StoreSetupError, caused by an OSError where the path is broken."""


class _Part:
    """One path. ``store`` is None while it is out of service and closed."""

    breaker: Breaker

    def __init__(self, path: Path) -> None:
        self.path = path
        self.store: PathStore | None = None
        self.last_error: Exception | None = None
        self.errors = 0
        self.failed_calls: Counter[str] = Counter()
        self.writes = WritePause()
        self._cleared: dict[bytes | None, float] = {}
        """Cleared identities (None: all) -> time until which a dying disk may lose the clear. Infinite if the path was
        out of service then, or failed before that time: they must be cleared before it comes back."""
        self._members_fd: int | None = None
        """Descriptor of the members file of the directory in service, whose path names it while nothing is replaced."""
        self._mount_point, _ = mount_points(str(path.absolute()))
        """Mount point of the directory that is or will be open."""
        self._lock = threading.Lock()

    def look(self) -> None:
        """Remember which directory comes into service. May block for as long as the disk does."""
        with suppress(OSError):
            self._members_fd = os.open(members_file(self.path), os.O_PATH | os.O_CLOEXEC)
        if self.why_replaced() is not None:
            # The file system gives out a new inode number at every stat(): later checks would prove nothing.
            self._close_members_fd()

    def give_up(self) -> PathStore | None:
        """Take the store out of service and return it; the caller closes it."""
        self._close_members_fd()
        store, self.store = self.store, None
        return store

    def _close_members_fd(self) -> None:
        fd, self._members_fd = self._members_fd, None
        if fd is not None:
            os.close(fd)

    def why_replaced(self) -> str | None:
        """Return, in words, that the directory in service was replaced, removed or emptied; None while it is
        unchanged, or if that cannot be determined."""
        if self._members_fd is None:
            return None
        with suppress(OSError):
            try:
                # Another process may have created a new one already.
                is_same = os.path.samestat(os.fstat(self._members_fd), os.stat(members_file(self.path)))
            except (FileNotFoundError, NotADirectoryError):
                is_same = False
            return None if is_same else "its files are not there any more"
        return None

    def check(self) -> None:
        """Raise OSError unless the device under the path accepts a write.

        Makes no directory where a mount has vanished: the tier would start afresh on the disk below.
        """
        mount_point, mounted = mount_points(str(self.path.absolute()))
        if self._mount_point not in mounted and layout_in(self.path) is None:
            raise FileNotFoundError(errno.ENOENT, "it has neither pages nor slabs any more", str(self.path))
        if self.path.is_dir():
            probe = self.path / f".probe.{secrets.randbelow(1 << 63)}"
            fd = os.open(probe, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                os.unlink(probe)
                os.write(fd, bytes(4096))
                os.fsync(fd)
            finally:
                os.close(fd)
        self._mount_point = mount_point

    def note(self, error: Exception) -> None:
        if is_device_error(error):
            if self.store is not None:
                self.doubt_clears()
            with self._lock:
                self.errors += 1
                self.last_error = error

    def note_clear(self, digests: Iterable[bytes | None], seconds: float) -> None:
        """Record a clear that the disk may lose for ``seconds``: infinite for a path out of service."""
        with self._lock:
            self._cleared = self._in_doubt() | dict.fromkeys(digests, time.monotonic() + seconds)

    def doubt_clears(self) -> None:
        """Mark for another clear what the disk may have lost."""
        with self._lock:
            self._cleared = dict.fromkeys(self._in_doubt(), math.inf)

    def to_clear(self) -> list[bytes | None]:
        """Return the identities (None: all) that must be cleared before the path comes back."""
        with self._lock:
            return [digest for digest, until in self._cleared.items() if until == math.inf]

    def _in_doubt(self) -> dict[bytes | None, float]:
        now = time.monotonic()
        return {digest: until for digest, until in self._cleared.items() if now < until}


class SpreadStore:
    """PageStore over the paths of a file tier. Thread-safe, as its parts are."""

    def __init__(
        self,
        name: str,
        paths: Sequence[Path],
        open_path: OpenPath,
        metrics: TierMetrics,
        first_probe: float = FIRST_PROBE,
        evicted_age: RecentMean | None = None,
        *,
        shared: bool = False,
    ) -> None:
        """Open every path. A broken path starts out of service. If all are broken, raises the StoreSetupError of one,
        unless every such error is only a timeout (a stopped process that holds a lock). A path that works but must not
        be used (another layout, another format) raises in any case.

        ``first_probe``: seconds until the first probe of a path out of service. ``evicted_age``: seconds since the last
        use of what the paths evict. ``shared``: what describe() says while no path is in service.
        """
        self.name = name
        self._shared = shared
        self.metrics = metrics
        self._open_path = open_path
        self._evicted_age = evicted_age or RecentMean()
        self._last_look = LastLook(name, self._look, _LOOK_INTERVAL)
        self._parts = [self._new_part(number, path, first_probe) for number, path in enumerate(paths)]
        self._seeds = path_seeds([str(path) for path in paths])
        self._usable: tuple[int, ...] = ()
        """The numbers of the paths in service. A sole path gets whole calls: it has all pages."""
        self._identities: dict[bytes, dict[str, Any]] = {}
        self._state = threading.Lock()
        # Each path's share of the capacity, in a tuple, once it was changed; the opener knows the initial share.
        self._new_share: tuple[int | None] | None = None
        self._calls = CallGate(name)
        try:
            self._open_all()
            # The paths' own threads do the work; these threads only wait for them.
            self._workers = ThreadPool(f"hicache-{name}-paths", len(paths) if len(paths) > 1 else 0)
        except BaseException:
            self._stop_probing()
            for part in self._parts:
                self._close_store(part)
            raise

    @property
    def parts(self) -> list[PathStore]:
        """Stores of the paths in service."""
        return [store for number in self._usable if (store := self._parts[number].store) is not None]

    def out_of_service(self) -> list[Path]:
        usable = self._usable
        return [part.path for number, part in enumerate(self._parts) if number not in usable]

    def describe(self) -> StoreInfo:
        described = [store.describe() for store in self.parts]
        details: dict[str, Any] = {"paths": [str(part.path) for part in self._parts]}
        for key in ("layout", "io", "threads"):
            values = list(dict.fromkeys(str(info.details[key]) for info in described if key in info.details))
            if values:
                details[key] = values[0] if len(values) == 1 else values
        capacities = [info.details.get("capacity") for info in described]
        known = [capacity for capacity in capacities if capacity is not None]
        details["capacity"] = sum(known) if described and len(known) == len(capacities) else None
        details["out_of_service"] = [str(path) for path in self.out_of_service()]
        # A page may be on any path.
        shared = all(info.shared for info in described) if described else self._shared
        return StoreInfo(name=self.name, type="file", shared=shared, details=details)

    def gauges(self) -> dict[str, float]:
        return {
            **self._last_look.known(),
            "tier_up": float(bool(self._usable)),
            "evicted_age_seconds": self._evicted_age.take(),
        }

    def _look(self) -> dict[str, float]:
        paths = [store.fullness() for store in self.parts]
        for level in ("tenant_pages", "tenant_bytes"):
            found = [Counter(figures) for path in paths if (figures := getattr(path, level)) is not None]
            for name in {name for figures in found for name in figures}:
                self.metrics.set_level(level, name, sum(figures[name] for figures in found))
        return gauges_of_paths(paths)

    def post_hint(self, hint: bytes) -> None:
        hints.post_hint(self._parts[0].path, hint)

    def read_hints(self, since: frozenset[str] | None) -> tuple[frozenset[str], list[bytes]]:
        return hints.read_hints(self._parts[0].path, since)

    def block_hashes(self, digest: bytes) -> npt.NDArray[np.int64]:
        """List the blocks on paths in service; others cannot be read. Raises OSError, StoreClosedError."""
        with self._calls:
            found = [store.block_hashes(digest) for store in self.parts]
        return np.concatenate(found) if found else np.empty(0, np.int64)

    # Hints name page hashes, which do not tell which path has the page of an identity.

    def lease_pages(self, hashes: Sequence[bytes], seconds: float, namespace: str) -> int:
        # The pages of a prompt are spread over all paths, including those out of service.
        usable, paths = [self._parts[number].path for number in self._usable], len(self._parts)
        leased = [pins.add_lease(path, hashes, seconds, namespace, paths) for path in usable]
        self._refresh_pins()
        return len(hashes) * max(leased, default=False)

    def end_leases(self, hashes: Sequence[bytes]) -> int:
        ended = [pins.end_leases(self._parts[number].path, hashes) for number in self._usable]
        self._refresh_pins()
        return max(ended, default=0)

    def _refresh_pins(self) -> None:
        """Make this process see changed pins immediately; other processes see them within seconds."""
        for store in self.parts:
            store.pins.look_soon()

    def demote_pages(self, hashes: Sequence[bytes]) -> int:
        with self._calls:
            return sum([store.demote_pages(hashes) for store in self.parts])

    def can_resize(self, capacity: int | None) -> bool:
        if capacity is None and self.out_of_service():
            # The layout there is unknown: it may be slabs, which need a capacity.
            return False
        return all(store.can_resize(capacity) for store in self.parts)

    def resize(self, capacity: int | None) -> None:
        """Change the capacity of a tier in use. A path out of service gets its share when it comes back."""
        with self._state:
            self._new_share = (None if capacity is None else capacity // len(self._parts),)
            for store in self.parts:
                store.resize(self._new_share[0])

    def register_identity(self, digest: bytes, document: dict[str, Any]) -> None:
        with self._state:
            # A path that is coming back takes it from here, unless its store is already among the parts.
            self._identities[digest] = document
            stores = self.parts
        for store in stores:
            store.register_identity(digest, document)

    # -- calls -----------------------------------------------------------------------------------------------------

    def get(self, batch: PageBatch) -> list[GetResult]:
        results = self._split_call("get", batch, [GetResult.REJECTED] * len(batch.sizes))
        if rejected := results.count(GetResult.REJECTED):
            self.metrics.add("get", "rejected", rejected)
        return results

    def set(self, batch: PageBatch) -> list[SetResult]:
        return self._split_call("set", batch, [SetResult.REJECTED] * len(batch.sizes))

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return self._split_call("contains", keys, [False] * len(keys))

    def count_leading(self, keys: Sequence[bytes]) -> int:
        if len(usable := self._usable) != 1:
            return leading(self.contains(keys))
        with self._calls:
            return self._call(usable[0], "count_leading", keys, 0)

    def remove(self, keys: Sequence[bytes]) -> int:
        with self._calls:
            split = self._by_path(keys)
            return sum([self._call(number, "remove", chosen_keys(keys, at), 0) for number, at in split])

    def remove_copies(self, copies: Mapping[bytes, bytes]) -> int:
        with self._calls:
            keys = list(copies)
            return sum(
                self._call(number, "remove_copies", {key: copies[key] for key in chosen_keys(keys, at)}, 0)
                for number, at in self._by_path(keys)
            )

    def clear(self, digests: Sequence[bytes] | None) -> int:
        """Clear identities on all paths; on paths out of service, before they come back."""
        with self._calls:
            with self._state:
                usable = self._usable
                for number, part in enumerate(self._parts):
                    seconds = _CLEAR_IN_DOUBT if number in usable else math.inf
                    part.note_clear([None] if digests is None else digests, seconds)
            return max(clear_each(lambda number: self._call(number, "clear", digests, 0), usable), default=0)

    def close(self) -> None:
        if not self._calls.shut():
            return
        self._stop_probing()
        self._last_look.close(_CLOSE_TIMEOUT)
        self._workers.close()
        for part in self._parts:
            self._close_store(part)

    # -- splitting -------------------------------------------------------------------------------------------------

    def _by_path(self, keys: Sequence[bytes], *, to_write: bool = False) -> list[tuple[int, Sequence[int]]]:
        """Return (path number, positions of its keys), without paths that have none; empty if no path is in service."""
        usable = self._usable
        if not usable or not keys:
            return []
        chosen = choose_paths(keys, self._seeds, usable)
        # Pages that a path refusing writes does not have are on the other paths, or are written there.
        writes = {number: self._parts[number].writes for number in usable}
        refusing = [n for n, pause in writes.items() if (pause.reason if to_write else pause.in_doubt)]
        others = [number for number in usable if number not in refusing]
        for number in refusing if others else ():
            own = [position for position, choice in enumerate(chosen) if choice == number]
            hits = self._call(number, "contains", chosen_keys(keys, own), [False] * len(own)) if own else []
            absent = [position for position, hit in zip(own, hits, strict=True) if not hit]
            put_back(chosen, absent, choose_paths(chosen_keys(keys, absent), self._seeds, others))
        return list(grouped(chosen).items())

    def _split_call(self, kind: str, batch: PageBatch | Sequence[bytes], otherwise: list[_Result]) -> list[_Result]:
        """Return the answers of the call ``kind``, ``otherwise`` for pages of paths out of service."""
        with self._calls:
            if len(usable := self._usable) == 1:
                return self._call(usable[0], kind, batch, otherwise)
            # Call every path that has some of these pages, all in parallel.
            keys, select = (
                (batch.keys, batch.select) if isinstance(batch, PageBatch) else (batch, partial(chosen_keys, batch))
            )
            split, results = self._by_path(keys, to_write=kind == "set"), otherwise

            def call_path(which: int) -> None:
                number, positions = split[which]
                rejected = [results[position] for position in positions]
                answers = self._call(number, kind, select(positions), rejected)
                put_back(results, positions, answers)

            self._workers.run(len(split), call_path)
            return results

    def _call(self, number: int, kind: str, argument: Any, otherwise: _Answer) -> _Answer:
        """Return the answer of one path's store, ``otherwise`` if it is out of service. Takes the path out of service
        if it keeps failing."""
        part = self._parts[number]
        store = part.store
        if store is None:
            return otherwise
        errors = part.errors
        try:
            answer: _Answer = getattr(store, kind)(argument)
        except StoreClosedError:
            # Another thread has taken the path out of service meanwhile.
            return otherwise
        if kind == "set" and SetResult.STORED in cast("list[SetResult]", answer) and part.writes.end():
            logger.warning("tier %s: path %s takes writes again", self.name, part.path)
        if part.errors == errors or _achieved(answer):
            part.failed_calls[kind] = 0
            return answer
        part.failed_calls[kind] += 1
        if part.failed_calls[kind] < CALLS_BEFORE_OUT and not (kind == "set" and part.writes.in_doubt):
            return answer
        if kind != "set":
            part.breaker.trip(str(part.last_error))
        elif part.writes.begin(str(part.last_error)) and len(self._usable) != 1:
            words = "tier %s: path %s takes no writes: %s. It is read, and new pages go to the other paths"
            logger.error(words, self.name, part.path, part.last_error)
        return answer

    # -- out of service and back -----------------------------------------------------------------------------------

    def _new_part(self, number: int, path: Path, first_probe: float) -> _Part:
        part, name, backoff = _Part(path), f"hicache-{self.name}-paths", Backoff(first_probe, _LONGEST_PAUSE)
        probe, changed = partial(self._probe, number), partial(self._note_change, number)
        part.breaker = Breaker(name, probe, backoff, on_change=changed)
        return part

    def _open_all(self) -> None:
        # In parallel: each path may have to wait for a stopped process.
        threads = ThreadPool(f"hicache-{self.name}-open")
        refusals = threads.run(len(self._parts), self._open)
        threads.close()
        broken = [(number, error) for number, error in enumerate(refusals) if error is not None]
        for _, error in broken:
            if not isinstance(error.__cause__, OSError):
                raise error
        lasting = [error for _, error in broken if not isinstance(error.__cause__, TimeoutError)]
        if lasting and len(lasting) == len(self._parts):
            raise lasting[0]
        for number, refusal in broken:
            self._parts[number].breaker.trip(refusal.reason)
        for part in self._parts:
            part.breaker.watch(part.why_replaced)

    def _note_change(self, number: int, state: BreakerState, reason: str) -> None:
        part = self._parts[number]
        if state is not BreakerState.OPEN:
            self.metrics.add("path_back_in_service", str(part.path))
            logger.warning("tier %s: path %s is back in service", self.name, part.path)
            return
        with self._state:
            part.doubt_clears()
            self._usable = tuple(other for other in self._usable if other != number)
        self.metrics.add("path_out_of_service", str(part.path))
        logger.error(
            "tier %s: path %s is out of service: %s. Its pages are misses%s; it is tried again in the background",
            self.name,
            part.path,
            reason,
            " and new ones go to the other paths" if self._usable else " and nothing is stored",
        )

    def _stop_probing(self) -> None:
        deadline = time.monotonic() + _CLOSE_TIMEOUT
        for part in self._parts:
            part.breaker.close(0)
        for part in self._parts:
            part.breaker.close(max(0.0, deadline - time.monotonic()))

    def _probe(self, number: int) -> bool:
        part = self._parts[number]
        self._close_store(part)
        try:
            part.check()
            refusal: Exception | None = self._open(number)
        except (OSError, StoreClosedError, ClearLaterError) as error:
            refusal = error
        if refusal is not None:
            logger.debug("tier %s: path %s is still out of service: %s", self.name, part.path, refusal)
        return refusal is None

    def _open(self, number: int) -> StoreSetupError | None:
        """Open a path and put it into service, or return why it cannot be opened. Raises OSError, StoreClosedError, and
        ClearLaterError if something cleared meanwhile is still there."""
        part = self._parts[number]
        try:
            opened = self._open_path(part.path, part.note)
        except StoreSetupError as error:
            return error
        try:
            part.look()
            registered = dict(self._identities)
            for digest, document in registered.items():
                opened.register_identity(digest, document)
            errors = part.errors
            self._clear_again(part, opened)
            with self._state:
                if part.breaker.closing:
                    raise StoreClosedError(self.name)
                if part.to_clear():
                    raise ClearLaterError("something was cleared while it came back")
                if self._new_share is not None:
                    opened.resize(self._new_share[0])
                part.store = opened
                if part.errors != errors:
                    # Errors of the device up to now were not counted as those of a path in use.
                    part.doubt_clears()
                part.failed_calls.clear()
                part.writes.end()
                self._usable = tuple(sorted({*self._usable, number}))
                late = self._identities.keys() - registered.keys()
        except BaseException:
            part.doubt_clears()
            part.give_up()
            opened.close()
            raise
        # Outside the lock: this writes to the disk.
        for digest in late:
            opened.register_identity(digest, self._identities[digest])
        return None

    def _clear_again(self, part: _Part, opened: PathStore) -> None:
        """Repeat clears made while the path was out of service, or lost by its disk. Raises ClearLaterError."""
        if digests := part.to_clear():
            part.note_clear(digests, _CLEAR_IN_DOUBT)
            try:
                opened.clear(None if None in digests else [digest for digest in digests if digest is not None])
            except ClearLaterError:
                part.note_clear(digests, math.inf)
                raise

    def _close_store(self, part: _Part) -> None:
        """Close a part's store. Logs a failure, so that the others are still closed."""
        store = part.give_up()
        try:
            if store is not None:
                store.close()
        except Exception:
            logger.exception("tier %s: closing path %s", self.name, part.path)


def _achieved(answer: object) -> bool:
    """Return whether a call moved, found or removed a page although the device failed meanwhile."""
    return any(result in _SUCCESS for result in answer) if isinstance(answer, list) else bool(answer)

"""The store of one path of a file tier: what both layouts have in common, and how full the path is.

Damage rarely comes alone, and a write reports an existing page as EXISTS without reading it. So once damage is found,
the neighbours of the bad page (its slab or pack) are read in the background, and for a while a write reads existing
pages before it reports EXISTS: one recomputation heals a chain. What these reads find is handled like any bad page: it
is read again, and removed only if the stored copy is bad.

``ttl``: pages written longer ago are misses. The age counts from the write (in the envelope), not from the last use:
docs/decisions/layout-and-io-auto.md.
"""

from __future__ import annotations

import abc
import errno
import logging
import math
import mmap
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt

from hicache_ext.errors import ClearLaterError, StoreSetupError
from hicache_ext.runtime.background import BackgroundLoop, Backoff
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.runtime.threads import ThreadPool
from hicache_ext.storage.contract.base import TierStore
from hicache_ext.storage.contract.clearing import Clearing
from hicache_ext.storage.contract.reports import RecentMean
from hicache_ext.storage.contract.store import GetResult, PageBatch, SetResult, portions
from hicache_ext.storage.tiers.file.devices import IoPlan, Trouble
from hicache_ext.storage.tiers.file.pages.tree import save_document
from hicache_ext.storage.tiers.file.pins import PinnedPages

logger = logging.getLogger(__name__)

_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")


DOUBT = 300.0
"""Seconds after the last damage for which writes read existing pages: recomputed pages are written in this time."""
SCRUB_AFTER = 5.0
"""Seconds from a bad page to the scrub: the read that found it also finds other bad pages in its batch."""
_SCRUB_RATE = 64 << 20
"""Bytes that a scrub reads per second."""
_VERIFY_BYTES = 8 << 20
"""Bytes of memory for the pages of one batch of verification reads; one page may take more."""
_MAX_PENDING_SCRUBS = 4096
"""Most slabs or packs that wait for their scrub."""
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
NO_SPACE_PAUSES = Backoff(1.0, 300.0)
"""Seconds for which no more is asked of a full disk: new pages replace cold ones meanwhile, or are not written if other
processes take the space that this frees. The pause grows each time that the disk is full again."""


_CAPACITIES = ("half", "capacity", "twice", "four_times")
"""Capacities that the miniatures simulate, relative to the path's own."""


@dataclass(frozen=True, slots=True)
class Fullness:
    """How full one path is, counting all processes. Sizes are bytes of disk."""

    capacity: int | None
    """None: unlimited."""
    used: int
    """Bytes that pages take."""
    free: int
    """Bytes that can be written before something is evicted, or the disk is full."""
    pages: int
    no_space_since: float = 0.0
    """Wall-clock seconds; 0 while writes find space."""
    served: Sequence[int] = (0, 0, 0, 0, 0)
    """Number of uses that the path's miniatures saw (native/table.c), and the hits that the path would have had at each
    of ``_CAPACITIES``."""
    tenant_pages: Mapping[str, int] | None = None
    tenant_bytes: Mapping[str, int] | None = None
    """Pages and bytes by tenant; None without tenants."""


class PathStore(TierStore):
    """Base of the layouts. A layout implements the hooks of ``TierStore`` except ``_write``; and ``_write_absent``,
    ``_pages_in``, ``_open``, ``fullness``, ``_block_hashes`` and ``_demote``.

    Threads: any. The memory of a batch is touched only until the call returns.
    """

    type_name = "file"
    layout: ClassVar[str]
    pins: PinnedPages
    """Set by ``_open``."""
    no_space_since: int
    """Time since which writes have found no space (wall-clock seconds), for all processes together; 0 while they find
    some. Raises OSError."""

    def __init__(
        self,
        name: str,
        path: Path,
        *,
        capacity: int | None,
        plan: IoPlan | None = None,
        ttl: float | None = None,
        shared: bool = False,
        metrics: TierMetrics | None = None,
        trouble: Trouble = lambda _: None,
        evicted_age: RecentMean | None = None,
    ) -> None:
        """Open the path. ``capacity`` is in bytes for all processes together, None for no limit; ``ttl`` in seconds.

        ``shared``: other machines use the directory, too. ``trouble`` is told every error of the medium,
        ``evicted_age`` the seconds since the last use of what is evicted. Raises StoreSetupError if the directory
        cannot be used.
        """
        super().__init__(name, metrics)
        self.shared = shared
        self._path = path
        self._capacity = capacity
        self._plan = plan or IoPlan()
        self._ttl = ttl
        self._trouble = trouble
        self._clearing = Clearing(name)
        self._resources = ExitStack()
        """Resources that ``_open`` opened; closed last."""
        self._bad_found = 0
        self._doubted_until = -math.inf
        self._doubtful: dict[Hashable, None] = {}
        """Slabs or packs in which a page was bad, until they are scrubbed; the first one is in progress."""
        self._doubtful_lock = threading.Lock()
        self._scrub = BackgroundLoop(f"hicache-{name}-scrub", self._scrub_next)
        self._workers = ThreadPool(f"hicache-{name}", self._plan.threads)
        try:
            self._open(path, evicted_age or RecentMean())
            # The metrics may be older than this store: a path that was out of service may have come back.
            self._bad_found = self.metrics.total("corrupt")
        except (OSError, ValueError) as error:
            PathStore._close(self)
            reason = getattr(error, "strerror", None) or error
            file = getattr(error, "filename", None)
            where = "" if file in (None, str(path)) else f" ({file!r})"
            raise StoreSetupError(name, f"{str(path)!r} cannot be used: {reason}{where}") from error
        except BaseException:
            PathStore._close(self)
            raise

    @abc.abstractmethod
    def _open(self, path: Path, evicted_age: RecentMean) -> None:
        """Open the directory. Raises OSError, ValueError, StoreSetupError."""

    @abc.abstractmethod
    def fullness(self) -> Fullness:
        """Return how full the path is, from the disk. May block for as long as the disk does. Raises OSError."""

    def block_hashes(self, digest: bytes) -> npt.NDArray[np.int64]:
        """Implement ``PageLister``. Raises OSError, StoreClosedError."""
        with self._calls:
            return self._block_hashes(digest)

    @abc.abstractmethod
    def _block_hashes(self, digest: bytes) -> npt.NDArray[np.int64]:
        """Implement ``block_hashes``. Raises OSError."""

    def demote_pages(self, hashes: Sequence[bytes]) -> int:
        """Implement ``TakesHints``. Raises OSError, IndexBusyError, StoreClosedError."""
        with self._calls:
            kept = self.pins.spared()
            return self._demote([page_hash for page_hash in hashes if page_hash not in kept])

    @abc.abstractmethod
    def _demote(self, hashes: Sequence[bytes]) -> int:
        """Demote pages as ``demote_pages`` does, but without regard to pins."""

    def details(self) -> dict[str, Any]:
        return {
            "layout": self.layout,
            "capacity": self._capacity,
            "threads": self._plan.threads,
            "io": str(self._plan),
            "ttl": self._ttl,
        }

    def _register(self, digest: bytes, document: dict[str, Any]) -> None:
        save_document(self._path, digest, document)

    def _oldest(self) -> int:
        """Return the time (``created_ms`` of an envelope) before which written pages are expired; 0 without a ttl."""
        return 0 if self._ttl is None else max(0, int((time.time() - self._ttl) * 1000))

    def can_resize(self, capacity: int | None) -> bool:
        return True

    def resize(self, capacity: int | None) -> None:
        """Change the capacity of a store in use."""
        self._capacity = capacity

    # -- verification after damage -----------------------------------------------------------------------------------

    @abc.abstractmethod
    def _write_absent(self, batch: PageBatch) -> list[SetResult]:
        """Write pages as ``_write`` does, but report existing pages as EXISTS without reading them."""

    def _look_at(self, batch: PageBatch) -> list[GetResult]:
        """Read pages only to verify them: this does not count as a use, where that can be avoided."""
        # These pages were just to be written, or are next to what was just read: they count as used already.
        return self._read(batch)

    @abc.abstractmethod
    def _pages_in(self, place: Any) -> Iterator[tuple[list[bytes], list[int]]]:
        """Yield keys and payload sizes of the pages known to be in a place, some at a time. Raises OSError."""

    def _damage_found(self) -> int:
        """Return the number of bad pages found so far."""
        return self.metrics.total("corrupt")

    def _write(self, batch: PageBatch) -> list[SetResult]:
        results = self._write_absent(batch)
        if (found := self._damage_found()) != self._bad_found:
            self._bad_found, self._doubted_until = found, time.monotonic() + DOUBT
        if self._doubtful or time.monotonic() < self._doubted_until:
            there = [position for position, result in enumerate(results) if result is SetResult.EXISTS]
            keys, sizes = [batch.keys[position] for position in there], [batch.sizes[position] for position in there]
            seen = [result for some, _ in self._verification_reads(keys, sizes) for result in some]
            bad = [position for position, result in zip(there, seen, strict=True) if result is not GetResult.HIT]
            batch.move_at(bad, self._write_absent, results)
        return results

    def _verification_reads(self, keys: Sequence[bytes], sizes: Sequence[int]) -> Iterator[tuple[list[GetResult], int]]:
        """Read these pages into separate memory, some at a time; yield the results of each step and its bytes."""
        # Align each page as direct I/O needs it.
        stride = -(-max(1, *sizes) // mmap.PAGESIZE) * mmap.PAGESIZE if len(sizes) else 1
        step = max(1, _VERIFY_BYTES // stride)
        for begin in range(0, len(sizes), step):
            some = sizes[begin : begin + step]
            memory = memoryview(mmap.mmap(-1, len(some) * stride))
            segments = [[memory[number * stride :][:size]] for number, size in enumerate(some)]
            yield self._look_at(PageBatch(keys[begin : begin + step], segments, some)), sum(some)

    def _look_over(self, place: Hashable) -> None:
        """Schedule a background read of all pages of a slab or a pack in which one was bad. Does not wait.

        Does nothing if other machines use the directory, too: this machine may be at fault."""
        if self.shared:
            return
        with self._doubtful_lock:
            if len(self._doubtful) < _MAX_PENDING_SCRUBS:
                self._doubtful.setdefault(place)
        self._scrub.wake(SCRUB_AFTER)

    def _scrub_next(self) -> float | None:
        """Scrub one place [scrub thread]."""
        with self._doubtful_lock:
            if not self._doubtful:
                return None
            place = next(iter(self._doubtful))
        seen: Counter[GetResult] = Counter()
        end = "ended"
        try:
            for keys, sizes in self._pages_in(place):
                for results, read in self._verification_reads(keys, sizes):
                    seen.update(results)
                    if not self._scrub.rest(read / _SCRUB_RATE):
                        return None
        except OSError as error:
            # The slab was dropped meanwhile, or the device fails.
            end = "failed"
            logger.info("tier %s: %s: the pages beside a bad one are not all read: %s", self.name, self._path, error)
        with self._doubtful_lock:
            del self._doubtful[place]
        good, bad = seen[GetResult.HIT], seen[GetResult.CORRUPT]
        self.metrics.add_many("scrub", {"good": good, "bad": bad, end: 1})
        words = "tier %s: %s: the pages beside a bad one were read: %d, of them %d bad"
        logger.log(logging.WARNING if bad else logging.INFO, words, self.name, self._path, good + bad, bad)
        return 0.0

    def _close(self) -> None:
        self._scrub.stop()
        self._workers.close()
        self._clearing.close()
        self._resources.close()

    def _portions(
        self,
        positions: Sequence[int],
        sizes: Sequence[int],
        disk_bytes: Callable[[int], int],
        capacity: int | None,
        share: int,
    ) -> Sequence[Sequence[int]]:
        """Cut ``positions`` into portions that each need at most a ``share``-th of ``capacity``, unless one page needs
        more. ``disk_bytes``: maps the size of a page to its bytes of disk."""
        needed = {size: disk_bytes(size) for size in set(sizes)}
        most = math.inf if capacity is None else capacity // share
        return portions(positions, [needed[sizes[position]] for position in positions], most)

    def _note_space(self, error: OSError | None) -> bool:
        """Record that writes find no space because of ``error``, or space again (None); return whether that worked."""
        try:
            since, now = self.no_space_since, int(time.time())
            if bool(since) == (error is None):
                self.no_space_since = 0 if error is None else now
        except OSError as trouble:
            self._count_error(trouble)
            return False
        if error is not None:
            words = "tier %s: no space left for %s below its capacity (%s): new pages take the place of cold ones"
            log_arguments = self.name, self._path, error.strerror or error
            self._failing_log.log(logging.WARNING, "full", words, *log_arguments)
        elif since:
            words = "tier %s: %s has space again, after %.0f s"
            self._failing_log.log(logging.WARNING, "space", words, self.name, self._path, max(0, now - since))
        return True

    def _count_error(self, error: OSError) -> None:
        self.count_error(error)
        self._trouble(error)


def clear_each(
    work: Callable[[_Item], _Answer], items: Iterable[_Item], note: Callable[[OSError], None] = lambda _: None
) -> list[_Answer]:
    """Return the answers of a clear() for each item; one that fails does not stop the others. Raises the last OSError
    or ClearLaterError; ``note`` is called with each OSError before that one."""
    answers: list[_Answer] = []
    failed: OSError | ClearLaterError | None = None
    for item in items:
        try:
            answers.append(work(item))
        except (OSError, ClearLaterError) as error:
            if isinstance(failed, OSError):
                note(failed)
            failed = error
    if failed is not None:
        raise failed
    return answers


def gauges_of_paths(paths: Sequence[Fullness]) -> dict[str, float]:
    """Return the gauges of several paths together; zeros for no paths at all."""
    uses, *hits = [sum(path.served[number] for path in paths) for number in range(1 + len(_CAPACITIES))]
    shares = {f"hit_share_at_{name}": count / uses for name, count in zip(_CAPACITIES, hits, strict=True) if uses}
    return {
        "capacity_bytes": sum((math.nan if path.capacity is None else path.capacity for path in paths), 0.0),
        "used_bytes": float(sum(path.used for path in paths)),
        "free_bytes": float(sum(path.free for path in paths)),
        "pages": float(sum(path.pages for path in paths)),
        "no_space_since_seconds": min((path.no_space_since for path in paths if path.no_space_since), default=0.0),
        # Each path is weighted by its uses.
        **shares,
    }

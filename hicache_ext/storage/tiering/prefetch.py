"""Best-effort prefetch: pages move from far tiers into host memory while SGLang allocates and queues.

When exists() reports a hit, SGLang will most likely read those pages: after it has allocated host memory and has served
the requests before. ``announce`` gets the keys in chain order, a few threads fetch them into a bounded buffer, and a
foreground read takes them from there, checked again. A foreground read never waits for a page that is only planned: it
reads that page itself. It waits for a page that is being fetched, so that no bytes travel twice at a time.

SGLang tells a backend neither of an abort nor that a hit was below its threshold. So an announced page has a lifetime;
a page that nobody has read by then is dropped and counted as wasted. close(), clear() and remove() drop at once. Waste
is bounded by the buffer per lifetime.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from hicache_ext.page import envelope
from hicache_ext.page.copying import scatter
from hicache_ext.page.envelope import IDENTITY_LENGTH
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.runtime.threads import ThreadPool
from hicache_ext.storage.contract.base import one_for_each
from hicache_ext.storage.contract.store import GetResult, PageBatch, PageStore
from hicache_ext.storage.tiering.io_priority import IoPriority

logger = logging.getLogger(__name__)

_PAGES_AT_ONCE = 32
_PATIENCE = 0.02
"""Seconds for which a fetch waits for foreground reads. Short: a request being read needs its next batch."""


@dataclass(frozen=True, slots=True)
class PrefetchSettings:
    """``buffer`` in bytes (0: no prefetch), ``lifetime`` in seconds, ``streams``: calls on far tiers at once."""

    buffer: int = 256 * 1024 * 1024
    lifetime: float = 30.0
    streams: int = 4


class _State(enum.Enum):
    PLANNED = enum.auto()
    FETCHING = enum.auto()
    STAGED = enum.auto()
    GONE = enum.auto()
    """Taken over, expired, failed or cancelled; not found under its key any more."""


@dataclass(eq=False, slots=True)
class PrefetchedPage:
    """One announced page. Fields change under the prefetcher's lock only."""

    key: bytes
    source: PageStore
    size: int
    expires: float
    state: _State = _State.PLANNED
    memory: bytearray | None = None
    checksum: bytes = b""
    result: GetResult | None = None
    """The answer of its tier."""
    wanted: int = 1
    """Announcements that have not read it yet."""
    used: bool = False


class Prefetcher:
    """See the module docstring. Thread-safe; ``announce`` never waits for a store.

    Counted in the metrics of the source tier, in pages under ``prefetch`` and in bytes under ``prefetch_bytes``:
    fetched, useful (read by SGLang at least once), wasted (dropped unread); in pages only: overtaken (a read came
    before the fetch), joined (a read came during it), failed. Levels: ``prefetch_buffer_bytes``.
    """

    def __init__(
        self,
        settings: PrefetchSettings,
        gate: IoPriority,
        metrics: TierMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._gate = gate
        self._metrics = metrics
        self._clock = clock
        self._condition = threading.Condition()
        self._pages: dict[bytes, PrefetchedPage] = {}
        """By key, in order of expiry."""
        self._plan: deque[PrefetchedPage] = deque()
        self._being_read: Counter[bytes] = Counter()
        """Keys that foreground reads are reading from their tier."""
        self._held = 0
        """Bytes of pages being fetched and staged."""
        self._closing = False
        self._threads = ThreadPool("hicache-prefetch")
        self._started = 0
        self._publish_level()

    # -- what is to come -------------------------------------------------------------------------------------------

    def announce(self, pages: Iterable[tuple[bytes, PageStore, int]]) -> None:
        """Pages (key, source, payload bytes) that are likely to be read soon, in the order of the chain."""
        now = self._clock()
        with self._condition:
            if self._closing or not self._settings.buffer:
                return
            self._expire(now)
            for key, source, size in pages:
                known = self._pages.get(key)
                if known is not None:
                    known.wanted += 1
                elif key not in self._being_read and 0 < size <= self._settings.buffer:
                    page = PrefetchedPage(key, source, size, now + self._settings.lifetime)
                    self._pages[key] = page
                    self._plan.append(page)
            if self._plan:
                self._start()
                self._condition.notify_all()

    def forget(self, keys: Iterable[bytes]) -> None:
        with self._condition:
            for key in keys:
                if key in self._pages:
                    self._drop(self._pages[key])

    def forget_identities(self, digests: Sequence[bytes] | None) -> None:
        chosen = None if digests is None else set(digests)
        with self._condition:
            for page in list(self._pages.values()):
                if chosen is None or page.key[:IDENTITY_LENGTH] in chosen:
                    self._drop(page)

    def inside(self, keys: Sequence[bytes]) -> int:
        """How many of ``keys`` are in the buffer."""
        with self._condition:
            return sum(key in self._pages and self._pages[key].state is _State.STAGED for key in keys)

    # -- foreground reads ---------------------------------------------------------------------------------------------

    def begin_read(self, keys: Sequence[bytes]) -> list[PrefetchedPage | None]:
        """A foreground read of ``keys`` begins. For each key the page that is staged or being fetched, or None.

        Planned pages are taken over. The caller reads keys with None itself, passes every other page to ``take``, and
        calls ``end_read`` with the answer in any case.
        """
        overtaken: Counter[TierMetrics] = Counter()
        joined: Counter[TierMetrics] = Counter()
        pages: list[PrefetchedPage | None] = []
        with self._condition:
            self._expire(self._clock())
            for key in keys:
                page = self._pages.get(key)
                if page is not None and page.state is _State.PLANNED:
                    overtaken[page.source.metrics] += 1
                    self._drop(page)
                    page = None
                if page is None:
                    self._being_read[key] += 1
                elif page.state is _State.FETCHING:
                    joined[page.source.metrics] += 1
                pages.append(page)
        for outcome, counts in (("overtaken", overtaken), ("joined", joined)):
            for metrics, count in counts.items():
                metrics.add("prefetch", outcome, count)
        return pages

    def end_read(self, keys: Sequence[bytes], pages: Sequence[PrefetchedPage | None]) -> None:
        with self._condition:
            for key, page in zip(keys, pages, strict=True):
                if page is None:
                    self._being_read[key] -= 1
                    if not self._being_read[key]:
                        del self._being_read[key]

    def take(self, page: PrefetchedPage, segments: Sequence[memoryview]) -> GetResult:
        """Copy a page into host memory, waiting while it is being fetched. HIT, or why there is none.

        MISS, TIMEOUT and the like are the tier's answer: it need not be asked again. REJECTED: the page was dropped
        meanwhile.
        """
        metrics = page.source.metrics
        with self._condition:
            self._condition.wait_for(lambda: page.state is not _State.FETCHING)
            memory, checksum = page.memory, page.checksum
            if memory is None:
                return page.result if page.result not in (None, GetResult.HIT) else GetResult.REJECTED
        # Copied outside the lock: this reference keeps the memory of a page that is dropped meanwhile.
        if len(memory) != sum(segment.nbytes for segment in segments):
            return GetResult.REJECTED
        scatter(memoryview(memory), segments)
        intact = envelope.payload_checksum(segments) == checksum
        with self._condition:
            if intact:
                self._count_first_use(page)
                page.wanted -= 1
            if (page.wanted <= 0 or not intact) and self._pages.get(page.key) is page:
                self._drop(page)
        if not intact:
            metrics.add("corrupt", "staged")
        return GetResult.HIT if intact else GetResult.REJECTED

    def close(self) -> None:
        """Drop everything, wait for fetches under way, end the threads. Idempotent."""
        with self._condition:
            self._closing = True
            for page in list(self._pages.values()):
                self._drop(page)
            self._condition.notify_all()
        self._threads.close()

    # -- fetching --------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        # Without a thread to be had, a foreground read takes the pages from their tier itself.
        with contextlib.suppress(RuntimeError):
            while self._started < self._settings.streams:
                self._threads.start(self._run)
                self._started += 1

    def _run(self) -> None:
        try:
            self._fetch_what_is_planned()
        except Exception:
            # Nobody asks how this call of the pool has ended.
            logger.exception("hicache_ext: a thread of the prefetch ended in an error that nobody expected")

    def _fetch_what_is_planned(self) -> None:
        while self._wait_for_work():
            self._gate.wait_for_quiet(_PATIENCE)
            with self._gate.fetch():
                with self._condition:
                    pages = self._next_pages()
                if pages:
                    self._fetch(pages)

    def _wait_for_work(self) -> bool:
        """True when there may be something to fetch, False at the end."""
        with self._condition:
            while not self._closing:
                now = self._clock()
                self._expire(now)
                if self._plan and self._fits(self._plan[0]):
                    return True
                oldest = next(iter(self._pages.values()), None)
                self._condition.wait(None if oldest is None else max(0.05, oldest.expires - now))
            return False

    def _fits(self, page: PrefetchedPage) -> bool:
        if page.state is not _State.PLANNED:
            return True  # skipped by the caller
        if self._held + page.size > self._settings.buffer:
            # Pages that were read stay for other requests, and are dropped first.
            for used in [known for known in self._pages.values() if known.used and known.state is _State.STAGED]:
                self._drop(used)
                if self._held + page.size <= self._settings.buffer:
                    break
        return self._held + page.size <= self._settings.buffer

    def _next_pages(self) -> list[PrefetchedPage]:
        """The next planned pages of one source that fit; they are FETCHING from now on."""
        pages: list[PrefetchedPage] = []
        while self._plan and len(pages) < _PAGES_AT_ONCE and not self._closing:
            page = self._plan[0]
            if page.state is _State.PLANNED:
                if (pages and page.source is not pages[0].source) or not self._fits(page):
                    break
                page.state = _State.FETCHING
                self._held += page.size
                pages.append(page)
            self._plan.popleft()
        return pages

    def _fetch(self, pages: list[PrefetchedPage]) -> None:
        source = pages[0].source
        memory = [bytearray(page.size) for page in pages]
        batch = PageBatch([page.key for page in pages], [[memoryview(target)] for target in memory])
        try:
            # Found later, too few would leave a foreground read waiting for these pages.
            results = one_for_each(source.get(batch), len(pages))
        except Exception:
            logger.exception("hicache_ext: prefetch from %s", source.name)
            results = [GetResult.ERROR] * len(pages)
        checksums = [
            envelope.payload_checksum([memoryview(target)]) if result is GetResult.HIT else b""
            for target, result in zip(memory, results, strict=True)
        ]
        fetched = [page.size for page, result in zip(pages, results, strict=True) if result is GetResult.HIT]
        source.metrics.add_many("prefetch", {"fetched": len(fetched), "failed": len(pages) - len(fetched)})
        source.metrics.add("prefetch_bytes", "fetched", sum(fetched))
        with self._condition:
            for page, target, result, checksum in zip(pages, memory, results, checksums, strict=True):
                page.result = result
                if result is GetResult.HIT:
                    page.memory, page.checksum = target, checksum
                if page.state is _State.GONE:
                    # Cancelled while it was under way.
                    self._release(page)
                    continue
                page.state = _State.STAGED
                if result is not GetResult.HIT:
                    self._drop(page)
            self._publish_level()
            self._condition.notify_all()

    # -- under the lock --------------------------------------------------------------------------------------------

    def _expire(self, now: float) -> None:
        expired: list[PrefetchedPage] = []
        for page in self._pages.values():
            if page.expires > now:
                break
            if page.state is not _State.FETCHING:
                expired.append(page)
        for page in expired:
            self._drop(page)

    def _drop(self, page: PrefetchedPage) -> None:
        """Forget a page in any state; the bytes of one that is being fetched are released when the fetch ends."""
        del self._pages[page.key]
        was, page.state = page.state, _State.GONE
        if was is _State.STAGED:
            self._release(page)
        self._condition.notify_all()

    def _release(self, page: PrefetchedPage) -> None:
        self._held -= page.size
        if page.memory is not None and not page.used:
            page.source.metrics.add("prefetch", "wasted")
            page.source.metrics.add("prefetch_bytes", "wasted", page.size)
        page.memory = None
        self._publish_level()

    def _count_first_use(self, page: PrefetchedPage) -> None:
        if not page.used:
            page.used = True
            page.source.metrics.add("prefetch", "useful")
            page.source.metrics.add("prefetch_bytes", "useful", page.size)

    def _publish_level(self) -> None:
        self._metrics.set_level("prefetch_buffer_bytes", "", self._held)

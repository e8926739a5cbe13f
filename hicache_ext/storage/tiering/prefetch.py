"""Best-effort prefetch: pages move from far tiers into host memory while SGLang allocates and queues.

When exists() reports a hit, SGLang will most likely read those pages: after it has allocated host memory and has served
the requests before. ``announce`` gets the keys in chain order, a few threads fetch them into a bounded buffer, and a
foreground read takes them from there, checked again. A foreground read never waits for a page that is only planned: it
reads that page itself. It waits for a page that is being fetched, so that no bytes travel twice at a time.

SGLang tells a backend neither of an abort nor that a hit was below its threshold. So an announced page has a lifetime;
a page that nobody has read by then is given to ``unread`` (it came too late for this request, and may serve the next
from a nearer tier), dropped, and counted as wasted. close(), clear() and remove() drop at once. Waste is bounded by the
buffer per lifetime.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import logging
import math
import operator
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from hicache_ext.errors import StoreClosedError
from hicache_ext.page import envelope
from hicache_ext.page.envelope import IDENTITY_LENGTH
from hicache_ext.page.page_object import scatter
from hicache_ext.runtime.log_limit import LimitedLog
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.runtime.threads import ThreadPool
from hicache_ext.storage.contract.base import one_for_each
from hicache_ext.storage.contract.store import GetResult, PageBatch, PageStore
from hicache_ext.storage.tiering.generations import StillWanted, always
from hicache_ext.storage.tiering.io_priority import IoPriority
from hicache_ext.storage.tiering.settings import PrefetchSettings

logger = logging.getLogger(__name__)

_PAGES_AT_ONCE = 32
_nbytes = operator.attrgetter("nbytes")
_PATIENCE = 0.02
"""Seconds for which a fetch waits for foreground reads. Short: a request being read needs its next batch."""
_MOST_PLANNED = 16384
"""Pages planned and fetched at once, of all tiers. More could not be read before they expire."""


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
    still_wanted: StillWanted = always
    """Since it was announced."""


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
        unread: Callable[[Sequence[PrefetchedPage]], None] | None = None,
    ) -> None:
        """``unread`` takes pages that have their memory and that nobody has read in time [a thread of its own]; it may
        use that memory until it returns."""
        self._settings = settings
        self._unread = unread
        self._gate = gate
        self._metrics = metrics
        self._clock = clock
        self._condition = threading.Condition()
        self._pages: dict[bytes, PrefetchedPage] = {}
        """By key, in order of expiry."""
        self._sources = 1
        self._pages_of: Counter[PageStore] = Counter()
        """Pages of each tier among ``_pages``."""
        self._wasted: dict[PageStore, list[int]] = {}
        """Sizes of pages dropped unread that are not counted yet."""
        self._changed = False
        """Pages were planned, staged or dropped, and nobody was woken yet."""
        self._plans: dict[PageStore, dict[bytes, PrefetchedPage]] = {}
        """What is to be fetched, by tier: each has threads of its own, so that one that hangs stops no other."""
        self._fetching: Counter[PageStore] = Counter()
        """Bytes of pages being fetched, by tier."""
        self._used: dict[bytes, PrefetchedPage] = {}
        """Pages in the buffer that were read, the longest ago first."""
        self._being_read: Counter[bytes] = Counter()
        """Keys that foreground reads are reading from their tier."""
        self._held = 0
        """Bytes of pages being fetched and staged."""
        self._closing = False
        self._threads = ThreadPool("hicache-prefetch")
        self._streams: Counter[PageStore] = Counter()
        self._log = LimitedLog(logger)
        self._publish_level()

    def configure(self, settings: PrefetchSettings, sources: int = 1) -> None:
        """From now on, from so many tiers. What is in the buffer stays."""
        with self._condition:
            self._settings = settings
            self._sources = max(1, sources)
            latest = self._clock() + settings.lifetime
            for page in self._pages.values():
                page.expires = min(page.expires, latest)
            self._condition.notify_all()

    def forget_source(self, source: PageStore) -> None:
        """The tier is in use no more: drop what came from it, and end its threads."""
        with self._condition:
            for page in [page for page in self._pages.values() if page.source is source]:
                self._drop(page)
            self._plans.pop(source, None)
            self._changed = True
            self._dropped()

    # -- what is to come -------------------------------------------------------------------------------------------

    def announce(self, pages: Iterable[tuple[bytes, PageStore, int]], still_wanted: StillWanted = always) -> None:
        """Pages (key, source, payload bytes) that are likely to be read soon, in the order of the chain.

        Not those that were cleared since ``still_wanted``. Pages beyond what the buffer holds twice are not planned:
        they would expire before there is memory for them.
        """
        now = self._clock()
        with self._condition:
            settings = self._settings
            if self._closing or not settings.buffer:
                return
            self._expire(now)
            planned = 0
            sources: set[PageStore] = set()
            for key, source, size in pages:
                known = self._pages.get(key)
                if known is not None:
                    known.wanted += 1
                    continue
                if self._pages_of[source] >= _MOST_PLANNED // self._sources or planned + size > 2 * settings.buffer:
                    break
                if key in self._being_read or not 0 < size <= settings.buffer:
                    continue
                if still_wanted(key[:IDENTITY_LENGTH]):
                    page = PrefetchedPage(key, source, size, now + settings.lifetime, still_wanted=still_wanted)
                    self._pages[key] = page
                    self._pages_of[source] += 1
                    self._plans.setdefault(source, {})[key] = page
                    sources.add(source)
                    planned += size
            for source in sources:
                self._start(source)
            self._changed = self._changed or bool(sources)
            self._dropped()

    def forget(self, keys: Iterable[bytes]) -> None:
        with self._condition:
            for key in keys:
                if key in self._pages:
                    self._drop(self._pages[key])
            self._dropped()

    def forget_identities(self, digests: Sequence[bytes] | None) -> None:
        chosen = None if digests is None else set(digests)
        with self._condition:
            for page in list(self._pages.values()):
                if chosen is None or page.key[:IDENTITY_LENGTH] in chosen:
                    self._drop(page)
            self._dropped()

    def inside(self, keys: Sequence[bytes]) -> int:
        """How many of ``keys`` are in the buffer."""
        with self._condition:
            return sum(key in self._pages and self._pages[key].state is _State.STAGED for key in keys)

    # -- foreground reads ---------------------------------------------------------------------------------------------

    def begin_read(self, keys: Sequence[bytes]) -> list[PrefetchedPage | None]:
        """A foreground read of ``keys`` begins. For each key the page that is staged or being fetched, or None.

        Planned pages are taken over. The caller reads keys with None itself, passes all other pages to ``take``, and
        calls ``end_read`` with the answer in any case.
        """
        overtaken: Counter[PageStore] = Counter()
        joined: Counter[PageStore] = Counter()
        pages: list[PrefetchedPage | None] = []
        with self._condition:
            self._expire(self._clock())
            for key in keys:
                page = self._pages.get(key)
                if page is not None and page.state is _State.PLANNED:
                    overtaken[page.source] += 1
                    self._drop(page)
                    page = None
                if page is None:
                    self._being_read[key] += 1
                elif page.state is _State.FETCHING:
                    joined[page.source] += 1
                pages.append(page)
            self._dropped()
        for outcome, counts in (("overtaken", overtaken), ("joined", joined)):
            for source, count in counts.items():
                source.metrics.add("prefetch", outcome, count)
        return pages

    def end_read(self, keys: Sequence[bytes], pages: Sequence[PrefetchedPage | None]) -> None:
        with self._condition:
            for key, page in zip(keys, pages, strict=True):
                if page is None:
                    self._being_read[key] -= 1
                    if not self._being_read[key]:
                        del self._being_read[key]

    def take(self, wanted: Sequence[tuple[PrefetchedPage, Sequence[memoryview]]]) -> list[GetResult]:
        """Copy pages into host memory, waiting for those that are being fetched. For each HIT, or why there is none.

        MISS, TIMEOUT and the like are the tier's answer: it need not be asked again. REJECTED: the page was dropped
        meanwhile.
        """
        results = [GetResult.REJECTED] * len(wanted)
        left = list(range(len(wanted)))
        while left:
            with self._condition:
                # What has been fetched is copied while the rest is on its way.
                while not (ready := [at for at in left if wanted[at][0].state is not _State.FETCHING]):
                    self._condition.wait()
                left = [at for at in left if wanted[at][0].state is _State.FETCHING]
                # These references keep the memory of pages that are dropped while they are copied outside the lock.
                memories = [(at, wanted[at][0].memory, wanted[at][0].checksum) for at in ready]
            self._copy_out(wanted, memories, results)
        return results

    def _copy_out(
        self,
        wanted: Sequence[tuple[PrefetchedPage, Sequence[memoryview]]],
        memories: Sequence[tuple[int, bytearray | None, bytes]],
        results: list[GetResult],
    ) -> None:
        copied: list[tuple[PrefetchedPage, bool]] = []
        for at, memory, checksum in memories:
            page, segments = wanted[at]
            if memory is None:
                if page.result is not None and page.result is not GetResult.HIT:
                    results[at] = page.result
                continue
            if len(memory) != sum(map(_nbytes, segments)):
                continue
            scatter(memoryview(memory), segments)
            intact = envelope.payload_checksum(segments) == checksum
            copied.append((page, intact))
            if intact:
                results[at] = GetResult.HIT
        useful: dict[PageStore, list[int]] = {}
        corrupt: Counter[PageStore] = Counter()
        with self._condition:
            for page, intact in copied:
                if not intact:
                    corrupt[page.source] += 1
                else:
                    page.wanted -= 1
                    if not page.used:
                        page.used = True
                        useful.setdefault(page.source, []).append(page.size)
                if (page.wanted <= 0 or not intact) and self._pages.get(page.key) is page:
                    self._drop(page)
                elif page.state is _State.STAGED:
                    self._used.pop(page.key, None)
                    self._used[page.key] = page
            # Before the lock is given back: what is dropped later counts as wasted where this was not counted.
            for source, sizes in useful.items():
                source.metrics.add("prefetch", "useful", len(sizes))
                source.metrics.add("prefetch_bytes", "useful", sum(sizes))
            self._dropped()
        for source, count in corrupt.items():
            source.metrics.add("corrupt", "staged", count)

    def close(self, longest: float = math.inf) -> None:
        """Drop everything, wait for fetches under way, but not beyond ``longest`` (time.monotonic()), end the threads.
        Idempotent."""
        with self._condition:
            self._closing = self._changed = True
            for page in list(self._pages.values()):
                self._drop(page)
            self._dropped()
        if self._threads.close(None if longest == math.inf else max(0.0, longest - time.monotonic())):
            logger.warning("hicache_ext: a prefetch hangs in its tier; its thread ends with it")

    # -- fetching --------------------------------------------------------------------------------------------------

    def _start(self, source: PageStore) -> None:
        # Without a thread to be had, a foreground read takes the pages from their tier itself.
        with contextlib.suppress(RuntimeError):
            while self._streams[source] < self._settings.streams:
                self._threads.start(functools.partial(self._run, source))
                self._streams[source] += 1

    def _run(self, source: PageStore) -> None:
        try:
            self._fetch_what_is_planned(source)
        except Exception:
            # Nobody asks how this call of the pool has ended.
            logger.exception("hicache_ext: a thread of the prefetch ended in an error that nobody expected")
        finally:
            with self._condition:
                self._streams[source] -= 1
                if not self._streams[source]:
                    del self._streams[source]

    def _fetch_what_is_planned(self, source: PageStore) -> None:
        while self._wait_for_work(source):
            if late := self._take_late():
                self._give_away(late)
                continue
            self._gate.wait_for_quiet(_PATIENCE)
            with self._gate.fetch():
                with self._condition:
                    pages = self._next_pages(source)
                if pages:
                    self._fetch(pages)

    def _wait_for_work(self, source: PageStore) -> bool:
        """True when there may be something to fetch, False at the end."""
        with self._condition:
            while not self._closing and (plan := self._plans.get(source)) is not None:
                now = self._clock()
                some_are_late = self._expire(now)
                fits = bool(plan) and self._fits(next(iter(plan.values())))
                self._dropped()
                if fits or some_are_late:
                    return True
                oldest = next(iter(self._pages.values()), None)
                self._condition.wait(None if oldest is None else max(0.05, oldest.expires - now))
            return False

    def _take_late(self) -> list[PrefetchedPage]:
        """Some pages that were fetched and not read in time. Their bytes count until they are released."""
        late: list[PrefetchedPage] = []
        with self._condition:
            now = self._clock()
            for page in self._pages.values():
                if page.expires > now or len(late) == _PAGES_AT_ONCE:
                    break
                if self._is_late(page, now):
                    late.append(page)
            for page in late:
                self._forget(page)
        return late

    def _give_away(self, pages: list[PrefetchedPage]) -> None:
        intact = [
            page
            for page in pages
            if page.memory is not None and envelope.payload_checksum([memoryview(page.memory)]) == page.checksum
        ]
        try:
            if self._unread is not None:
                with contextlib.suppress(StoreClosedError):
                    self._unread(intact)
        finally:
            with self._condition:
                self._changed = True
                for page in pages:
                    self._release(page)
                self._dropped()

    def _fits(self, page: PrefetchedPage) -> bool:
        buffer = self._settings.buffer
        # Of several tiers none may fill the buffer with fetches that do not end.
        share = buffer if self._sources < 2 else max(page.size, buffer // 2)
        if self._fetching[page.source] + page.size > share:
            return False
        while self._held + page.size > buffer and self._used:
            # Pages that were read stay for other requests, and are dropped first.
            self._drop(next(iter(self._used.values())))
        return self._held + page.size <= buffer

    def _next_pages(self, source: PageStore) -> list[PrefetchedPage]:
        """The next planned pages of a tier that fit; they are FETCHING from now on."""
        pages: list[PrefetchedPage] = []
        plan = self._plans.get(source, {})
        while plan and len(pages) < _PAGES_AT_ONCE and not self._closing:
            page = next(iter(plan.values()))
            if not self._fits(page):
                break
            del plan[page.key]
            page.state = _State.FETCHING
            self._held += page.size
            self._fetching[source] += page.size
            pages.append(page)
        return pages

    def _fetch(self, pages: list[PrefetchedPage]) -> None:
        source = pages[0].source
        memory: list[bytearray] = []
        checksums: list[bytes] = []
        results: list[GetResult] = []
        try:
            memory = [bytearray(page.size) for page in pages]
            batch = PageBatch([page.key for page in pages], [[memoryview(target)] for target in memory])
            # Found later, too few would leave a foreground read waiting for these pages.
            results = one_for_each(source.get(batch), len(pages))
            checksums = [
                envelope.payload_checksum([memoryview(target)]) if result is GetResult.HIT else b""
                for target, result in zip(memory, results, strict=True)
            ]
        except BaseException as error:  # noqa: BLE001 - also a panic inside a client library: readers wait for them
            kind, words = f"{source.name} {type(error).__name__}", "hicache_ext: prefetch from %s: %r"
            self._log.log(logging.ERROR, kind, words, source.name, error, exc_info=error)
            results = [GetResult.ERROR] * len(pages)
            memory, checksums = [bytearray()] * len(pages), [b""] * len(pages)
        fetched = [page.size for page, result in zip(pages, results, strict=True) if result is GetResult.HIT]
        source.metrics.add_many("prefetch", {"fetched": len(fetched), "failed": len(pages) - len(fetched)})
        source.metrics.add("prefetch_bytes", "fetched", sum(fetched))
        with self._condition:
            self._changed = True
            self._fetching[source] -= sum(page.size for page in pages)
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
            self._dropped()

    # -- under the lock --------------------------------------------------------------------------------------------

    def _expire(self, now: float) -> bool:
        """Whether there are pages for ``unread``."""
        late = False
        expired: list[PrefetchedPage] = []
        for page in self._pages.values():
            if page.expires > now:
                break
            if self._is_late(page, now):
                late = True
            elif page.state is not _State.FETCHING:
                expired.append(page)
        for page in expired:
            self._drop(page)
        return late

    def _is_late(self, page: PrefetchedPage, now: float) -> bool:
        """Whether it is for ``unread``. Until a thread gives it away it may be read."""
        return self._unread is not None and page.expires <= now and page.state is _State.STAGED and not page.used

    def _drop(self, page: PrefetchedPage) -> None:
        """Forget a page in any state; the bytes of one that is being fetched are released when the fetch ends."""
        if self._forget(page) is _State.STAGED:
            self._release(page)

    def _forget(self, page: PrefetchedPage) -> _State:
        """The state that it was in. Its bytes are not released."""
        del self._pages[page.key]
        self._pages_of[page.source] -= 1
        self._used.pop(page.key, None)
        self._plans.get(page.source, {}).pop(page.key, None)
        self._changed = True
        was, page.state = page.state, _State.GONE
        return was

    def _release(self, page: PrefetchedPage) -> None:
        self._held -= page.size
        if page.memory is not None and not page.used:
            self._wasted.setdefault(page.source, []).append(page.size)
        page.memory = None

    def _dropped(self) -> None:
        """Once after all that may have changed in one go: count it, and wake who waits. Threads that wait come here,
        too: they must not wake each other for nothing."""
        if not self._changed:
            return
        self._changed = False
        for source, sizes in self._wasted.items():
            source.metrics.add("prefetch", "wasted", len(sizes))
            source.metrics.add("prefetch_bytes", "wasted", sum(sizes))
        self._wasted.clear()
        self._publish_level()
        self._condition.notify_all()

    def _publish_level(self) -> None:
        self._metrics.set_level("prefetch_buffer_bytes", "", self._held)

"""Best-effort prefetch: pages move from far tiers into host memory while SGLang allocates and queues.

When exists() reports a hit, SGLang will most likely read those pages once it has allocated host memory and served the
requests before. ``announce`` gets the keys in chain order, a few threads fetch them into a bounded buffer, and a
foreground read takes them from there. A foreground read never waits for a page that is only planned: it reads that page
itself. It waits for a page that is being fetched, so that no bytes are transferred twice simultaneously.

SGLang tells a backend neither about an abort nor that a hit was below its threshold. So an announced page has a
lifetime; a page unread by then is dropped and counted as wasted. close(), clear() and remove() drop immediately. Waste
is bounded by one buffer per lifetime. A page that was read also stays, for other requests that have found it, until
its space is needed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import operator
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hicache_ext.runtime.background import BackgroundLoop
from hicache_ext.runtime.log_limit import LimitedLog
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.runtime.threads import ThreadPool
from hicache_ext.storage.contract.base import one_for_each
from hicache_ext.storage.contract.store import GetResult, PageBatch, PageStore, grouped, identity_of
from hicache_ext.storage.tiering.background_work import FETCH, READ, IoPriority, StillWanted, always
from hicache_ext.storage.tiering.tier_use import TieringSettings

logger = logging.getLogger(__name__)

_BATCH_PAGES = 32
_nbytes = operator.attrgetter("nbytes")
_PATIENCE = 0.02
"""Seconds a fetch waits for foreground reads. Short, because a request being read needs its next batch."""
_MOST_PLANNED = 16384
"""Limit of planned pages over all tiers. More could not be read before they expire."""


class Announced(NamedTuple):
    """Facts that the pages of one announcement share."""

    source: PageStore
    size: int
    made: float
    """Time of the announcement; its pages expire a lifetime later."""


@dataclass(eq=False, slots=True)
class Fetch:
    """Pages of one announcement, fetched by one call of their tier. Fields change only under the prefetcher's lock."""

    announced: Announced
    keys: list[bytes]
    live: set[bytes]
    """Subset of ``keys`` that a reader may take: not taken, cleared or missing."""
    memory: dict[bytes, npt.NDArray[np.uint8]] = field(default_factory=dict)
    """Separate per page, so that an unread page does not keep the memory of others."""
    held: int = 0
    """Number of pages that have memory or will have it."""
    results: dict[bytes, GetResult] = field(default_factory=dict)
    """The answers of the tier."""
    under_way: bool = True
    unread: set[bytes] = field(default_factory=set)
    """Subset of ``live`` that is in memory and unread."""


class Prefetcher:
    """See the module docstring. Thread-safe; ``announce`` never waits for a store.

    The source tier's metrics count, in pages under ``prefetch`` and in bytes under ``prefetch_bytes``:
    fetched, useful (read by SGLang at least once), wasted (dropped unread); in pages only: overtaken (a read came
    before the fetch), joined (a read came during it), failed. Levels: ``prefetch_buffer_bytes``.
    """

    def __init__(
        self,
        settings: TieringSettings,
        gate: IoPriority,
        metrics: TierMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._gate = gate
        self._metrics = metrics
        self._clock = clock
        self._condition = threading.Condition()
        self._plans: dict[PageStore, dict[bytes, Announced]] = {}
        """Tier -> pages to fetch. Each tier has its own threads, so that one that hangs does not stop the others."""
        self._fetches: dict[Fetch, None] = {}
        """Fetches that have memory, oldest first."""
        self._pages: dict[bytes, Fetch] = {}
        """Live key -> its fetch, whether in the buffer or in flight."""
        self._being_read: list[set[bytes]] = []
        """Keys that foreground reads are reading from their tier."""
        self._sources = 1
        self._fetching: Counter[PageStore] = Counter()
        """Bytes of pages being fetched, by tier."""
        self._held = 0
        """Bytes of all pages being fetched or staged."""
        self._closing = False
        self._threads = ThreadPool("hicache-prefetch")
        self._streams: Counter[PageStore] = Counter()
        """Number of fetching threads, by tier."""
        self._lifetimes = BackgroundLoop("hicache-prefetch-lifetimes", self._drop_expired)
        self._log = LimitedLog(logger)
        self._publish_level()

    def configure(self, settings: TieringSettings, sources: int = 1) -> None:
        """Apply ``settings`` from now on, with ``sources`` tiers. Pages in the buffer stay, with the new lifetime."""
        with self._condition:
            self._settings = settings
            self._sources = max(1, sources)
            self._update()

    def forget_source(self, source: PageStore) -> None:
        """Drop all pages fetched or planned from a tier, because it is no longer in use."""
        with self._condition:
            self._forget([key for key, fetch in self._pages.items() if fetch.announced.source is source])
            self._plans.pop(source, None)
            self._update()

    # -- planning --------------------------------------------------------------------------------------------------

    def announce(self, keys: Sequence[bytes], source: PageStore, size: int, still_wanted: StillWanted = always) -> None:
        """Plan pages of one identity, of ``size`` bytes each, that will probably be read soon, in chain order.

        Pages cleared since ``still_wanted`` are ignored. Pages that don't fit stay planned for their lifetime, so that
        a read learns in which tier they are; without a buffer nothing is fetched, but that works as well. At most
        twice what the buffer holds is planned, because other chains wait for their turn.
        """
        now = self._clock()
        with self._condition:
            buffer = self._settings.prefetch_buffer
            # A page larger than the buffer would block those behind it.
            too_large = 0 < buffer < size
            if self._closing or too_large or not (keys and size) or not still_wanted(identity_of(keys)):
                return
            self._expire(now)
            plan = self._plans.setdefault(source, {})
            asked = dict.fromkeys(keys[:_MOST_PLANNED])
            # Plans of all tiers count, because a page may be planned from another one.
            planned = [asked.keys() & of_tier.keys() for of_tier in self._plans.values()]
            busy = (asked.keys() & self._pages.keys()).union(*planned, *self._being_read)
            most = min(2 * buffer // size if buffer else _MOST_PLANNED, _MOST_PLANNED // self._sources - len(plan))
            new = [key for key in asked if key not in busy][: max(0, most)]
            if new:
                plan.update(dict.fromkeys(new, Announced(source, size, now)))
            self._update()

    def forget(self, wanted: Callable[[bytes], bool]) -> None:
        """Drop the pages whose keys are ``wanted``."""
        with self._condition:
            self._forget([key for key in itertools.chain(self._pages, *self._plans.values()) if wanted(key)])
            self._update()

    # -- foreground reads ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def reading(self, keys: Sequence[bytes]) -> Iterator[tuple[list[Fetch | None], dict[bytes, PageStore]]]:
        """Wrap a foreground read: yield for each key its fetch, done or in flight, or None; and the tier of each page
        that was only planned.

        Those plans are dropped. The caller itself reads keys with None and passes all other pages to ``take``.
        """
        with self._condition:
            self._expire(self._clock())
            fetches = list(map(self._pages.get, keys))
            own = {key for key, fetch in zip(keys, fetches, strict=True) if fetch is None}
            planned: dict[bytes, PageStore] = {}
            for source, plan in self._plans.items():
                if overtaken := plan.keys() & own:
                    _unplan(plan, overtaken)
                    planned.update(dict.fromkeys(overtaken, source))
                    if self._settings.prefetch_buffer:
                        source.metrics.add("prefetch", "overtaken", len(overtaken))
            under_way = [fetch.announced.source for fetch in fetches if fetch is not None and fetch.under_way]
            for source, joined in Counter(under_way).items():
                source.metrics.add("prefetch", "joined", joined)
            self._being_read.append(own)
            self._update()
        try:
            yield fetches, planned
        finally:
            with self._condition:
                self._being_read.remove(own)

    def take(self, batch: PageBatch, fetches: Sequence[Fetch]) -> list[GetResult]:
        """Copy the page of each fetch into host memory, waiting for fetches in flight; return HIT or why there is none.

        MISS, TIMEOUT and the like are the tier's answer: it need not be asked again. REJECTED: the page was dropped
        meanwhile.
        """
        keys, buffers = list(batch.keys), list(batch.buffers)
        results = [GetResult.REJECTED] * len(keys)
        # Copy pages already fetched first, while the rest is in flight.
        for fetch, positions in sorted(grouped(fetches).items(), key=lambda item: item[0].under_way):
            wanted = {keys[position] for position in positions}
            with self._condition:
                while fetch.under_way and not fetch.live.isdisjoint(wanted):
                    self._condition.wait()
                # These references keep the memory of pages dropped while they are being copied outside the lock.
                memory = {key: fetch.memory[key] for key in fetch.live & wanted}
            copied = set()
            for position in positions:
                key, segments, begin = keys[position], buffers[position], 0
                if (answer := fetch.results.get(key, GetResult.HIT)) is not GetResult.HIT:
                    results[position] = answer
                elif key in memory and sum(map(_nbytes, segments)) == fetch.announced.size:
                    for segment in segments:
                        # numpy releases the GIL while it copies.
                        np.copyto(np.frombuffer(segment, np.uint8), memory[key][begin : begin + segment.nbytes])
                        begin += segment.nbytes
                    copied.add(key)
                    results[position] = GetResult.HIT
            with self._condition:
                # Counted under the lock, because a page dropped later counts as wasted if it is still unread.
                if useful := len(fetch.unread & copied):
                    _count(fetch.announced, "useful", useful)
                fetch.unread -= copied
                # The space of pages that were read is available to others.
                self._update()
        return results

    def close(self, longest: float = math.inf) -> None:
        """Drop everything, wait for fetches in flight until ``longest`` (time.monotonic()) at most, and end the
        threads. Idempotent."""
        with self._condition:
            self._closing = True
            self._plans.clear()
            self._forget(list(self._pages))
            self._update()
        self._lifetimes.stop()
        if self._threads.close(None if longest == math.inf else max(0.0, longest - time.monotonic())):
            logger.warning("hicache_ext: a prefetch hangs in its tier; its thread ends with it")

    # -- fetching --------------------------------------------------------------------------------------------------

    def _run(self, source: PageStore) -> None:
        """Fetch until nothing is planned or there is no space; ``_update`` starts another thread later."""
        try:
            while True:
                self._gate.wait(_PATIENCE, READ)
                with self._gate.entered(FETCH):
                    with self._condition:
                        if (fetch := self._next_fetch(source)) is None:
                            self._streams -= Counter([source])
                            return
                    self._fetch(fetch)
        except Exception:
            # Log here, because nobody collects the result of this call.
            logger.exception("hicache_ext: a thread of the prefetch ended in an error that nobody expected")
            with self._condition:
                self._streams -= Counter([source])

    def _next_fetch(self, source: PageStore) -> Fetch | None:
        """Return the next fetch, of one announcement, as large as the space allows. The lock is held."""
        plan, buffer = self._plans.get(source), self._settings.prefetch_buffer
        if not plan:
            return None
        announced = next(iter(plan.values()))
        size = announced.size
        wanted = min(_BATCH_PAGES, len(plan)) * size
        for fetch in list(self._fetches):
            if self._held + wanted <= buffer:
                break
            if not fetch.under_way:
                self._drop(fetch, fetch.live - fetch.unread)
        # With several tiers, none may fill the buffer with fetches that do not end.
        share = buffer if self._sources < 2 else max(size, buffer // 2)
        room = min(wanted, share - self._fetching[source], buffer - self._held) // size
        if room <= 0:
            return None
        keys = [key for key, of_key in itertools.islice(plan.items(), room) if of_key is announced]
        _unplan(plan, keys)
        fetch = Fetch(announced, keys, set(keys), held=len(keys))
        self._fetches[fetch] = None
        self._pages.update(dict.fromkeys(keys, fetch))
        self._held += len(keys) * size
        self._fetching[source] += len(keys) * size
        return fetch

    def _fetch(self, fetch: Fetch) -> None:
        source, size = fetch.announced.source, fetch.announced.size
        try:
            fetch.memory = {key: np.empty(size, np.uint8) for key in fetch.keys}
            batch = PageBatch(fetch.keys, [[page.data] for page in fetch.memory.values()])
            # Check the number of answers now: a missing one would leave a foreground read waiting for its page.
            answers = one_for_each(source.get(batch), len(fetch.keys))
        except BaseException as error:  # noqa: BLE001 - also a panic inside a client library: readers wait for them
            kind, words = f"{source.name} {type(error).__name__}", "hicache_ext: prefetch from %s: %r"
            self._log.log(logging.ERROR, kind, words, source.name, error, exc_info=error)
            answers = [GetResult.ERROR] * len(fetch.keys)
        results = dict(zip(fetch.keys, answers, strict=True))
        hits = {key for key, result in results.items() if result is GetResult.HIT}
        source.metrics.add("prefetch", "failed", len(fetch.keys) - len(hits))
        _count(fetch.announced, "fetched", len(hits))
        with self._condition:
            self._fetching -= Counter({source: len(fetch.keys) * size})
            self._drop(fetch, fetch.live - hits)
            # Pages dropped while they were being fetched were no longer wanted.
            _count(fetch.announced, "wasted", len(hits - fetch.live))
            fetch.unread, fetch.results, fetch.under_way = set(fetch.live), results, False
            self._release(fetch)
            self._update()
            self._lifetimes.wake(max(0.0, fetch.announced.made + self._settings.prefetch_lifetime - self._clock()))

    def _drop_expired(self) -> float:
        with self._condition:
            now = self._clock()
            self._expire(now)
            self._update()
            oldest = min((fetch.announced.made for fetch in self._fetches if not fetch.under_way), default=math.inf)
            return oldest + self._settings.prefetch_lifetime - now

    # -- under the lock --------------------------------------------------------------------------------------------

    def _expire(self, now: float) -> None:
        made = now - self._settings.prefetch_lifetime
        # Scan all, because fetches are in order of their begin: those of a slow tier may expire before others.
        for fetch in [fetch for fetch in self._fetches if fetch.announced.made <= made and not fetch.under_way]:
            self._drop(fetch, fetch.live)
        for plan in self._plans.values():
            if plan and next(iter(plan.values())).made <= made:
                _unplan(plan, [key for key, announced in plan.items() if announced.made <= made])

    def _forget(self, keys: Iterable[bytes]) -> None:
        """Drop planned, fetched and in-flight pages."""
        of_fetch: dict[Fetch, set[bytes]] = {}
        for key in (wanted := set(keys)) & self._pages.keys():
            of_fetch.setdefault(self._pages[key], set()).add(key)
        for fetch, some in of_fetch.items():
            self._drop(fetch, some)
        for plan in self._plans.values():
            _unplan(plan, plan.keys() & wanted)

    def _drop(self, fetch: Fetch, keys: set[bytes]) -> None:
        """Forget live pages of a fetch; free their memory unless the fetch is in flight."""
        for key in keys:
            del self._pages[key]
        if wasted := len(fetch.unread & keys):
            _count(fetch.announced, "wasted", wasted)
            fetch.unread = fetch.unread - keys
        fetch.live = fetch.live - keys
        if not fetch.under_way:
            self._release(fetch)

    def _release(self, fetch: Fetch) -> None:
        """Free the memory of a completed fetch except that of its live pages."""
        fetch.memory = {key: page for key, page in fetch.memory.items() if key in fetch.live}
        self._held -= (fetch.held - len(fetch.memory)) * fetch.announced.size
        fetch.held = len(fetch.memory)
        if not fetch.live:
            self._fetches.pop(fetch, None)

    def _update(self) -> None:
        """Call after any change of state: wake readers, and start threads for tiers with planned pages."""
        self._publish_level()
        self._condition.notify_all()
        for source, plan in self._plans.items() if self._settings.prefetch_buffer else ():
            threads = min(self._streams[source] + -(-len(plan) // _BATCH_PAGES), self._settings.prefetch_streams)
            # If no thread can be started, a foreground read reads the pages from their tier itself.
            with contextlib.suppress(RuntimeError):
                while self._streams[source] < threads:
                    self._threads.start(functools.partial(self._run, source))
                    self._streams[source] += 1

    def _publish_level(self) -> None:
        self._metrics.set_level("prefetch_buffer_bytes", "", self._held)


def _unplan(plan: dict[bytes, Announced], keys: Iterable[bytes]) -> None:
    for key in keys:
        del plan[key]


def _count(announced: Announced, outcome: str, pages: int) -> None:
    announced.source.metrics.add("prefetch", outcome, pages)
    announced.source.metrics.add("prefetch_bytes", outcome, pages * announced.size)

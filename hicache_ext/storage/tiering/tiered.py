"""Several stores as one: reads follow the order of ``retrieve``, writes go to every store of ``store``.

A read asks a far tier only for what the nearer ones lack. Pages that exists() has just found in a far tier are read
from it directly, in parallel with the near tiers. Pages found behind ``promote_to`` are written to it in the background
(tier_handle.py); pages that exists() found in far tiers are fetched ahead of the read (prefetch.py); tiers with the
policy ``async`` are written in the background (tier_handle.py). Reasons: docs/decisions/several-tiers.md.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from hicache_ext.errors import StoreClosedError
from hicache_ext.runtime.call_gate import CallGate
from hicache_ext.runtime.log_limit import LimitedLog
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.runtime.threads import ThreadPool
from hicache_ext.storage.contract.base import leading
from hicache_ext.storage.contract.reports import OF_ANSWERS
from hicache_ext.storage.contract.store import (
    GetResult,
    PageBatch,
    PageStore,
    SetResult,
    StoreInfo,
    by_identity,
    chosen_keys,
    counted,
    identities_of,
    identity_of,
)
from hicache_ext.storage.tiering import observers
from hicache_ext.storage.tiering.background_work import FETCH, READ, Generations, IoPriority, of_identities
from hicache_ext.storage.tiering.tier_handle import ADMINISTRATION_WAIT, TierHandle, Work
from hicache_ext.storage.tiering.tier_use import TieringSettings

if TYPE_CHECKING:
    from hicache_ext.storage.tiering.prefetch import Fetch, Prefetcher

logger = logging.getLogger(__name__)

LookIn = Callable[[TierHandle, Sequence[bytes]], npt.NDArray[np.bool_]]

_Argument = TypeVar("_Argument")
_T = TypeVar("_T")

_WORST_LAST = (
    *(SetResult.STORED, SetResult.EXISTS, SetResult.REFUSED),
    *(SetResult.REJECTED, SetResult.TIMEOUT, SetResult.ERROR),
)
_PATIENCE = 1.0
"""Seconds a batch of promotions waits for foreground reads and prefetches to end, and bring_inward() for foreground
reads and earlier promotions."""
_CALLS_END = 60.0
"""Seconds a reload waits for calls on the tiers it removes."""
_CLOSE_WAIT = 1.0
"""Seconds beyond ``drain`` that close() waits for stores that do not close."""


class Arrangement:
    """Which tiers are read and written, and in what order. Handles outlive it: a reload installs a new arrangement."""

    def __init__(
        self,
        retrieve: Sequence[TierHandle],
        store: Sequence[TierHandle],
        promote_to: TierHandle | None,
        settings: TieringSettings,
    ) -> None:
        """``promote_to`` is one of ``retrieve`` other than the last."""
        self.retrieve = list(retrieve)
        self.promote_to = promote_to
        self.settings = settings
        self.sync = [tier for tier in store if tier.name not in settings.async_tiers]
        self.later = [tier for tier in store if tier.name in settings.async_tiers]
        """Tiers written in the background."""
        self.tiers = list({id(tier): tier for tier in [*retrieve, *store]}.values())
        self.inner_tiers = 1
        """Number of tiers read in place; pages of tiers further out are fetched ahead and promoted."""
        if promote_to is not None:
            self.inner_tiers = 1 + self.retrieve.index(promote_to)
        elif len(retrieve) == 1 and retrieve[0].describe().shared:
            self.inner_tiers = 0
        self.only_tier = self.retrieve[0] if len(retrieve) == self.inner_tiers == 1 else None
        """Set if no tier lies further out: nothing is prefetched, joined or promoted."""
        self.calls = CallGate("tiers")

    def looked_up(self, keys: Sequence[bytes], leading: int) -> None:
        """Tell the tiers' admission about a lookup of a chain whose first ``leading`` pages are present."""
        for tier in self.tiers:
            if tier.admission is not None:
                tier.admission.looked_up(keys, leading)


class TieredStore:
    """A PageStore over PageStores whose order may change while calls are in flight (``rearrange``). Threads: any.

    A page counts as written once one synchronous store has it: a store that is down must not end SGLang's whole backup.
    If all stores are asynchronous, it counts as written once one has queued it.
    """

    def __init__(
        self,
        retrieve: Sequence[PageStore],
        store: Sequence[PageStore],
        *,
        promote_to: PageStore | None = None,
        settings: TieringSettings | None = None,
    ) -> None:
        """``promote_to`` is one of ``retrieve`` other than the last. Owns the stores: close() closes them."""
        handles = {id(tier): TierHandle(tier) for tier in (*retrieve, *store)}
        self._begin(
            Arrangement(
                [handles[id(tier)] for tier in retrieve],
                [handles[id(tier)] for tier in store],
                None if promote_to is None else handles[id(promote_to)],
                settings or TieringSettings(),
            )
        )

    def _begin(self, arrangement: Arrangement) -> None:
        self._metrics = TierMetrics("all")
        self._metrics.declare(OF_ANSWERS)
        self._chains: set[bytes] = set()
        """Identities whose pages are looked up as a chain, not individually."""
        self._gate = IoPriority()
        self._generations = Generations()
        self._metrics.set_level("prefetch_buffer_bytes", "", 0.0)
        self._prefetcher: Prefetcher | None = None
        """Created once there is a tier to fetch from."""
        self._page_bytes: dict[bytes, int] = {}
        self._helpers = ThreadPool("hicache-tiers")
        self._log = LimitedLog(logger)
        self._changing = threading.Lock()
        """Guards changes of the arrangement and of ``_identities``, which new tiers must know."""
        self._identities: dict[bytes, dict[str, Any]] = {}
        self._closed = False
        self._leaving: list[TierHandle] = []
        self._arrangement = arrangement
        self._configure(arrangement)

    # -- which tiers -----------------------------------------------------------------------------------------------

    def rearrange(self, arrangement: Arrangement) -> None:
        """Switch to another arrangement atomically; return when the calls that began before have ended.

        Registers the known identities with new tiers first. Work queued for tiers that stay continues; the caller
        closes the tiers that are no longer in use. Raises StoreClosedError, and then nothing has changed.
        """
        known = set(map(id, self._arrangement.tiers))
        leaving = [tier for tier in self._arrangement.tiers if tier not in arrangement.tiers]
        new_tiers = [tier for tier in arrangement.tiers if id(tier) not in known]
        registered: set[bytes] = set()
        self._configure(arrangement)
        while True:
            with self._changing:
                if self._closed:
                    raise StoreClosedError(self.name)
                missing = {key: text for key, text in self._identities.items() if key not in registered}
                if not missing:
                    self._leaving = leaving
                    before, self._arrangement = self._arrangement, arrangement
                    break
            # Outside the lock, because SGLang's scheduler may be about to register more.
            _register(new_tiers, missing)
            registered |= missing.keys()
        before.calls.shut_within(_CALLS_END)
        for tier in leaving:
            self.drop_prefetched(tier)

    def all_have_left(self) -> None:
        """Forget the tiers of former arrangements; they are closed."""
        self._leaving = []

    def _configure(self, arrangement: Arrangement) -> None:
        """Create what calls under this arrangement need. Calls under another one may be in flight."""
        settings = arrangement.settings
        if arrangement.only_tier is None and self._prefetcher is None:
            from hicache_ext.storage.tiering.prefetch import Prefetcher

            self._prefetcher = Prefetcher(settings, self._gate, self._metrics)
        if self._prefetcher is not None:
            self._prefetcher.configure(settings, len(arrangement.retrieve) - arrangement.inner_tiers)
        for tier in arrangement.tiers:
            tier.promotions.before_batch = lambda: self._gate.wait(_PATIENCE, READ, FETCH)
            tier.configure(settings)
        for tier in arrangement.later:
            tier.writes.declare()
        if arrangement.promote_to is not None:
            arrangement.promote_to.promotions.declare()

    @contextmanager
    def _entered(self) -> Iterator[Arrangement]:
        """Wrap a call: yield the current arrangement, which stays usable inside."""
        while True:
            arrangement = self._arrangement
            try:
                arrangement.calls.__enter__()
            except StoreClosedError:
                if arrangement is self._arrangement:
                    raise StoreClosedError(self.name) from None
            else:
                break
        try:
            yield arrangement
        finally:
            arrangement.calls.__exit__()

    @property
    def arrangement(self) -> Arrangement:
        """The current arrangement, for inspection only: it may be replaced at any moment."""
        return self._arrangement

    @property
    def name(self) -> str:
        return "+".join(tier.name for tier in self._arrangement.tiers)

    @property
    def metrics(self) -> TierMetrics:
        """Answers given to SGLang, whichever tier they came from: ``get`` by result, ``gap`` for hits past a gap."""
        return self._metrics

    @property
    def tiers(self) -> list[PageStore]:
        return list(self._arrangement.tiers)

    @property
    def prefetcher(self) -> Prefetcher:
        """The prefetcher; it does not exist if a single private tier is all that is read."""
        assert self._prefetcher is not None
        return self._prefetcher

    def drop_prefetched(self, source: TierHandle) -> None:
        """Drop what was prefetched from this tier."""
        if self._prefetcher is not None:
            self._prefetcher.forget_source(source)

    def describe(self) -> StoreInfo:
        arrangement = self._arrangement
        return StoreInfo(
            name=self.name,
            type="tiered",
            shared=any(tier.describe().shared for tier in arrangement.tiers),
            details={
                "retrieve": [tier.name for tier in arrangement.retrieve],
                "store": [tier.name for tier in arrangement.sync],
                "store_async": [tier.name for tier in arrangement.later],
                "promote_to": None if arrangement.promote_to is None else arrangement.promote_to.name,
            },
        )

    def register_identity(self, digest: bytes, document: dict[str, Any]) -> None:
        pool = document.get("pool")
        segments = pool.get("segments") if isinstance(pool, dict) else None
        if segments:
            self._page_bytes[digest] = sum(segments)
        with self._changing:
            self._identities[digest] = document
        with self._entered() as arrangement:
            _register(arrangement.tiers, {digest: document})

    # -- reading ---------------------------------------------------------------------------------------------------

    def get(self, batch: PageBatch) -> list[GetResult]:
        with self._entered() as arrangement:
            if batch.sizes:
                # For identities whose document has no sizes (flat tensors) or was registered with the tiers only.
                self._page_bytes.setdefault(identity_of(batch.keys), batch.sizes[0])
            tier = arrangement.only_tier
            if tier is None:
                return self._get_from_several(batch, arrangement)
            results = self._call(tier, "get", tier.get, batch, [GetResult.ERROR] * len(batch.sizes))
            leading = _leading_hits(results)
            self._count(batch, results, leading, [(tier, leading)])
            return results

    def _get_from_several(self, batch: PageBatch, arrangement: Arrangement) -> list[GetResult]:
        still_wanted = self._generations.moment()
        read = _Read(batch, arrangement)
        prefetcher = self.prefetcher
        with prefetcher.reading(read.keys) as (staged, planned):
            own = [position for position, fetch in enumerate(staged) if fetch is None]
            self._read_known_places(read, own, planned)
            self._walk(read, own)
            if len(own) < len(staged):
                with self._gate.entered(READ):
                    # Promotion waits, because prefetched pages came from far tiers, too.
                    self._take_staged(read, staged, prefetcher)
        leading = _leading_hits(read.results)
        places = [read.places[position] for position in range(leading)]
        tiers = arrangement.retrieve
        self._count(batch, read.results, leading, [(tiers[place], count) for place, count in Counter(places).items()])
        if arrangement.promote_to is not None:
            # The leading run is known only now; nothing behind a gap is promoted.
            outer = [position for position, place in enumerate(places) if place >= arrangement.inner_tiers]
            if outer:
                arrangement.promote_to.promotions.offer(batch.select(outer), still_wanted)
        return read.results

    def _read_known_places(self, read: _Read, positions: Sequence[int], planned: Mapping[bytes, PageStore]) -> None:
        """Read pages that exists() found in far tiers from there, others from the nearest; all tiers in parallel."""
        if not planned:
            return
        numbers: dict[PageStore | None, int] = {tier: number for number, tier in enumerate(read.arrangement.retrieve)}
        by_tier: dict[int, list[int]] = {}
        for position in positions:
            by_tier.setdefault(numbers.get(planned.get(read.keys[position]), 0), []).append(position)
        reads = list(by_tier.items())
        self._run_all(len(reads), lambda i: self._read_tier(read, *reads[i]))

    def _walk(self, read: _Read, positions: Iterable[int]) -> None:
        """Ask each tier for the pages still missing that it was not asked for yet, near tiers first."""
        for number in range(len(read.arrangement.retrieve)):
            missing = [p for p in positions if read.results[p] is not GetResult.HIT and not read.asked[p] >> number & 1]
            if missing:
                self._read_tier(read, number, missing)

    def _read_tier(self, read: _Read, number: int, positions: Sequence[int]) -> None:
        tier = read.arrangement.retrieve[number]
        with self._gate.entered(READ) if number >= read.arrangement.inner_tiers else nullcontext():
            results = self._call(
                tier, "get", tier.get, read.batch.select(positions), [GetResult.ERROR] * len(positions)
            )
        read.note(positions, number, results)

    def _take_staged(self, read: _Read, staged: Sequence[Fetch | None], prefetcher: Prefetcher) -> None:
        positions = [position for position, fetch in enumerate(staged) if fetch is not None]
        fetches = [fetch for fetch in staged if fetch is not None]
        results = prefetcher.take(read.batch.select(positions), fetches)
        for number, tier in enumerate(read.arrangement.retrieve):
            answered = [
                at
                for at, fetch in enumerate(fetches)
                if fetch.announced.source is tier and results[at] is not GetResult.REJECTED
            ]
            read.note([positions[at] for at in answered], number, [results[at] for at in answered])
        # This includes pages of a tier that is no longer in use.
        if failed := [position for position in positions if read.results[position] is not GetResult.HIT]:
            self._walk(read, failed)

    def _count(
        self, batch: PageBatch, results: Sequence[GetResult], leading: int, sources: Sequence[tuple[PageStore, int]]
    ) -> None:
        """Count the results of a read. ``sources``: number of pages of the leading run from each tier."""
        if leading == len(results):
            self._metrics.add("get", "hit", leading)
        else:
            counts = counted(results)
            # SGLang uses only the leading run: a page read past a gap is no hit to it.
            hits = counts.pop("hit", 0)
            counts |= {reason: count for reason, count in (("hit", leading), ("gap", hits - leading)) if count}
            self._metrics.add_many("get", counts)
        if leading and identity_of(batch.keys) in self._chains:
            self._metrics.add("chain_pages", "used", leading)
            for tier, count in sources:
                tier.metrics.add("chain_pages", "used", count)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        with self._entered() as arrangement:
            present: list[bool] = (self._find(keys, arrangement, self._known_in) >= 0).tolist()
            return present

    def count_leading(self, keys: Sequence[bytes]) -> int:
        """Return the length of the leading run over all tiers; start to prefetch its pages in far tiers."""
        with self._entered() as arrangement:
            tier = arrangement.only_tier
            if tier is None:
                return self._lead_over_several(keys, arrangement)
            leading = self._call(tier, "exists", tier.count_leading, keys, 0) if keys else 0
            self._count_found(keys, {0: leading}, arrangement)
            arrangement.looked_up(keys, leading)
            return leading

    def _lead_over_several(self, keys: Sequence[bytes], arrangement: Arrangement) -> int:
        still_wanted = self._generations.moment()
        # The first page that the last tier lacks ends the run, so it need not look up those behind.
        places = self._find(keys, arrangement, self._leading_in)
        places = places[: leading((places >= 0).tolist())]
        self._count_found(keys, dict(enumerate(np.bincount(places).tolist())), arrangement)
        arrangement.looked_up(keys, len(places))
        if len(places):
            for number in range(arrangement.inner_tiers, len(arrangement.retrieve)):
                here = chosen_keys(keys, np.flatnonzero(places == number))
                for _, some in by_identity(here):
                    size = self._page_bytes.get(some.identity, 0)
                    self.prefetcher.announce(some, arrangement.retrieve[number], size, still_wanted)
        return len(places)

    def _count_found(self, keys: Sequence[bytes], found: Mapping[int, int], arrangement: Arrangement) -> None:
        """Count the leading run of ``keys``; ``found``: number of its pages in each tier.

        A page counts as asked in the first tier and in each one further out until one has it. ``count_absent`` counts
        the pages behind the run.
        """
        asked = sum(found.values())
        if not asked:
            return
        # Before anybody can read them, because a read of a chain counts as used.
        self._chains.add(identity_of(keys))
        self._metrics.add_many("chain_pages", {"asked": asked, "found": asked})
        if (recorder := observers.recorder) is not None:
            recorder.note_found({tier.name: found.get(place, 0) for place, tier in enumerate(arrangement.retrieve)})
        for place, tier in enumerate(arrangement.retrieve):
            if not asked:
                break
            has = found.get(place, 0)
            tier.metrics.add_many("chain_pages", {"asked": asked, "found": has})
            asked -= has

    def count_absent(self, pages: int) -> None:
        """Count pages of a chain behind the leading run as asked: no tier could serve them, although look-ups end at
        the first gap and may not have asked it."""
        for metrics in (self._metrics, *(tier.metrics for tier in self._arrangement.retrieve)):
            metrics.add("chain_pages", "asked", pages)

    def _find(self, keys: Sequence[bytes], arrangement: Arrangement, look_in_last: LookIn) -> npt.NDArray[np.intp]:
        """Return the number of the tier that has each page, or -1. Ask each tier only for what the nearer ones lack."""
        places = np.full(len(keys), -1)
        for number, tier in enumerate(arrangement.retrieve):
            missing = np.flatnonzero(places < 0)
            if not len(missing):
                break
            wanted = chosen_keys(keys, missing)
            known = (look_in_last if tier is arrangement.retrieve[-1] else self._known_in)(tier, wanted)
            places[missing[known]] = number
        return places

    def _known_in(self, tier: TierHandle, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Return a mask of the keys that a tier has."""
        return np.array(self._call(tier, "exists", tier.contains, keys, [False] * len(keys)), np.bool_)

    def _leading_in(self, tier: TierHandle, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Return a mask of the leading run of ``keys`` in a tier."""
        return np.arange(len(keys)) < self._call(tier, "exists", tier.count_leading, keys, 0)

    # -- writing ---------------------------------------------------------------------------------------------------

    def set(self, batch: PageBatch) -> list[SetResult]:
        still_wanted = self._generations.moment()
        with self._entered() as arrangement:
            if batch.sizes:
                self._page_bytes.setdefault(identity_of(batch.keys), batch.sizes[0])
            failed = [SetResult.ERROR] * len(batch.sizes)
            # First, because it only copies: the queues are then written in parallel with the synchronous tiers.
            queued = [
                self._call(tier, "queue", functools.partial(tier.set_later, still_wanted=still_wanted), batch, failed)
                for tier in arrangement.later
            ]
            tiers = arrangement.sync
            written = self._run_all(len(tiers), lambda at: self._call(tiers[at], "set", tiers[at].set, batch, failed))
            best, *others = written or queued or [[SetResult.REJECTED] * len(batch.sizes)]
            for answers in others:
                best = [min(pair, key=_WORST_LAST.index) for pair in zip(best, answers, strict=True)]
            self._metrics.add_many("set", counted(best))
            return best

    # -- administration --------------------------------------------------------------------------------------------

    def stored(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which keys need not be written, because every tier that is written has them."""
        with self._entered() as arrangement:
            absent = [False] * len(keys)
            written = (*arrangement.sync, *arrangement.later)
            answers = [self._call(tier, "contains", tier.contains, keys, absent) for tier in written]
        return [all(known) for known in zip(*answers, strict=True)] if answers else [False] * len(keys)

    def count_leading_in_pool(self, keys: Sequence[bytes]) -> int:
        """Return the length of the leading run that other nodes find: in the written tiers, the shared ones if any."""
        with self._entered() as arrangement:
            written = [*arrangement.sync, *arrangement.later]
            pool = [tier for tier in written if tier.describe().shared] or written
            return max((self._call(tier, "exists", tier.count_leading_stored, keys, 0) for tier in pool), default=0)

    def bring_inward(self, keys: Sequence[bytes]) -> Counter[str]:
        """Promote what ``promote_to`` lacks of the leading run of ``keys``, before anybody asks for it.

        Return how many pages were present, fetched, absent (with all behind a gap) and dropped (promotion queue full).
        Allocates the pages' size in memory. Not for SGLang's threads: it waits for foreground reads and for tiers.
        """
        with self._entered() as arrangement:
            target = arrangement.promote_to
            size = self._page_bytes.get(identity_of(keys), 0) if keys else 0
            if target is None or not size:
                return Counter(dropped=len(keys))
            still_wanted = self._generations.moment()
            target.promotions.wait_until_written(_PATIENCE)
            self._gate.wait(_PATIENCE, READ)
            here = self._call(target, "contains", target.contains, keys, [False] * len(keys))
            missing = [key for key, known in zip(keys, here, strict=True) if not known]
            read = _Read(PageBatch(missing, [[memoryview(bytearray(size))] for _ in missing]), arrangement)
            for number in range(arrangement.inner_tiers, len(arrangement.retrieve)):
                positions = [p for p, result in enumerate(read.results) if result is not GetResult.HIT]
                if positions:
                    # Not _read_tier: this is no foreground read.
                    tier, failed = arrangement.retrieve[number], [GetResult.ERROR] * len(positions)
                    results = self._call(tier, "get", tier.get, read.batch.select(positions), failed)
                    read.note(positions, number, results)
            leading = _leading_hits(read.results)
            offered = target.promotions.offer(read.batch.select(range(leading)), still_wanted)
            dropped = offered.count(SetResult.REJECTED)
        present, absent = len(keys) - len(missing), len(missing) - leading
        return Counter(present=present, fetched=leading - dropped, dropped=dropped, absent=absent)

    def remove(self, keys: Sequence[bytes]) -> int:
        with self._entered() as arrangement:
            wanted = list(dict.fromkeys(keys))
            is_wanted = set(wanted).__contains__
            self._invalidate(identities_of(wanted), is_wanted)
            # A page in two tiers is one page, so the tiers' own counts cannot be added.
            tiers: Sequence[TierHandle] = list(self._tiers_in_use(arrangement))
            present = self._helpers.run(len(tiers), lambda number: self._remove_from(tiers[number], wanted))
            if arrangement.promote_to is not None:
                # Once more, for work that began to read an outer tier before the removal there and ends only now.
                self._invalidate(identities_of(wanted), is_wanted)
                self._remove_from(arrangement.promote_to, wanted)
            return sum(any(known) for known in zip(*present, strict=True))

    def _invalidate(self, digests: Sequence[bytes] | None, wanted: Callable[[bytes], bool]) -> None:
        """Keep background work that is already reading these pages from bringing them back. ``digests``: their
        identities, None for all."""
        self._generations.advance(digests)
        if self._prefetcher is not None:
            self._prefetcher.forget(wanted)

    def _remove_from(self, tier: TierHandle, keys: list[bytes]) -> list[bool]:
        """Remove ``keys`` from a tier; return which of them it had."""
        present = self._call(tier, "contains", tier.contains, keys, [False] * len(keys))
        self._call(tier, "remove", tier.remove, keys, 0)
        return present

    def _tiers_in_use(self, arrangement: Arrangement) -> AbstractSet[TierHandle]:
        """Return the tiers of a call's arrangement, those of one that a reload has installed meanwhile, and those that
        are leaving, whose queues are still written."""
        return {*arrangement.tiers, *self._arrangement.tiers, *self._leaving}

    def clear(self, digests: Sequence[bytes] | None) -> int:
        """Clear as the contract says: hide the pages in all tiers immediately; wait only for tiers that are quick."""
        with self._entered() as arrangement:
            wanted = of_identities(digests)
            self._invalidate(digests, wanted)
            # Loop, because a reload may install further tiers meanwhile.
            begun: dict[TierHandle, Work | None] = {}
            while left := self._tiers_in_use(arrangement) - begun.keys():
                for tier in left:
                    begun[tier] = self._call(tier, "clear", tier.begin_clear, digests, None)
            # Once more, for work that began to read a tier before it was cleared and ends only now.
            self._invalidate(digests, wanted)
            for tier in begun:
                tier.promotions.forget(wanted)
            deadline = time.monotonic() + ADMINISTRATION_WAIT
            answers = [tier.wait_for(work, deadline) for tier, work in begun.items() if work is not None]
            return max(answers, default=0)

    def wait_until_written(self, timeout: float) -> bool:
        """Return whether all pending promotions, background writes and removals ended within ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        tiers = self._arrangement.tiers
        return all(tier.wait_until_written(max(0.0, deadline - time.monotonic())) for tier in tiers)

    def close(self) -> None:
        """End background work and close the tiers in parallel, within ``drain`` plus a second even if something hangs.
        Raise the first error of a tier afterwards. Idempotent."""
        with self._changing:
            if self._closed:
                return
            self._closed = True
            arrangement = self._arrangement
        drain = time.monotonic() + arrangement.settings.drain
        longest = drain + _CLOSE_WAIT
        # Release what waits in the I/O gate.
        self._gate.close()
        if not arrangement.calls.shut_within(max(0.0, drain - time.monotonic())):
            logger.warning("hicache_ext: calls under way do not end; their threads end with them")
        parts: list[Callable[[], object]] = [
            *([] if self._prefetcher is None else [functools.partial(self._prefetcher.close, longest)]),
            *[functools.partial(tier.end_by, drain, longest) for tier in arrangement.tiers],
        ]

        def end(number: int) -> Exception | None:
            try:
                parts[number]()
            except Exception as error:
                logger.exception("hicache_ext: closing a tier")
                return error
            return None

        # Each part ends at ``longest`` on its own.
        errors = [error for error in self._helpers.run(len(parts), end) if error is not None]
        self._helpers.close(max(0.0, longest - time.monotonic()))
        if errors:
            raise errors[0]

    def _run_all(self, count: int, work: Callable[[int], _T]) -> list[_T]:
        """Run ``work(0..count-1)`` with the help of other threads."""
        spans = observers.spans
        return self._helpers.run(count, work if spans is None else spans.carried(work))

    def _call(
        self, tier: PageStore, operation: str, call: Callable[[_Argument], _T], argument: _Argument, otherwise: _T
    ) -> _T:
        """Return ``call(argument)``, measured, or ``otherwise`` if the tier raises, which the contract forbids."""
        answer, started = None, time.perf_counter()
        try:
            answer = call(argument)
            return answer
        except StoreClosedError:
            tier.metrics.add("failure", "closed")
            return otherwise
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001 - also a panic inside a client library
            tier.metrics.add("failure", operation)
            kind, words = f"{tier.name} {operation} {type(error).__name__}", "hicache_ext: tier %s, %s: %r"
            self._log.log(logging.ERROR, kind, words, tier.name, operation, error, exc_info=error)
            return otherwise
        finally:
            seconds = time.perf_counter() - started
            tier.metrics.observe(operation, seconds)
            if (spans := observers.spans) is not None:
                spans.tell(tier.name, operation, argument, answer, seconds)


class _Read:
    """The state of one foreground read on its way through the tiers. Threads write disjoint positions."""

    def __init__(self, batch: PageBatch, arrangement: Arrangement) -> None:
        self.batch = batch
        self.arrangement = arrangement
        self.keys = list(batch.keys)
        self.results = [GetResult.MISS] * len(batch)
        self.places = [0] * len(batch)
        """Number of the tier that each hit came from."""
        self.asked = [0] * len(batch)
        """Bit mask per page of the tiers that were asked for it."""

    def note(self, positions: Sequence[int], number: int, results: Sequence[GetResult]) -> None:
        """Note what the tier of this number has answered for these pages."""
        for position, result in zip(positions, results, strict=True):
            self.asked[position] |= 1 << number
            # An error of a near tier says more than a miss of a far one.
            if result is not GetResult.MISS:
                self.results[position] = result
            if result is GetResult.HIT:
                self.places[position] = number


def _register(tiers: Iterable[TierHandle], documents: Mapping[bytes, dict[str, Any]]) -> None:
    """Register identities with all of these tiers in parallel."""
    begun = [(tier, tier.begin_register(*item)) for tier in tiers for item in documents.items()]
    deadline = time.monotonic() + ADMINISTRATION_WAIT
    for tier, work in begun:
        tier.wait_for(work, deadline)


def _leading_hits(results: Sequence[GetResult]) -> int:
    if results.count(GetResult.HIT) == len(results):
        return len(results)
    return next(position for position, result in enumerate(results) if result is not GetResult.HIT)

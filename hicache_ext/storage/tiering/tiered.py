"""Several stores as one: read in the order of ``retrieve``, written to every store of ``store``.

A read asks a far tier only for what the nearer ones lack. Pages that exists() has just found far out are read from
there at once, beside the near tiers. Pages found behind ``promote_to`` are written to it in the background
(tier_handle.py); pages that exists() found far out are fetched ahead of the read (prefetch.py); tiers with the policy
``async`` are written in the background (tier_handle.py). Reasons: docs/decisions/several-tiers.md.
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
"""Seconds for which a batch of promotions waits for foreground reads and prefetches, and pages that nobody has asked
for yet for foreground reads and earlier promotions."""
_CALLS_END = 60.0
"""Seconds that a reload waits for calls on tiers that it takes out."""
_CLOSE_WAIT = 1.0
"""Seconds for which close() waits for stores that do not close, beyond ``drain``."""


class Arrangement:
    """Which tiers are asked and written, and in what order. Handles outlive it: a reload puts another in force."""

    def __init__(
        self,
        retrieve: Sequence[TierHandle],
        store: Sequence[TierHandle],
        promote_to: TierHandle | None,
        settings: TieringSettings,
    ) -> None:
        """``promote_to``: one of ``retrieve``, and not the last of them."""
        self.retrieve = list(retrieve)
        self.promote_to = promote_to
        self.settings = settings
        self.sync = [tier for tier in store if tier.name not in settings.async_tiers]
        self.later = [tier for tier in store if tier.name in settings.async_tiers]
        """Written in the background."""
        self.tiers = list({id(tier): tier for tier in [*retrieve, *store]}.values())
        self.inner_tiers = 1
        """How many tiers are read in place: what lies further out is fetched ahead and promoted."""
        if promote_to is not None:
            self.inner_tiers = 1 + self.retrieve.index(promote_to)
        elif len(retrieve) == 1 and retrieve[0].describe().shared:
            self.inner_tiers = 0
        self.only_tier = self.retrieve[0] if len(retrieve) == self.inner_tiers == 1 else None
        """Nothing lies further out: nothing is prefetched, joined or promoted."""
        self.calls = CallGate("tiers")

    def looked_up(self, keys: Sequence[bytes], leading: int) -> None:
        """Tell admission of a chain of which the first ``leading`` pages are there."""
        for tier in self.tiers:
            if tier.admission is not None:
                tier.admission.looked_up(keys, leading)


class TieredStore:
    """A PageStore over PageStores, whose order may be changed while calls go on (``rearrange``). Threads: any.

    A page counts as written when one synchronous store has it: a store that is down must not end SGLang's whole backup.
    Where all are asynchronous it counts as written when one has taken it into its queue.
    """

    def __init__(
        self,
        retrieve: Sequence[PageStore],
        store: Sequence[PageStore],
        *,
        promote_to: PageStore | None = None,
        settings: TieringSettings | None = None,
    ) -> None:
        """``promote_to`` is one of ``retrieve``, and not the last of them. Owns the stores: close() closes them."""
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
        """Identities whose pages are looked up as a chain, and not one by one."""
        self._gate = IoPriority()
        self._generations = Generations()
        self._metrics.set_level("prefetch_buffer_bytes", "", 0.0)
        self._prefetcher: Prefetcher | None = None
        """Made when there is a tier to fetch from."""
        self._page_bytes: dict[bytes, int] = {}
        self._helpers = ThreadPool("hicache-tiers")
        self._log = LimitedLog(logger)
        self._changing = threading.Lock()
        """Around changes of the arrangement and of what new tiers have to know."""
        self._identities: dict[bytes, dict[str, Any]] = {}
        self._closed = False
        self._leaving: list[TierHandle] = []
        self._arrangement = arrangement
        self._configure(arrangement)

    # -- which tiers -----------------------------------------------------------------------------------------------

    def rearrange(self, arrangement: Arrangement) -> None:
        """Put another arrangement in force at one moment; returns when the calls that began before have ended.

        What was registered is registered with new tiers first. What waits for tiers that stay goes on; those that are
        in use no more are the caller's to close. Raises StoreClosedError, and then nothing has changed.
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
            # Outside the lock: SGLang's scheduler may be about to register more.
            _register(new_tiers, missing)
            registered |= missing.keys()
        before.calls.shut_within(_CALLS_END)
        for tier in leaving:
            self.forget_what_was_fetched(tier)

    def all_have_left(self) -> None:
        """Tiers of former arrangements are closed."""
        self._leaving = []

    def _configure(self, arrangement: Arrangement) -> None:
        """Make what the calls of this arrangement need. Calls of another one may go on."""
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
        """Around a call: the arrangement in force, which stays usable inside."""
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
        """For a look: it may be exchanged the next moment."""
        return self._arrangement

    @property
    def name(self) -> str:
        return "+".join(tier.name for tier in self._arrangement.tiers)

    @property
    def metrics(self) -> TierMetrics:
        """What SGLang was answered, whichever tier it came from: ``get`` by result, ``gap`` for hits past a gap."""
        return self._metrics

    @property
    def tiers(self) -> list[PageStore]:
        return list(self._arrangement.tiers)

    @property
    def prefetcher(self) -> Prefetcher:
        """Not where one private tier is all that is read."""
        assert self._prefetcher is not None
        return self._prefetcher

    def forget_what_was_fetched(self, source: TierHandle) -> None:
        """Drop what was read ahead from this tier."""
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
                # For identities whose document does not tell (flat tensors), or was registered with the tiers alone.
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
                    # Prefetched pages came from far tiers, too: promotion waits.
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
        """Read pages that exists() saw in far tiers from there, all tiers at once; the others from the nearest."""
        if not planned:
            return
        numbers: dict[PageStore | None, int] = {tier: number for number, tier in enumerate(read.arrangement.retrieve)}
        by_tier: dict[int, list[int]] = {}
        for position in positions:
            by_tier.setdefault(numbers.get(planned.get(read.keys[position]), 0), []).append(position)
        reads = list(by_tier.items())
        self._beside(len(reads), lambda i: self._read_tier(read, *reads[i]))

    def _walk(self, read: _Read, positions: Iterable[int]) -> None:
        """Ask each tier not asked yet for what is still missing, near tiers first."""
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
        # Also those of a tier that is in use no more.
        if failed := [position for position in positions if read.results[position] is not GetResult.HIT]:
            self._walk(read, failed)

    def _count(
        self, batch: PageBatch, results: Sequence[GetResult], leading: int, sources: Sequence[tuple[PageStore, int]]
    ) -> None:
        """``sources``: how many pages of the leading run came from which tier."""
        if leading == len(results):
            self._metrics.add("get", "hit", leading)
        else:
            counts = counted(results)
            # SGLang uses the leading run alone: what was read past a gap is no hit to it.
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
        """The leading run over all tiers; its pages in far tiers begin to be prefetched."""
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
        # The first page that the last tier lacks ends the run: it need not look at those behind.
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
        """Count the leading run of ``keys``; ``found``: how many of its pages are in which tier.

        A page is asked of the first tier, and of each one further out until one has it. What is behind the run:
        ``count_absent``.
        """
        asked = sum(found.values())
        if not asked:
            return
        # Before anybody can read them: a read of a chain counts as used.
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
        """Count pages of a chain behind the leading run as asked: no tier could serve them, whether or not it was asked
        (look-ups end at the first gap)."""
        for metrics in (self._metrics, *(tier.metrics for tier in self._arrangement.retrieve)):
            metrics.add("chain_pages", "asked", pages)

    def _find(self, keys: Sequence[bytes], arrangement: Arrangement, look_in_last: LookIn) -> npt.NDArray[np.intp]:
        """The number of the tier that has each page, -1 for none. Each tier is asked for what the nearer ones lack."""
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
        """Which keys a tier has."""
        return np.array(self._call(tier, "exists", tier.contains, keys, [False] * len(keys)), np.bool_)

    def _leading_in(self, tier: TierHandle, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """The leading run in a tier."""
        return np.arange(len(keys)) < self._call(tier, "exists", tier.count_leading, keys, 0)

    # -- writing ---------------------------------------------------------------------------------------------------

    def set(self, batch: PageBatch) -> list[SetResult]:
        still_wanted = self._generations.moment()
        with self._entered() as arrangement:
            if batch.sizes:
                self._page_bytes.setdefault(identity_of(batch.keys), batch.sizes[0])
            failed = [SetResult.ERROR] * len(batch.sizes)
            # First, because it only copies: these queues work while the synchronous tiers do.
            queued = [
                self._call(tier, "queue", functools.partial(tier.set_later, still_wanted=still_wanted), batch, failed)
                for tier in arrangement.later
            ]
            tiers = arrangement.sync
            written = self._beside(len(tiers), lambda at: self._call(tiers[at], "set", tiers[at].set, batch, failed))
            best, *others = written or queued or [[SetResult.REJECTED] * len(batch.sizes)]
            for answers in others:
                best = [min(pair, key=_WORST_LAST.index) for pair in zip(best, answers, strict=True)]
            self._metrics.add_many("set", counted(best))
            return best

    # -- administration --------------------------------------------------------------------------------------------

    def stored(self, keys: Sequence[bytes]) -> list[bool]:
        """Which keys need not be written: every tier that writes go to has them."""
        with self._entered() as arrangement:
            absent = [False] * len(keys)
            written = (*arrangement.sync, *arrangement.later)
            answers = [self._call(tier, "contains", tier.contains, keys, absent) for tier in written]
        return [all(known) for known in zip(*answers, strict=True)] if answers else [False] * len(keys)

    def count_leading_in_pool(self, keys: Sequence[bytes]) -> int:
        """Length of the leading run that another node finds: in the shared tiers that writes go to (if any is)."""
        with self._entered() as arrangement:
            written = [*arrangement.sync, *arrangement.later]
            pool = [tier for tier in written if tier.describe().shared] or written
            return max((self._call(tier, "exists", tier.count_leading_stored, keys, 0) for tier in pool), default=0)

    def bring_inward(self, keys: Sequence[bytes]) -> Counter[str]:
        """Promote what ``promote_to`` lacks of the leading run of ``keys``, before anybody asks for it.

        How many pages were present, fetched, absent (with all behind a gap) and dropped (the promotion queue was full).
        Takes as much memory as the pages are long. Waits for foreground reads and for tiers: not for SGLang's threads.
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
            of_these = set(wanted).__contains__
            self._make_void(identities_of(wanted), of_these)
            # A page of two tiers is one page: their own counts cannot be added.
            tiers: Sequence[TierHandle] = list(self._tiers_in_use(arrangement))
            present = self._helpers.run(len(tiers), lambda number: self._remove_from(tiers[number], wanted))
            if arrangement.promote_to is not None:
                # What has begun to read an outer tier before it was removed there, and ends now.
                self._make_void(identities_of(wanted), of_these)
                self._remove_from(arrangement.promote_to, wanted)
            return sum(any(known) for known in zip(*present, strict=True))

    def _make_void(self, digests: Sequence[bytes] | None, wanted: Callable[[bytes], bool]) -> None:
        """What has begun to read these pages in the background does not bring them back. ``digests``: their identities,
        None for all."""
        self._generations.advance(digests)
        if self._prefetcher is not None:
            self._prefetcher.forget(wanted)

    def _remove_from(self, tier: TierHandle, keys: list[bytes]) -> list[bool]:
        """Which of them it had."""
        present = self._call(tier, "contains", tier.contains, keys, [False] * len(keys))
        self._call(tier, "remove", tier.remove, keys, 0)
        return present

    def _tiers_in_use(self, arrangement: Arrangement) -> AbstractSet[TierHandle]:
        """Those of a call's arrangement, of one that a reload has put in force meanwhile, and those that leave: what
        waits for them is still written."""
        return {*arrangement.tiers, *self._arrangement.tiers, *self._leaving}

    def clear(self, digests: Sequence[bytes] | None) -> int:
        """As the contract says. It hides the pages in all tiers at once, and waits for those that are quick alone."""
        with self._entered() as arrangement:
            wanted = of_identities(digests)
            self._make_void(digests, wanted)
            # Also tiers that a reload puts in force meanwhile.
            begun: dict[TierHandle, Work | None] = {}
            while left := self._tiers_in_use(arrangement) - begun.keys():
                for tier in left:
                    begun[tier] = self._call(tier, "clear", tier.begin_clear, digests, None)
            # What has begun to read a tier before it was cleared, and ends now.
            self._make_void(digests, wanted)
            for tier in begun:
                tier.promotions.forget(wanted)
            deadline = time.monotonic() + ADMINISTRATION_WAIT
            answers = [tier.wait_for(work, deadline) for tier, work in begun.items() if work is not None]
            return max(answers, default=0)

    def wait_until_written(self, timeout: float) -> bool:
        """Whether all that waits to be promoted, written or removed in the background was done within ``timeout``
        seconds."""
        deadline = time.monotonic() + timeout
        tiers = self._arrangement.tiers
        return all(tier.wait_until_written(max(0.0, deadline - time.monotonic())) for tier in tiers)

    def close(self) -> None:
        """End what is done in the background and close the tiers, all at once: within ``drain`` and a second, whatever
        hangs. Then raises the first error of a tier. Idempotent."""
        with self._changing:
            if self._closed:
                return
            self._closed = True
            arrangement = self._arrangement
        drain = time.monotonic() + arrangement.settings.drain
        longest = drain + _CLOSE_WAIT
        # What waits for the background does so no more.
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

        # Each part ends by itself at ``longest``.
        errors = [error for error in self._helpers.run(len(parts), end) if error is not None]
        self._helpers.close(max(0.0, longest - time.monotonic()))
        if errors:
            raise errors[0]

    def _beside(self, count: int, work: Callable[[int], _T]) -> list[_T]:
        """``work(0..count-1)`` with the help of other threads."""
        spans = observers.spans
        return self._helpers.run(count, work if spans is None else spans.carried(work))

    def _call(
        self, tier: PageStore, operation: str, call: Callable[[_Argument], _T], argument: _Argument, otherwise: _T
    ) -> _T:
        """``call(argument)``, measured; ``otherwise`` when the tier raises, which it has promised not to."""
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
        """The number of the tier that each hit came from."""
        self.asked = [0] * len(batch)
        """Which tiers were asked for each page, as bits."""

    def note(self, positions: Sequence[int], number: int, results: Sequence[GetResult]) -> None:
        """What the tier of this number has answered for these pages."""
        for position, result in zip(positions, results, strict=True):
            self.asked[position] |= 1 << number
            # An error of a near tier says more than a miss of a far one.
            if result is not GetResult.MISS:
                self.results[position] = result
            if result is GetResult.HIT:
                self.places[position] = number


def _register(tiers: Iterable[TierHandle], documents: Mapping[bytes, dict[str, Any]]) -> None:
    """With all of these tiers at once."""
    begun = [(tier, tier.begin_register(*item)) for tier in tiers for item in documents.items()]
    deadline = time.monotonic() + ADMINISTRATION_WAIT
    for tier, work in begun:
        tier.wait_for(work, deadline)


def _leading_hits(results: Sequence[GetResult]) -> int:
    if results.count(GetResult.HIT) == len(results):
        return len(results)
    return next(position for position, result in enumerate(results) if result is not GetResult.HIT)

"""Several stores as one: read in the order of ``retrieve``, written to every store of ``store``.

A read asks a far tier only for what the nearer ones lack. Pages that exists() has just found far out are read from
there at once, beside the near tiers. Pages found behind ``promote_to`` are written to it in the background
(promotion.py); pages that exists() found far out are fetched ahead of the read (prefetch.py); tiers with the policy
``async`` are written in the background (write_behind.py). Reasons: docs/decisions/reading-several-tiers.md.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hicache_ext.config import HicacheExtConfig
from hicache_ext.errors import StoreClosedError
from hicache_ext.page.envelope import IDENTITY_LENGTH
from hicache_ext.runtime.call_gate import CallGate
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.runtime.threads import ThreadPool
from hicache_ext.storage.contract.reports import OF_ANSWERS
from hicache_ext.storage.contract.store import (
    GetResult,
    PageBatch,
    PageStore,
    SetResult,
    StoreInfo,
    counted,
    identity_of,
)
from hicache_ext.storage.tiering.io_priority import IoPriority
from hicache_ext.storage.tiering.prefetch import PrefetchedPage, Prefetcher, PrefetchSettings
from hicache_ext.storage.tiering.promotion import Promoter
from hicache_ext.storage.tiering.write_behind import AsyncStore, QueueSettings

logger = logging.getLogger(__name__)

_Argument = TypeVar("_Argument")
_T = TypeVar("_T")

_WORST_LAST = (SetResult.STORED, SetResult.EXISTS, SetResult.REJECTED, SetResult.TIMEOUT, SetResult.ERROR)
_REMEMBERED_PLACES = 65536
_PATIENCE = 1.0
"""Seconds for which pages that nobody has asked for yet wait for foreground reads and for earlier promotions."""


@dataclass(frozen=True, slots=True)
class TieringSettings:
    """Limits of what happens in the background, per process. See docs/tiers.md."""

    async_tiers: frozenset[str] = frozenset()
    """Names of the stores that are written in the background."""
    store_queue: QueueSettings = field(default_factory=QueueSettings)
    promotion_queue: QueueSettings = field(default_factory=lambda: QueueSettings(capacity=128 * 1024 * 1024))
    prefetch: PrefetchSettings = field(default_factory=PrefetchSettings)

    @classmethod
    def of(cls, config: HicacheExtConfig, async_tiers: Iterable[str]) -> TieringSettings:
        prefetch, background = config.prefetch, config.background
        return cls(
            async_tiers=frozenset(async_tiers),
            store_queue=QueueSettings(background.store_buffer, background.drain),
            promotion_queue=QueueSettings(background.promotion_buffer, background.drain),
            prefetch=PrefetchSettings(prefetch.buffer, prefetch.lifetime, prefetch.streams),
        )


class TieredStore:
    """A PageStore over PageStores.

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
        self._settings = settings or TieringSettings()
        self._tiers = list({id(tier): tier for tier in [*retrieve, *store]}.values())
        behind = {
            id(tier): AsyncStore(tier, self._settings.store_queue)
            for tier in store
            if tier.name in self._settings.async_tiers
        }
        self._retrieve: list[PageStore] = [behind.get(id(tier), tier) for tier in retrieve]
        self._sync = [tier for tier in store if id(tier) not in behind]
        self._async = list(behind.values())
        self._all: list[PageStore] = [behind.get(id(tier), tier) for tier in self._tiers]
        self._order = {id(tier): number for number, tier in enumerate(self._retrieve)}
        self._metrics = TierMetrics("all")
        self._metrics.declare(OF_ANSWERS)
        self._chains: set[bytes] = set()
        """Identities whose pages are looked up as a chain, and not one by one."""
        self._gate = IoPriority()
        self._inner_tiers = 1
        self._promoter: Promoter | None = None
        if promote_to is not None:
            self._inner_tiers = 1 + next(number for number, tier in enumerate(retrieve) if tier is promote_to)
            self._promoter = Promoter(promote_to, self._settings.promotion_queue, self._gate)
        elif len(retrieve) == 1 and retrieve[0].describe().shared:
            self._inner_tiers = 0
        self._only_tier = self._retrieve[0] if len(self._retrieve) == self._inner_tiers == 1 else None
        """Nothing lies further out: nothing is prefetched, joined or promoted."""
        self._prefetcher = Prefetcher(self._settings.prefetch, self._gate, self._metrics)
        self._page_bytes: dict[bytes, int] = {}
        self._places = _Places()
        self._helpers = ThreadPool("hicache-tiers")
        self._calls = CallGate(self.name)

    @property
    def name(self) -> str:
        return "+".join(tier.name for tier in self._tiers)

    @property
    def metrics(self) -> TierMetrics:
        """What SGLang was answered, whichever tier it came from: ``get`` by result, ``gap`` for hits past a gap."""
        return self._metrics

    @property
    def tiers(self) -> list[PageStore]:
        return list(self._tiers)

    @property
    def prefetcher(self) -> Prefetcher:
        return self._prefetcher

    def describe(self) -> StoreInfo:
        return StoreInfo(
            name=self.name,
            type="tiered",
            shared=any(tier.describe().shared for tier in self._tiers),
            details={
                "retrieve": [tier.name for tier in self._retrieve],
                "store": [tier.name for tier in self._sync],
                "store_async": [tier.name for tier in self._async],
                "promote_to": None if self._promoter is None else self._promoter.target.name,
            },
        )

    def register_identity(self, digest: bytes, document: dict[str, Any]) -> None:
        pool = document.get("pool")
        segments = pool.get("segments") if isinstance(pool, dict) else None
        if segments:
            self._page_bytes[digest] = sum(segments)
        with self._calls:
            for tier in self._tiers:
                tier.register_identity(digest, document)

    # -- reading ---------------------------------------------------------------------------------------------------

    def get(self, batch: PageBatch) -> list[GetResult]:
        with self._calls:
            if batch.sizes:
                # For identities whose document does not tell (flat tensors), or was registered with the tiers alone.
                self._page_bytes.setdefault(identity_of(batch.keys), batch.sizes[0])
            tier = self._only_tier
            if tier is None:
                return self._get_from_several(batch)
            results = self._call(tier, "get", tier.get, batch, [GetResult.ERROR] * len(batch.sizes))
            leading = _leading_hits(results)
            self._count(batch, results, leading, [(tier, leading)])
            return results

    def _get_from_several(self, batch: PageBatch) -> list[GetResult]:
        read = _Read(batch)
        staged = self._prefetcher.begin_read(batch.keys)
        try:
            self._read_known_places(read, [position for position, page in enumerate(staged) if page is None])
            self._walk(read, [position for position, page in enumerate(staged) if page is None])
            with self._gate.read():
                # Prefetched pages came from far tiers, too: promotion waits.
                self._take_staged(read, staged)
        finally:
            self._prefetcher.end_read(batch.keys, staged)
        leading = _leading_hits(read.results)
        sources = Counter(self._order[id(source)] for source in read.sources[:leading])
        self._count(batch, read.results, leading, [(self._retrieve[place], count) for place, count in sources.items()])
        if self._promoter is not None:
            # The leading run is known only now; nothing behind a gap is promoted.
            outer = [
                position for position in range(leading) if self._order[id(read.sources[position])] >= self._inner_tiers
            ]
            if outer:
                self._promoter.promote(batch, outer)
        return read.results

    def _read_known_places(self, read: _Read, positions: Sequence[int]) -> None:
        """Read pages that exists() saw in far tiers from there, all tiers at once; the others from the nearest."""
        if len(self._retrieve) < 2:
            return
        by_tier: dict[int, list[int]] = {}
        for position, place in zip(positions, self._places.find([read.keys[p] for p in positions]), strict=True):
            by_tier.setdefault(place, []).append(position)
        if set(by_tier) == {0}:
            return
        reads = list(by_tier.items())
        self._helpers.run(len(reads), lambda i: self._read_tier(read, *reads[i]))

    def _walk(self, read: _Read, positions: Iterable[int]) -> None:
        """Ask each tier not asked yet for what is still missing, near tiers first."""
        for number in range(len(self._retrieve)):
            missing = [p for p in positions if read.results[p] is not GetResult.HIT and not read.asked[p] >> number & 1]
            if missing:
                self._read_tier(read, number, missing)

    def _read_tier(self, read: _Read, number: int, positions: Sequence[int]) -> None:
        tier = self._retrieve[number]
        with self._gate.read() if number >= self._inner_tiers else nullcontext():
            results = self._call(
                tier, "get", tier.get, read.batch.select(positions), [GetResult.ERROR] * len(positions)
            )
        for position, result in zip(positions, results, strict=True):
            read.note(position, number, tier, result)

    def _take_staged(self, read: _Read, staged: Sequence[PrefetchedPage | None]) -> None:
        failed: list[int] = []
        for position, page in enumerate(staged):
            if page is None:
                continue
            result = self._prefetcher.take(page, read.batch.buffers[position])
            number = self._order.get(id(page.source), 0)
            if result is GetResult.REJECTED:
                failed.append(position)
                continue
            read.note(position, number, page.source, result)
            if result is not GetResult.HIT:
                failed.append(position)
        if failed:
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
        with self._calls:
            present = [False] * len(keys)
            missing = list(range(len(keys)))
            for number, tier in enumerate(self._retrieve):
                if not missing:
                    break
                wanted = [keys[position] for position in missing]
                answers = self._call(tier, "contains", tier.contains, wanted, None)
                if answers is None:
                    continue
                for position, known in zip(missing, answers, strict=True):
                    present[position] = known
                if number:
                    self._places.remember([key for key, known in zip(wanted, answers, strict=True) if known], number)
                missing = [position for position in missing if not present[position]]
            return present

    def count_leading(self, keys: Sequence[bytes]) -> int:
        """The leading run over all tiers; its pages in far tiers begin to be prefetched."""
        with self._calls:
            tier = self._only_tier
            if tier is None:
                return self._lead_over_several(list(keys))
            leading = self._call(tier, "exists", tier.count_leading, keys, 0) if keys else 0
            self._count_found(keys, {0: leading})
            return leading

    def _lead_over_several(self, keys: list[bytes]) -> int:
        places = self._find_leading(keys)
        self._count_found(keys, Counter(places))
        outer = [
            (key, self._retrieve[place], self._page_bytes.get(key[:IDENTITY_LENGTH], 0))
            for key, place in zip(keys, places, strict=False)
            if place >= self._inner_tiers
        ]
        if outer:
            self._prefetcher.announce(outer)
        return len(places)

    def _count_found(self, keys: Sequence[bytes], found: Mapping[int, int]) -> None:
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
        for place, tier in enumerate(self._retrieve):
            if not asked:
                break
            has = found.get(place, 0)
            tier.metrics.add_many("chain_pages", {"asked": asked, "found": has})
            asked -= has

    def count_absent(self, pages: int) -> None:
        """Count pages of a chain behind the leading run as asked: no tier could serve them, whether or not it was asked
        (look-ups end at the first gap)."""
        for metrics in (self._metrics, *(tier.metrics for tier in self._retrieve)):
            metrics.add("chain_pages", "asked", pages)

    def _find_leading(self, keys: Sequence[bytes]) -> list[int]:
        """The number of the tier of each page of the leading run."""
        if not self._retrieve or not keys:
            return []
        places: dict[int, int] = {}
        missing = list(range(len(keys)))
        last = len(self._retrieve) - 1
        for number, tier in enumerate(self._retrieve):
            wanted = [keys[position] for position in missing]
            if number == last:
                # The first page that the last tier lacks ends the run: it need not look at those behind.
                count = self._call(tier, "exists", tier.count_leading, wanted, 0)
                found, rest = missing[:count], missing[count:]
            else:
                answers = self._call(tier, "exists", tier.contains, wanted, [False] * len(wanted))
                found = [position for position, known in zip(missing, answers, strict=True) if known]
                rest = [position for position, known in zip(missing, answers, strict=True) if not known]
            for position in found:
                places[position] = number
            if number and found:
                self._places.remember([keys[position] for position in found], number)
            missing = rest
            if not missing:
                break
        leading = missing[0] if missing else len(keys)
        return [places[position] for position in range(leading)]

    # -- writing ---------------------------------------------------------------------------------------------------

    def set(self, batch: PageBatch) -> list[SetResult]:
        with self._calls:
            if batch.sizes:
                self._page_bytes.setdefault(identity_of(batch.keys), batch.sizes[0])
            failed = [SetResult.ERROR] * len(batch.sizes)
            # First, because it only copies: these queues work while the synchronous tiers do.
            queued = [self._call(tier, "queue", tier.set, batch, failed) for tier in self._async]
            if len(self._sync) == 1:
                (tier,) = self._sync
                written = [self._call(tier, "set", tier.set, batch, failed)]
            else:
                written = self._write_to_several(batch, failed)
            best, *others = written or queued or [[SetResult.REJECTED] * len(batch.sizes)]
            for answers in others:
                best = [min(pair, key=_WORST_LAST.index) for pair in zip(best, answers, strict=True)]
            self._metrics.add_many("set", counted(best))
            return best

    def _write_to_several(self, batch: PageBatch, failed: list[SetResult]) -> list[list[SetResult]]:
        """To the synchronous tiers at once: what each answers."""
        written = [failed] * len(self._sync)

        def write(number: int) -> None:
            tier = self._sync[number]
            written[number] = self._call(tier, "set", tier.set, batch, failed)

        self._helpers.run(len(self._sync), write)
        return written

    # -- administration --------------------------------------------------------------------------------------------

    def stored(self, keys: Sequence[bytes]) -> list[bool]:
        """Which keys need not be written: every tier that writes go to has them."""
        with self._calls:
            answers = [tier.contains(keys) for tier in (*self._sync, *self._async)]
        return [all(known) for known in zip(*answers, strict=True)] if answers else [False] * len(keys)

    def count_leading_in_pool(self, keys: Sequence[bytes]) -> int:
        """Length of the leading run that another node finds: in the shared tiers that writes go to (if any is)."""
        with self._calls:
            written = [*self._sync, *self._async]
            pool = [tier for tier in written if tier.describe().shared] or written
            return max((tier.count_leading(keys) for tier in pool), default=0)

    def bring_inward(self, keys: Sequence[bytes]) -> Counter[str]:
        """Promote what ``promote_to`` lacks of the leading run of ``keys``, before anybody asks for it.

        How many pages were present, fetched, absent (with all behind a gap) and dropped (the promotion queue was full).
        Takes as much memory as the pages are long. Waits for foreground reads and for tiers: not for SGLang's threads.
        """
        with self._calls:
            return self._bring_inward(keys)

    def _bring_inward(self, keys: Sequence[bytes]) -> Counter[str]:
        promoter = self._promoter
        size = self._page_bytes.get(identity_of(keys), 0) if keys else 0
        if promoter is None or not size:
            return Counter(dropped=len(keys))
        promoter.wait_until_written(_PATIENCE)
        self._gate.wait_for_quiet(_PATIENCE)
        here = promoter.target.contains(keys)
        missing = [key for key, known in zip(keys, here, strict=True) if not known]
        read = _Read(PageBatch(missing, [[memoryview(bytearray(size))] for _ in missing]))
        for number in range(self._inner_tiers, len(self._retrieve)):
            positions = [p for p, result in enumerate(read.results) if result is not GetResult.HIT]
            if positions:
                # Not _read_tier: this is no foreground read.
                tier, failed = self._retrieve[number], [GetResult.ERROR] * len(positions)
                results = self._call(tier, "get", tier.get, read.batch.select(positions), failed)
                for position, result in zip(positions, results, strict=True):
                    read.note(position, number, tier, result)
        leading = _leading_hits(read.results)
        taken = promoter.promote(read.batch, list(range(leading))) if leading else 0
        return Counter(
            present=len(keys) - len(missing),
            fetched=taken,
            dropped=leading - taken,
            absent=len(missing) - leading,
        )

    def remove(self, keys: Sequence[bytes]) -> int:
        with self._calls:
            wanted = list(dict.fromkeys(keys))
            self._prefetcher.forget(wanted)
            if self._promoter is not None:
                self._promoter.forget(wanted)
                self._promoter.wait_for_batch_under_way()
            # A page of two tiers is one page: their own counts cannot be added.
            absent = [False] * len(wanted)
            present = [self._call(tier, "contains", tier.contains, wanted, absent) for tier in self._all]
            for tier in self._all:
                self._call(tier, "remove", tier.remove, wanted, 0)
            return sum(any(known) for known in zip(*present, strict=True))

    def clear(self, digests: Sequence[bytes] | None) -> int:
        with self._calls:
            self._prefetcher.forget_identities(digests)
            if self._promoter is not None:
                self._promoter.forget_identities(digests)
            # A tier that raises must not keep the others from being cleared.
            return max((self._call(tier, "clear", tier.clear, digests, 0) for tier in self._all), default=0)

    def wait_until_written(self, timeout: float) -> bool:
        """Whether all that waits to be promoted or written in the background was done within ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        queues = [tier.wait_until_written for tier in self._async]
        if self._promoter is not None:
            queues.append(self._promoter.wait_until_written)
        return all(wait_for(max(0.0, deadline - time.monotonic())) for wait_for in queues)

    def close(self) -> None:
        """``release``, and close the tiers."""
        _close_all([self.release, *[tier.close for tier in self._tiers]])

    def release(self) -> None:
        """End what is done in the background, once the calls under way have ended; the tiers stay open for others."""
        # What waits for the background does so no more.
        self._gate.close()
        if not self._calls.shut():
            return
        promoters = [] if self._promoter is None else [self._promoter.close]
        _close_all([self._prefetcher.close, *promoters, *[tier.drain for tier in self._async], self._helpers.close])

    def _call(
        self, tier: PageStore, operation: str, call: Callable[[_Argument], _T], argument: _Argument, otherwise: _T
    ) -> _T:
        """``call(argument)``, measured; ``otherwise`` when the tier raises, which it has promised not to."""
        started = time.perf_counter()
        try:
            return call(argument)
        except StoreClosedError:
            tier.metrics.add("failure", "closed")
            return otherwise
        except Exception:
            tier.metrics.add("failure", operation)
            logger.exception("hicache_ext: tier %s, %s", tier.name, operation)
            return otherwise
        finally:
            tier.metrics.observe(operation, time.perf_counter() - started)


class _Read:
    """The state of one foreground read on its way through the tiers. Threads write disjoint positions."""

    def __init__(self, batch: PageBatch) -> None:
        self.batch = batch
        self.keys = batch.keys
        self.results = [GetResult.MISS] * len(batch)
        self.sources: list[PageStore | None] = [None] * len(batch)
        self.asked = [0] * len(batch)
        """Which tiers were asked for each page, as bits."""

    def note(self, position: int, number: int, tier: PageStore, result: GetResult) -> None:
        self.asked[position] |= 1 << number
        # An error of a near tier says more than a miss of a far one.
        if result is not GetResult.MISS:
            self.results[position] = result
        if result is GetResult.HIT:
            self.sources[position] = tier


def _leading_hits(results: Sequence[GetResult]) -> int:
    if results.count(GetResult.HIT) == len(results):
        return len(results)
    return next(position for position, result in enumerate(results) if result is not GetResult.HIT)


class _Places:
    """The tier in which a page was last seen, if not the nearest. Bounded; the oldest are forgotten first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: OrderedDict[bytes, int] = OrderedDict()

    def remember(self, keys: Sequence[bytes], number: int) -> None:
        with self._lock:
            for key in keys:
                self._places[key] = number
                self._places.move_to_end(key)
            while len(self._places) > _REMEMBERED_PLACES:
                self._places.popitem(last=False)

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The number of the tier to try first. An entry is removed when it is looked up."""
        with self._lock:
            return [self._places.pop(key, 0) for key in keys]


def _close_all(closers: Sequence[Callable[[], object]]) -> None:
    """Close all, also when one raises; then raises the first error."""
    first: Exception | None = None
    for closer in closers:
        try:
            closer()
        except Exception as error:
            logger.exception("closing a tier")
            first = first or error
    if first is not None:
        raise first

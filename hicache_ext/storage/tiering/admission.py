"""Which pages a tier writes at their first request, and which at their second; write budgets.

``Admission`` stands in front of a tier: what ``AdmissionPolicy`` does not want, or the budget cannot pay, is REFUSED,
and everything else is written. Promotions, warming and hints bypass it, because somebody has just asked for those
pages; their bytes count against the budget. A failure in here costs no page: it is logged, and everything is written.

Admitted are pages that were requested before, and first requests of the classes (reuse.py) that return within the
tier's life. A refused page is remembered, and written when it is requested again. Decisions depend only on the pages,
not on wall time (except for a write budget): the ranks of a model see the same requests and so decide alike, because a
page is useful only if all of them have it.

An LRU tier of fixed capacity holds each page for the same time after its last use, its life (Che, Tung and Wang 2002).
The more classes are written, the shorter it is. The curves of the classes give, for each choice of classes, the life,
the pages read from the tier, and the pages written. Among the choices that keep most of what the best one reads,
``choose`` takes the one that writes least.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hicache_ext.page.envelope import IDENTITY_LENGTH
from hicache_ext.runtime.log_limit import LimitedLog
from hicache_ext.storage.contract import tenants
from hicache_ext.storage.contract.abilities import gauges_of
from hicache_ext.storage.contract.store import GetResult, PageBatch, PageStore, SetResult, key_words
from hicache_ext.storage.contract.tenants import DEFAULT
from hicache_ext.storage.tiering.reuse import (
    CLASSES,
    EDGES,
    FIRSTS,
    RUNS,
    UNKNOWN,
    Continuations,
    Curves,
    Experience,
    Firsts,
    Floats,
    classes_of_run,
    seen_again,
)

logger = logging.getLogger(__name__)

Words = npt.NDArray[np.int64]
Chosen = npt.NDArray[np.bool_]

_SAVED = 3600.0
"""Seconds of budget that may be saved up."""
_NEARLY_FULL = 0.9
_LENT = 1 / 12
"""Share of the savings limit that the common part may hold if the tenants' shares take all of it."""


class WriteBudget:
    """A budget in bytes per second, of which an hour's worth may be saved up. Each tenant has its own share; what it
    cannot save goes to the common part, which anybody may write. Threads: the caller locks."""

    def __init__(self, bytes_a_second: float, now: Callable[[], float] = time.monotonic) -> None:
        self._rate = bytes_a_second
        self._now = now
        self._common = self._most = bytes_a_second * _SAVED
        """Bytes that anybody may write; negative while writes queued earlier are still being counted."""
        self._own: dict[str, float] = {}
        """Bytes that only this tenant may write; negative if it wrote more than allowed."""
        self._most_own: dict[str, float] = {}
        self._looked = now()

    def _earn(self) -> None:
        now, owners = self._now(), tenants.in_force()
        earned = max(0.0, now - self._looked) * self._rate
        self._looked = now
        shares = {} if owners is None else {name: limit.share for name, limit in owners.limits.items() if limit.share}
        self._common += sum(self._own.pop(name) for name in self._own.keys() - shares.keys())
        self._most_own = {name: share * self._most for name, share in shares.items()}
        begins = max(0.0, self._common)
        for name, share in shares.items():
            if name not in self._own:
                self._own[name] = share * begins
                self._common -= self._own[name]
            saved = min(share * earned, self._most_own[name] - self._own[name])
            self._own[name] += saved
            earned -= saved
        self._common = min(self._most_common, self._common + earned)

    @property
    def _most_common(self) -> float:
        return max(self._most - sum(self._most_own.values()), self._most * _LENT)

    def left_for(self, tenant: str) -> float:
        """Return the bytes that this tenant may write: its own part and the common part."""
        self._earn()
        own = self._own.get(tenant)
        return self._common if own is None else own + max(0.0, self._common)

    @property
    def to_spend(self) -> float:
        """Bytes per second to write now: proportional to the savings, the budget at half of the limit, and unlimited
        when they are nearly full, because what cannot be saved is lost. A tenant whose part is full is not writing."""
        self._earn()
        writing = [name for name, own in self._own.items() if own < self._most_own[name]]
        left = max(0.0, self._common) + sum(max(0.0, self._own[name]) for name in writing)
        most = self._most_common + sum(self._most_own[name] for name in writing)
        return math.inf if left > _NEARLY_FULL * most else 2 * left / most * self._rate

    def written(self, size: int, tenant: str = DEFAULT) -> None:
        """Charge written bytes, to the tenant's own part first, then to the common part."""
        self._earn()
        if tenant not in self._own:
            self._common -= size
            return
        own = min(size, max(0.0, self._own[tenant]))
        common = min(size - own, max(0.0, self._common))
        self._common -= common
        self._own[tenant] -= size - common


def choose(
    curves: Curves,
    firsts: int,
    capacity: float,
    keep: float | None,
    most_writes: float = math.inf,
    runs: npt.NDArray[np.int64] | None = None,
) -> tuple[Chosen, float, float]:
    """Return a mask of the classes to write at the first request, and its expected effect: the life (pages used between
    a page's last use and its eviction) and the pages written per page used.

    Classes below ``firsts`` are of first requests; pages of the others were requested before and are always written.

    ``capacity`` in pages. ``keep``: the share of the best choice's hits to keep; None: write everything that
    ``most_writes`` allows. ``most_writes``, per page used: to meet it, hits are given up, first those of the classes
    with the fewest reads per write. ``runs`` [run, place]: classes of consecutive pages; none is chosen without those
    before it.
    """
    held = _held(curves)
    returned = 1 - curves.left
    everything = _life(curves.rate @ held, capacity)
    shares = np.array([np.interp(everything, EDGES, row) for row in returned[:firsts]])
    if runs is not None:
        # A request for a page also requests those before it; estimates that say otherwise rest on few pages.
        shares[runs] = np.maximum.accumulate(shares[runs][:, ::-1], axis=1)[:, ::-1]
    order = np.argsort(-shares, kind="stable")
    order = order[curves.rate[order] > 0]
    # Row m: the first m classes of that order, and all pages that were requested before.
    rates = np.concatenate([[0.0], curves.rate[order]])
    pages = curves.rate[firsts:] @ held[firsts:] + _summed(curves.rate[order, None] * held[order])
    reads = curves.rate[firsts:] @ returned[firsts:] + _summed(curves.rate[order, None] * returned[order])
    lives = np.array([_life(row, capacity) for row in pages])
    hits = np.array([np.interp(life, EDGES, row) for life, row in zip(lives, reads, strict=True)])
    # A page that is requested again is written then, unless the tier has it.
    writes = np.cumsum(rates) + np.maximum(0.0, curves.rate[firsts:].sum() - hits)
    allowed = writes <= most_writes
    if not allowed.any():
        best = int(np.argmin(writes))
    elif keep is None:
        best = len(order) if allowed[-1] else int(np.flatnonzero(allowed & (hits >= hits[allowed].max()))[-1])
    else:
        good = allowed & (hits >= keep * hits[allowed].max())
        best = int(np.argmin(np.where(good, writes, np.inf)))
        if allowed[-1] and writes[best] > (1 - _LEAST_SAVED) * writes[-1]:
            best = len(order)
    admitted = np.arange(len(curves.rate)) >= firsts
    admitted[order[:best]] = True
    if best == len(order):
        admitted[:] = True
    return admitted, float(lives[best]), float(writes[best])


def _held(curves: Curves) -> Floats:
    """Return [class, edge]: how long a page is held on average, in a tier whose life is the edge."""
    mean = (curves.left[:, 1:] + curves.left[:, :-1]) / 2
    return np.concatenate([np.zeros((len(mean), 1)), np.cumsum(mean * np.diff(EDGES), axis=1)], axis=1)


def _summed(rows: Floats) -> Floats:
    """Return the sums of the first 0, 1, 2 ... rows."""
    return np.concatenate([np.zeros((1, rows.shape[1])), np.cumsum(rows, axis=0)])


def _life(pages: Floats, capacity: float) -> float:
    """Return the life at ``capacity``. ``pages``: number of pages held, for each life of EDGES."""
    return float(np.interp(capacity, pages, EDGES))


KEEP = 0.97
"""Share of the hits to keep, compared with storing everything or a better choice."""
_LEAST_SAVED = 0.1
"""Minimum share of writes saved; hits are not risked for less."""
_FULL_BATCH = 128
"""Pages of a full call of SGLang: the next call may continue the run."""
_KINDS_OF_CLASSES = (np.arange(FIRSTS), np.arange(FIRSTS, CLASSES))
_STEP = 1 << 12
"""Pages used between two choices."""
_LONGEST_LIFE = 1 << 24
"""Limit of the life, in pages used; later returns are ignored."""
_SHORTEST_MEMORY = 1 << 16
"""Pages used that are learnt from, at least; one life if that is longer."""


class AdmissionPolicy:
    """One policy per tier and process. Any thread may use ``continuations``; for the rest the caller locks."""

    def __init__(
        self,
        capacity: Callable[[], float],
        keep: float | None = KEEP,
        most_writes: Callable[[], float] = lambda: math.inf,
    ) -> None:
        """``capacity`` in pages; infinite if unknown. ``keep`` and ``most_writes``: see ``choose``."""
        self.continuations = Continuations()
        self.experience = Experience(CLASSES)
        self.admitted: Chosen | None = None
        """Mask by class. None: everything is written, until pages were observed for one life of the tier."""
        self._capacity = capacity
        self._keep = keep
        self._most_writes = most_writes
        self._firsts = Firsts()
        self._next_choice = 2 * _STEP
        self._last_chosen = 0
        self._full: int | None = None
        """Identity of the last batch if it was full, so that the next one may continue it."""
        self._kind, self._place, self._is_refused = UNKNOWN, 0, False
        """Last offered run: its kind, its number of pages, and whether one of them was refused."""

    def offered(self, words: Words) -> tuple[Chosen, Chosen]:
        """Decide about consecutive pages of one request, in order, that SGLang wants to store. Return masks of those to
        write and of those requested before. ``words``: ``key_words`` of their first parts."""
        known = self._firsts.note(words)
        pages = len(words)
        first_new = int(np.argmin(known)) if not known.all() else pages
        goes_on = self._begin_run(words, first_new)
        if first_new == pages:
            self._kind = UNKNOWN
        elif first_new:
            # Pages that were requested before have a new continuation.
            self._kind = self.continuations.note(int(words[first_new - 1, 2]), int(words[first_new, 2]))
        elif not goes_on:
            self._kind = self.continuations.kind(int(words[0, 2]))
        place = self._place if goes_on and not first_new else 0
        length = place + pages - first_new
        of_run = classes_of_run(length, place, pages - first_new, self._kind, ends=pages != _FULL_BATCH)
        classes = np.concatenate([np.full(first_new, FIRSTS), of_run])
        classes[known] = FIRSTS
        self._place = length
        wanted = known | (np.ones(pages, np.bool_) if self.admitted is None else self.admitted[classes])
        # A page is useful only together with all pages before it.
        wanted = np.logical_and.accumulate(wanted) & (not self._is_refused)
        self._is_refused = not wanted[-1]
        self._learn(words, classes)
        return wanted, known

    def cut(self) -> None:
        """Note that the end of the last offer is not written after all; so what follows it isn't either."""
        self._is_refused = True

    def read(self, words: Words) -> None:
        """Learn from pages that were read from the tier."""
        self._learn(words, np.full(len(words), FIRSTS))

    def _begin_run(self, words: Words, first_new: int) -> bool:
        """Begin a run, or continue the one offered last; return whether these pages continue it."""
        identity = int(words[0, 0])
        is_known = self.continuations.kind(int(words[0, 2])) != UNKNOWN
        goes_on = self._full == identity and not is_known
        if not goes_on:
            self._is_refused = False
        self._full = identity if len(words) == _FULL_BATCH else None
        return goes_on

    def _learn(self, words: Words, classes: Words) -> None:
        experience = self.experience
        sampled = experience.sampled(words)
        of = words[sampled]
        pages = dict(zip(zip((of[:, 0] ^ of[:, 2]).tolist(), of[:, 5].tolist(), strict=True), sampled, strict=True))
        if pages:
            new = classes[list(pages.values())]
            experience.used([*pages], np.where(new < FIRSTS, new, seen_again(experience.classes_of([*pages]))))
        experience.pass_time(len(words))
        if experience.clock >= self._next_choice:
            self._choose()

    def _choose(self) -> None:
        experience, capacity = self.experience, self._capacity()
        curves = experience.curves(_KINDS_OF_CLASSES)
        life = min(_life(curves.rate @ _held(curves), capacity), _LONGEST_LIFE)
        passed = experience.clock - self._last_chosen
        self._last_chosen = experience.clock
        self._next_choice = experience.clock + _STEP
        most_writes = self._most_writes()
        saw_a_life = experience.clock >= life
        if saw_a_life or most_writes < math.inf or self.admitted is not None:
            keep = self._keep if saw_a_life else None
            self.admitted, expected, _ = choose(curves, FIRSTS, capacity, keep, most_writes, RUNS)
            life = max(life, min(expected, _LONGEST_LIFE))
        experience.thin_out(4 * life)
        experience.fade(math.exp(-passed / max(_SHORTEST_MEMORY, life)))


_FEWEST_PAGES = 1000
"""Minimum number of pages in a tier for it to tell their mean size."""
_MOST_READS = 64
"""Limit of pending reads that have not been learnt from."""


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """Settings of one tier in one process."""

    learned: bool
    """False: pages are refused only because of the budget."""
    budget: float | None
    """Bytes per second that this process may write."""
    writers: int
    """Ranks that share the tier's capacity."""


class Admission:
    """Admission of one tier. Threads: any. Calls wait for each other for the duration of a decision."""

    def __init__(self, settings: AdmissionSettings, tier: PageStore, now: Callable[[], float] = time.monotonic) -> None:
        """``tier`` provides its fill level and metrics."""
        self.settings = settings
        self._tier = tier
        self._now = now
        self._lock = threading.Lock()
        self._log = LimitedLog(logger, 60.0)
        self._budget = None if settings.budget is None else WriteBudget(settings.budget, now)
        self._reads: deque[Words] = deque()
        self._pages = self._parts = self._bytes = 0.0
        """Totals of what was offered, for the mean page size."""
        self._used_before = 0
        self._looked = now()
        keep = KEEP if settings.learned else None
        self.policy = AdmissionPolicy(self._capacity, keep, self._most_writes)

    def write(self, batch: PageBatch, write: Callable[[PageBatch], list[SetResult]]) -> list[SetResult]:
        """Call ``write`` with the admitted pages. The others are REFUSED."""
        try:
            wanted = self._wanted(batch)
        except Exception:  # noqa: BLE001 - a page that is stored in vain costs less than a call that fails
            self._failed()
            wanted = None
        if wanted is None:
            return write(batch)
        results = [SetResult.REFUSED] * len(batch)
        batch.move_at(wanted, write, results)
        return results

    def written(self, batch: PageBatch, results: Sequence[SetResult]) -> list[SetResult]:
        """Charge a write to the tier, whatever caused it, to the budget; return its results."""
        if self._budget is not None:
            owners, sizes = tenants.in_force(), Counter[str]()
            if owners is None:
                sizes[DEFAULT] = batch.bytes_of(SetResult.STORED, results)
            else:
                # A queue writes pages of many requests together.
                for key, size, result in zip(batch.keys, batch.counted_as or batch.sizes, results, strict=True):
                    sizes[owners.owner(key[IDENTITY_LENGTH:])] += size * (result is SetResult.STORED)
            with self._lock:
                for tenant, size in sizes.items():
                    self._budget.written(size, tenant)
        return list(results)

    def read(self, keys: Sequence[bytes], results: Sequence[GetResult]) -> None:
        """Queue a read's hits to be learnt from, usually at the next offer, so that readers don't wait."""
        try:
            words = key_words(keys)
            if results.count(GetResult.HIT) < len(results):
                words = words[[result is GetResult.HIT for result in results]]
            if len(words):
                self._reads.append(words)
            if len(self._reads) >= _MOST_READS:
                with self._lock:
                    self._learn_reads()
        except Exception:  # noqa: BLE001 - a page that is stored in vain costs less than a call that fails
            self._failed()

    def looked_up(self, keys: Sequence[bytes], leading: int) -> None:
        """Note a lookup of a chain whose first ``leading`` pages are in the tiers. Does not wait for a decision."""
        try:
            self.policy.continuations.looked_up(keys, leading)
        except Exception:  # noqa: BLE001 - a page that is stored in vain costs less than a call that fails
            self._failed()

    def _learn_reads(self) -> None:
        """Learn from the reads so far. The caller locks."""
        while self._reads:
            words = self._reads.popleft()
            self.policy.read(words[_first_parts(words)])

    def _wanted(self, batch: PageBatch) -> list[int] | None:
        """Return the positions of the pages to write; None for all of them."""
        if not len(batch):
            return None
        words = key_words(batch.keys)
        firsts = _first_parts(words)
        with self._lock:
            self._pages += len(firsts)
            self._parts += len(batch)
            self._bytes += sum(batch.sizes)
            self._learn_reads()
            wanted, known = self.policy.offered(words[firsts])
            affordable = wanted & self._affordable(batch, firsts, wanted)
            if affordable.sum() < wanted.sum():
                self.policy.cut()
        self._tier.metrics.add_many(
            "admission",
            {
                "admitted_first": int((affordable & ~known).sum()),
                "admitted_again": int((affordable & known).sum()),
                "refused_first": int((~wanted & ~known).sum()),
                "refused_behind": int((~wanted & known).sum()),
                "refused_budget": int((wanted & ~affordable).sum()),
            },
        )
        if affordable.all():
            return None
        parts = np.diff(firsts, append=len(batch))
        positions: list[int] = np.flatnonzero(np.repeat(affordable, parts)).tolist()
        return positions

    def _affordable(self, batch: PageBatch, firsts: Words, wanted: Chosen) -> Chosen:
        """Return a mask of the leading pages that the budget covers."""
        if self._budget is None:
            return wanted
        sizes = np.add.reduceat(np.array(batch.sizes, np.int64), firsts)
        owners = tenants.in_force()
        # The last page, because those before it may belong to a prompt that others share.
        tenant = DEFAULT if owners is None else owners.owner(batch.keys[-1][IDENTITY_LENGTH:])
        enough: Chosen = np.cumsum(np.where(wanted, sizes, 0)) <= self._budget.left_for(tenant)
        if owners is not None and (refused := int((wanted & ~enough).sum())):
            self._tier.metrics.add("tenant_refused", tenant, refused)
        return enough

    def _capacity(self) -> float:
        """Return the capacity, in pages, that this process may count on."""
        gauges = gauges_of(self._tier)
        capacity = gauges.get("capacity_bytes", math.nan)
        if not capacity > 0 or not self._pages:
            return math.inf
        used, parts = gauges.get("used_bytes", math.nan), gauges.get("pages", math.nan)
        size = used / parts if parts >= _FEWEST_PAGES and used > 0 else self._bytes / self._parts
        return capacity / self.settings.writers / (size * self._parts / self._pages)

    def _most_writes(self) -> float:
        """Return the pages that may be written per page used."""
        used, now = self.policy.experience.clock, self._now()
        uses, seconds = used - self._used_before, now - self._looked
        self._used_before, self._looked = used, now
        if self._budget is None or not self._pages or not uses:
            return math.inf
        return self._budget.to_spend * seconds / (self._bytes / self._pages) / uses

    def _failed(self) -> None:
        self._log.log(
            logging.WARNING, "failed", "hicache_ext: tier %s: admission failed", self._tier.name, exc_info=True
        )


def _first_parts(words: Words) -> Words:
    """Return where each page begins; the parts of a page are adjacent."""
    begins = np.ones(len(words), np.bool_)
    begins[1:] = (words[1:, 2:] != words[:-1, 2:]).any(axis=1)
    return np.flatnonzero(begins)

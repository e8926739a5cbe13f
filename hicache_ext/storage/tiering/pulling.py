"""Pull or recompute: is reading a prefix from storage cheaper than computing it?

SGLang pulls every hit, and a remote pull can cost more than the prefill it saves (a slow tier, a fast model, a short
prefix). The rule acts where the backend answers ``batch_exists``: a prefix to be computed is answered as absent.

Modes: ``off``: no rule. ``fixed``: pull from ``min_tokens`` on. ``adaptive``: also compare the expected time of the
read (from each tier's last reads) with that of computing (from the last prefill batches, or the configured rate). After
a tier was too slow, a pull must be cheaper by a fifth. A tier from which not even a hit of the whole prefix would
pay, look-up included, is not asked. Unused tiers are measured in the background, never on a request. Reasons:
docs/decisions/pull-rule.md.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from hicache_ext.config.model import PullConfig
from hicache_ext.errors import StoreClosedError
from hicache_ext.runtime.background import BackgroundLoop
from hicache_ext.runtime.linear_cost import LinearCost
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.storage.contract.store import DelegatingStore, GetResult, PageBatch, PageStore

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_NEW_LOWER = 0.7
_NEW_HIGHER = 0.3
"""Weight of a higher observation against the estimate of its size."""
_DOUBT_ONCE = 20.0
_DOUBT_OLD = 3.0
_OLD = 60.0
"""Seconds without an observation after which an estimate is uncertain."""
_SHORT = 4
"""A batch of at most a fourth of a prefix shows what is left to compute when the prefix is pulled."""


@dataclass(slots=True)
class _Known:
    amount: float
    seconds: float
    observed: float
    """Time of the last observation, by the clock."""
    observations: int = 1


class SizedCost:
    """The cost of computing a prefix: seconds by amount, one figure per power of two. Thread-safe.

    By size, because after every pull a node computes the few tokens that are left. A line through the last batches
    would know only those, and its value for a whole prompt would be an extrapolation by a factor of a hundred.

    An estimate that is too high would never be corrected: everything is pulled then, and nothing computed. So estimates
    fall faster than they rise. What was seen once (the first batch of its size takes many times as long) or long ago is
    uncertain: where the uncertainty decides, the prefix is computed, which measures it. Where no similar size was seen,
    the lower bound is taken: computing is then tried, and measured.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._by_size: dict[int, _Known] = {}

    def observe(self, amount: int, seconds: float) -> None:
        with self._lock:
            known = self._by_size.get(amount.bit_length())
            if known is None:
                self._by_size[amount.bit_length()] = _Known(amount, seconds, self._clock())
                return
            weight = _NEW_LOWER if seconds * known.amount < known.seconds * amount else _NEW_HIGHER
            known.amount += (amount - known.amount) * weight
            known.seconds += (seconds - known.seconds) * weight
            known.observed = self._clock()
            known.observations += 1

    def predict(self, amount: float) -> float | None:
        """Return the seconds for ``amount``; None before the first observation."""
        with self._lock:
            known = [one for _, one in sorted(self._by_size.items())]
        if not known:
            return None
        amounts, seconds = [0.0, *[one.amount for one in known]], [0.0, *[one.seconds for one in known]]
        beyond = max(0.0, amount - amounts[-1]) if len(known) > 1 else 0.0
        slope = max(0.0, seconds[-1] - seconds[-2]) / (amounts[-1] - amounts[-2])
        return float(np.interp(amount, amounts, seconds)) + beyond * slope

    def doubt(self, amount: int) -> float:
        """Return the factor, 1 or more, by which the estimate for ``amount`` may be too high."""
        with self._lock:
            if not self._by_size:
                return 1.0
            wanted = amount.bit_length()
            nearest = self._by_size[min(self._by_size, key=lambda size: abs(size - wanted))]
            if nearest.observations == 1:
                return _DOUBT_ONCE
            return _DOUBT_OLD if self._clock() - nearest.observed > _OLD else 1.0

    def saved_by(self, amount: float) -> float | None:
        """Return the seconds saved by not computing ``amount``; a short rest is always computed."""
        with self._lock:
            shortest = self._by_size[min(self._by_size)] if self._by_size else None
        whole = self.predict(amount)
        if shortest is None or whole is None or shortest.amount * _SHORT > amount:
            return whole
        return max(0.0, whole - shortest.seconds)


_COUNTED = (GetResult.HIT, GetResult.TIMEOUT, GetResult.ERROR)


class MeasuredStore(DelegatingStore):
    """Measures ``inner``: ``read_cost`` by bytes, ``look_up_cost`` by keys.

    Look-ups for a question of SGLang (``PullRule.looking_up``) are counted for it, and skipped if they cannot pay.
    """

    def __init__(self, inner: PageStore) -> None:
        super().__init__(inner)
        self.read_cost = LinearCost()
        self.look_up_cost = LinearCost()
        self.last_measured = -float("inf")
        """Time of the last read or of the begin of the last background measurement (time.monotonic())."""

    def get(self, batch: PageBatch) -> list[GetResult]:
        started = time.perf_counter()
        results = self.inner.get(batch)
        seconds = time.perf_counter() - started
        # A failed read counts like a successful one, because the next one may take as long.
        counted = [size for size, result in zip(batch.sizes, results, strict=True) if result in _COUNTED]
        if counted:
            self.read_cost.observe(sum(counted), seconds)
            self.last_measured = time.monotonic()
        return results

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return self._look_up(self.inner.contains, keys, [False] * len(keys), sum)

    def count_leading(self, keys: Sequence[bytes]) -> int:
        return self._look_up(self.inner.count_leading, keys, 0, int)

    def _look_up(
        self, call: Callable[[Sequence[bytes]], _T], keys: Sequence[bytes], none: _T, found: Callable[[_T], int]
    ) -> _T:
        asked = _asked.get()
        if asked is not None and not asked.pays(self):
            asked.not_asked[self] = None
            return none
        started = time.perf_counter()
        answer = call(keys)
        self.look_up_cost.observe(len(keys), time.perf_counter() - started)
        if asked is not None:
            asked.found[self] += found(answer)
        return answer


_MARGIN = 0.1
"""A pull must be cheaper by this share: SGLang's own work around a read is not measured."""
_MARGIN_AFTER_SLOW = 0.2
"""The share after a tier was too slow, so that a tier at the limit does not alternate between use and disuse."""
PROBE_INTERVAL = 10.0
"""Seconds between two measurements of a tier that is not used."""
_PROBE_PAGES = (1, 32)
"""Two sizes determine the line: start-up and cost per byte."""
_PROBE_KEYS = 256
"""Limit of keys looked up by a probe. With fewer, a long round trip would look like expensive keys."""


PULLED = ("long_enough", "unmeasured", "cheaper")
"""Reasons to pull; those to compute are short, dearer, not_cheaper_enough and not_asked. Labels of the metric."""


@dataclass(slots=True)
class Asked:
    """One question of SGLang: how many of ``pages`` leading pages to pull."""

    pages: int
    page_tokens: int
    page_bytes: int
    parts: int
    """Number of objects that a page is split into."""
    pays: Callable[[MeasuredStore], bool]
    """Tells whether a look-up in a tier can pay."""
    found: Counter[MeasuredStore] = field(default_factory=Counter)
    """Number of keys found in each tier."""
    not_asked: dict[MeasuredStore, None] = field(default_factory=dict)
    """Tiers in which nothing was looked up, because reading it would not have paid."""

    @property
    def tokens(self) -> int:
        return self.pages * self.page_tokens


_asked: ContextVar[Asked | None] = ContextVar("hicache_ext_asked", default=None)
"""The question that this thread's look-ups belong to."""


class PullRule:
    """Thread-safe; a decision costs a few microseconds."""

    def __init__(self, config: PullConfig, compute_cost: SizedCost) -> None:
        self._config = config
        self._compute_cost = compute_cost
        self.metrics = TierMetrics("pull", prefix="pull_")
        self._was_too_dear = False
        self._probe_interval = PROBE_INTERVAL
        self._prober = BackgroundLoop("hicache-ext-pull-probe", self._measure_wanted)
        self._wanted: tuple[Sequence[MeasuredStore], list[bytes], Asked] | None = None
        """Input of the next probe: tiers, keys, and the question they belong to."""

    @contextmanager
    def looking_up(self, pages: int, page_tokens: int, page_bytes: int, parts: int = 1) -> Iterator[Asked | None]:
        """Wrap the look-ups for one question, on their thread. Yield None if it is too short to look anything up."""
        asked = Asked(pages, page_tokens, page_bytes, parts, lambda tier: self._is_worth_asking(asked, tier))
        if asked.tokens < self._config.min_tokens:
            self._count("short", asked.tokens)
            yield None
            return
        token = _asked.set(asked)
        try:
            yield asked
        finally:
            _asked.reset(token)

    def _is_worth_asking(self, asked: Asked, tier: MeasuredStore) -> bool:
        """Return whether looking up and reading all pages that other tiers lack can be cheaper than computing.

        All pages count, not those of the current look-up: a long chain is looked up in portions, the first being short.
        """
        if self._config.mode != "adaptive":
            return True
        pages = asked.pages - asked.found.total() + asked.found[tier]
        looking = tier.look_up_cost.predict(pages)
        reading = tier.read_cost.predict(pages * asked.page_bytes)
        computing = self._compute_cost.saved_by(pages * asked.page_tokens)
        if looking is None or reading is None or computing is None:
            return True
        return looking + reading <= self._bound(computing, pages * asked.page_tokens)

    def pages_to_pull(self, asked: Asked, pages: int, keys: Callable[[int], list[bytes]]) -> int:
        """Return ``pages`` (those found), or 0 if they should be computed.

        ``keys(n)`` returns the store keys of the first parts of the first n requested pages, for a probe.
        """
        not_asked = list(asked.not_asked)
        if not pages:
            if not_asked:
                self._was_too_dear = True
                self._count("not_asked", asked.tokens)
                self._probe(not_asked, asked, keys)
            return 0
        found = {tier: keys_there for tier, keys_there in asked.found.items() if keys_there}
        reason = self.decide(pages * asked.page_tokens, pages * asked.page_bytes, found)
        self._count(reason, pages * asked.page_tokens)
        unused = [] if reason in PULLED or reason == "short" else list(found)
        self._probe(not_asked + unused, asked, keys)
        return pages if reason in PULLED else 0

    def _count(self, reason: str, tokens: int) -> None:
        outcome = "pulled" if reason in PULLED else "recomputed"
        self.metrics.add("decision", reason)
        self.metrics.add("tokens", outcome, tokens)
        logger.debug("hicache_ext: %d tokens are %s: %s", tokens, outcome, reason)

    def decide(self, tokens: int, size: int, found: Mapping[MeasuredStore, int]) -> str:
        """Return the reason to pull a prefix, one of ``PULLED``, or to compute it. ``found``: number of keys per tier,
        which gives its share of ``size`` bytes."""
        if tokens < self._config.min_tokens:
            return "short"
        if self._config.mode == "fixed":
            return "long_enough"
        reading, computing = self._read_seconds(size, found), self._compute_cost.saved_by(tokens)
        if reading is None or computing is None:
            return "unmeasured"
        self._was_too_dear = reading > self._bound(computing, tokens)
        words = "hicache_ext: %d tokens: reading them takes %.1f ms, computing them %.1f ms"
        logger.debug(words, tokens, reading * 1e3, computing * 1e3)
        if not self._was_too_dear:
            return "cheaper"
        return "dearer" if reading > computing else "not_cheaper_enough"

    def _bound(self, computing: float, tokens: int) -> float:
        margin = _MARGIN_AFTER_SLOW if self._was_too_dear else _MARGIN
        return computing * (1 - margin) / self._compute_cost.doubt(tokens)

    def _read_seconds(self, size: int, found: Mapping[MeasuredStore, int]) -> float | None:
        total = sum(found.values())
        costs = [tier.read_cost.predict(size * count / total) for tier, count in found.items() if count]
        known = [cost for cost in costs if cost is not None]
        return sum(known) if known and len(known) == len(costs) else None

    def _probe(self, unused: Sequence[MeasuredStore], asked: Asked, keys: Callable[[int], list[bytes]]) -> None:
        """Look up the keys and read a few pages, from each tier of ``unused`` that was not measured recently.

        Runs in the background, one probe at a time. For a tier without the pages only look-ups are measured.
        """
        stale = [tier for tier in unused if time.monotonic() - tier.last_measured >= self._probe_interval]
        if stale and not self._prober.running:
            self._wanted = stale, keys(min(asked.pages, _PROBE_KEYS)), asked
            self._prober.wake()

    def _measure_wanted(self) -> None:
        # Not kept: a reload may take these tiers away.
        wanted, self._wanted = self._wanted, None
        if wanted is None:
            return
        stale, keys, asked = wanted
        try:
            for tier in stale:
                self._measure(tier, keys, asked)
        except StoreClosedError:
            pass  # the server is closing
        except Exception:
            logger.exception("hicache_ext: measuring a tier")

    def _measure(self, tier: MeasuredStore, keys: list[bytes], asked: Asked) -> None:
        self.metrics.add("probe", tier.name)
        tier.last_measured = time.monotonic()
        present = tier.count_leading(keys)
        if tier.look_up_cost.is_surprised:
            # Ask twice: two surprises discard what was learnt, so that one probe can bring the tier back into use.
            present = tier.count_leading(keys)
        looking, computing = tier.look_up_cost.predict(asked.pages), self._compute_cost.saved_by(asked.tokens)
        if looking is not None and computing is not None and looking > computing:
            return  # no read could pay
        size = asked.page_bytes // asked.parts
        for pages in _PROBE_PAGES:
            chosen = keys[: min(pages, present)]
            if chosen:
                tier.get(PageBatch(chosen, [[memoryview(bytearray(size))] for _ in chosen]))

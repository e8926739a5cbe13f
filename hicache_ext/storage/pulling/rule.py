"""Pull or recompute: is reading a prefix from storage cheaper than computing it?

A remote pull can cost more than the prefill it saves (a slow tier, a fast model, a short prefix), and SGLang pulls
every hit. The rule sits where the backend answers ``batch_exists``: a prefix that should be computed is answered as
absent.

Modes: ``off`` pulls always (there is no rule then); ``fixed`` pulls from ``min_tokens`` on; ``adaptive`` also compares
what the read is expected to take, by what each tier's last reads took, with what computing is expected to take, by what
the last prefill batches took (or the configured rate). Once a tier was too slow, a pull must be cheaper by
``hysteresis`` to be made again. Tiers that are not used are measured in the background, never on a request.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hicache_ext.config.pd import PullConfig
from hicache_ext.errors import StoreClosedError
from hicache_ext.metrics import TierMetrics
from hicache_ext.storage.pulling.linear_cost import LinearCost
from hicache_ext.storage.pulling.measured_store import MeasuredStore
from hicache_ext.storage.store import PageBatch, PageStore

logger = logging.getLogger(__name__)

_PROBE_PAGES = (1, 32)
"""Two sizes determine the line: what a read costs to start, and what each byte costs."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do about a prefix of ``tokens`` tokens, and why."""

    pull: bool
    reason: str
    """short, long_enough, unmeasured, cheaper, dearer, not_cheaper_enough: the metric's label."""
    tokens: int
    read_seconds: float | None = None
    compute_seconds: float | None = None

    def __str__(self) -> str:
        times = ""
        if self.read_seconds is not None and self.compute_seconds is not None:
            times = f", reading {self.read_seconds * 1e3:.1f} ms against computing {self.compute_seconds * 1e3:.1f} ms"
        return f"{'pull' if self.pull else 'recompute'} {self.tokens} tokens: {self.reason}{times}"


Tiers = Callable[[], Sequence[PageStore]]
"""The tiers in use, which a reload may exchange."""


def open_pull_rule(config: PullConfig, tiers: Tiers, compute_cost: LinearCost) -> PullRule | None:
    """The rule over those of ``tiers()`` that are measured; None with mode off."""
    return None if config.mode == "off" else PullRule(config, tiers, compute_cost)


class PullRule:
    """Thread-safe; a decision costs a few microseconds."""

    def __init__(
        self,
        config: PullConfig,
        tiers: Tiers,
        compute_cost: LinearCost,
        metrics: TierMetrics | None = None,
    ) -> None:
        self._config = config
        self._in_use = tiers
        self._compute_cost = compute_cost
        self.metrics = metrics or TierMetrics("pull", prefix="pull_")
        self._was_too_dear = False
        self._probing = threading.Lock()

    @property
    def _tiers(self) -> list[MeasuredStore]:
        return [tier for tier in self._in_use() if isinstance(tier, MeasuredStore)]

    def pages_to_pull(self, pages: int, page_tokens: int, page_bytes: int, keys: Callable[[int], list[bytes]]) -> int:
        """``pages``, or 0 if they should be computed. ``keys(n)`` gives the store keys of the first n, for a probe."""
        found = [tier.take_found() for tier in self._tiers]
        if not pages:
            return 0
        decision = self.decide(pages * page_tokens, pages * page_bytes, found)
        self.metrics.add("decision", decision.reason)
        self.metrics.add("tokens", "pulled" if decision.pull else "recomputed", decision.tokens)
        logger.debug("hicache_ext: %s", decision)
        if not decision.pull and decision.reason != "short":
            self._probe(found, page_bytes, keys(min(pages, _PROBE_PAGES[-1])))
        return pages if decision.pull else 0

    def decide(self, tokens: int, size: int, found: Sequence[int]) -> Decision:
        """``found``: how many of the pages' keys each tier has, for their shares of ``size`` bytes."""
        if tokens < self._config.min_tokens:
            return Decision(False, "short", tokens)
        if self._config.mode == "fixed":
            return Decision(True, "long_enough", tokens)
        reading, computing = self._read_seconds(size, found), self._compute_seconds(tokens)
        if reading is None or computing is None:
            return Decision(True, "unmeasured", tokens, reading, computing)
        bound = computing * (1 - self._config.hysteresis) if self._was_too_dear else computing
        if reading <= bound:
            self._was_too_dear = False
            return Decision(True, "cheaper", tokens, reading, computing)
        self._was_too_dear = True
        reason = "dearer" if reading > computing else "not_cheaper_enough"
        return Decision(False, reason, tokens, reading, computing)

    def _compute_seconds(self, tokens: int) -> float | None:
        if self._config.prefill_rate is not None:
            return tokens / self._config.prefill_rate
        return self._compute_cost.predict(tokens)

    def _read_seconds(self, size: int, found: Sequence[int]) -> float | None:
        total = sum(found)
        if not total:
            return None
        seconds = 0.0
        for tier, count in zip(self._tiers, found, strict=True):
            if count:
                cost = tier.read_cost.predict(size * count / total)
                if cost is None:
                    return None
                seconds += cost
        return seconds

    def _probe(self, found: Sequence[int], page_bytes: int, keys: list[bytes]) -> None:
        """Read a few pages from each tier in use that was not measured lately: in the background, one probe at once."""
        stale = [
            tier
            for tier, count in zip(self._tiers, found, strict=True)
            if count and tier.read_cost.age() >= self._config.probe_interval
        ]
        if not stale or not keys or not self._probing.acquire(blocking=False):
            return

        def measure() -> None:
            try:
                for tier in stale:
                    for pages in _PROBE_PAGES:
                        chosen = keys[:pages]
                        tier.get(PageBatch(chosen, [[memoryview(bytearray(page_bytes))] for _ in chosen]))
                    self.metrics.add("probe", tier.name)
            except StoreClosedError:
                pass  # the server is on its way out
            except Exception:
                logger.exception("hicache_ext: measuring a tier")
            finally:
                self._probing.release()

        threading.Thread(target=measure, name="hicache-ext-pull-probe", daemon=True).start()

"""Gauges of a tier (whether it is up, how full it is), and the declaration of all its series.

The exporting thread calls ``reported`` once a second and must not wait: a tier answers from memory, and a thread of the
tier reads what only its medium knows (``LastLook``). Series exist before their first event, because a rate misses the
event with which a series begins, and a tier that was never reached has no events. Reasons:
docs/decisions/metrics-and-events.md.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from hicache_ext.page.transforms.header import LOSSY_CODECS
from hicache_ext.runtime.background import BackgroundLoop
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.storage.contract.abilities import Gauges, gauges_of
from hicache_ext.storage.contract.bad_pages import Verdict
from hicache_ext.storage.contract.registry import series_of_type
from hicache_ext.storage.contract.store import GetResult, PageStore, SetResult

logger = logging.getLogger(__name__)

UNKNOWN: Gauges = {
    "tier_up": 1.0,
    "breaker_state": 0.0,
    "capacity_bytes": math.nan,
    "used_bytes": math.nan,
    "free_bytes": math.nan,
    "pages": math.nan,
    "no_space_since_seconds": math.nan,
    "evicted_age_seconds": math.nan,
    "hit_share_at_half": math.nan,
    "hit_share_at_capacity": math.nan,
    "hit_share_at_twice": math.nan,
    "hit_share_at_four_times": math.nan,
}
"""Gauges of a tier that reports none; HELP in metrics_export.py explains each."""

NOT_REACHED: Gauges = {**dict.fromkeys(UNKNOWN, 0.0)}
"""Gauges of a tier that has never been reached."""


def reported(tiers: Sequence[PageStore]) -> list[TierMetrics]:
    """Return the metrics of these tiers, with all series and current gauges, for an exporter. Call on one thread."""
    reports = []
    for tier in tiers:
        # Read once, because a tier that is opened late replaces its metrics.
        metrics = tier.metrics
        reports.append(metrics)
        if ("tier_up", "") not in metrics.levels():
            try:
                series = _series_of(tier)
            except Exception:
                # The type may come from another package, whose mistake must not cost the metrics of all tiers.
                logger.exception("hicache_ext: tier %s does not say which series it has", tier.name)
                series = OF_EVERY_TIER
            metrics.declare(series, OPERATIONS)
            metrics.set_level("tier_up", "", math.nan)
        try:
            known = gauges_of(tier)
        except Exception as error:  # noqa: BLE001 - a failing tier must not hide the others
            logger.debug("hicache_ext: tier %s does not say how it is: %s", tier.name, type(error).__name__)
            continue
        for name, value in {**UNKNOWN, **known}.items():
            metrics.set_level(name, "", value)
    return reports


class LastLook:
    """The values last read from a medium. When they are requested and stale, a separate thread refreshes them: the
    caller gets the known values immediately and never waits for a medium that hangs. Threads: any."""

    def __init__(self, name: str, look: Callable[[], Gauges], interval: float) -> None:
        """``look`` reads the values; if it raises, the known ones stay. ``interval``: seconds between two reads."""
        self._look = look
        self._interval = interval
        self._known: Gauges = {}
        self._looked = -math.inf
        self._pending = False
        self._loop = BackgroundLoop(f"hicache-{name}-look", self._look_now)

    def known(self) -> Gauges:
        if not self._pending and time.monotonic() - self._looked >= self._interval:
            self._pending = True  # set first, because the look may have ended when wake() returns
            if not self._loop.wake():
                self._pending = False
        return self._known

    def _look_now(self) -> float:
        try:
            self._known = self._look()
        except Exception as error:  # noqa: BLE001 - a broken medium may raise anything
            # Only the type, because the message of a client library may repeat what it sent.
            logger.debug("hicache_ext: a look at how full a tier is ended in %s", type(error).__name__)
        finally:
            self._looked, self._pending = time.monotonic(), False
        return math.inf

    def close(self, seconds: float) -> None:
        """Wait up to ``seconds`` for a read in flight; abandon one that hangs."""
        self._loop.stop(seconds)


class RecentMean:
    """The mean of the values noted since the last ``take``, or the previous mean if there are none. Threads: any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sum = 0.0
        self._count = 0
        self._last = 0.0

    def note(self, value: float, count: int = 1) -> None:
        """Note ``value`` ``count`` times."""
        with self._lock:
            self._sum += value * count
            self._count += count

    def take(self) -> float:
        """Return the mean and start a new one; 0 before any value was noted."""
        with self._lock:
            if self._count:
                self._last = self._sum / self._count
                self._sum, self._count = 0.0, 0
            return self._last


# -- the series ----------------------------------------------------------------------------------------------------
#
# Of reasons from outside (error codes of a system), only common ones are listed; others begin with their first event.

OPERATIONS = ("get", "set", "exists")
"""Operations whose latencies every tier has."""

CHAIN_PAGES = {"chain_pages": ("asked", "found", "used")}

_CALLS = ("get", "set", "contains", "count_leading", "remove", "clear", "register_identity")
SUSPECTS = (*(verdict.value for verdict in Verdict), "forgotten")
"""Reasons of the event ``suspect``, for tiers that examine bad pages."""

OF_ANSWERS: Mapping[str, Sequence[str]] = {
    **CHAIN_PAGES,
    "get": (*(result.value for result in GetResult), "gap"),
    "set": tuple(result.value for result in SetResult),
}
"""Series of the answers to SGLang (tier ``all``)."""

OF_EVERY_TIER: Mapping[str, Sequence[str]] = {
    **CHAIN_PAGES,
    "get": tuple(result.value for result in GetResult),
    "set": tuple(result.value for result in SetResult),
    "bytes": ("get", "set"),
    "corrupt": (
        *("short_header", "magic", "header_checksum", "version", "header_length", "identity", "page_hash"),
        *("payload_length", "no_checksum", "checksum", "length", "truncated", "longer"),
    ),
    "rejected": ("breaker", "paused", "concurrency", "stuck", "not_open"),
    "error": ("raised",),
    "failure": ("get", "set", "exists", "contains", "queue", "remove", "clear", "closed"),
    "timeout": _CALLS,
    "late": ("",),
    "retry": ("get", "set"),
    "breaker": ("open", "half_open", "closed"),
    "breaker_probe": ("good", "bad"),
    "exists_budget": ("exceeded", "busy"),
    "dropped_pages": ("async", "async_failed", "promotion", "promotion_failed"),
    "promotion": ("queued", "waiting", "dropped", "stored", "exists", "failed"),
    "prefetch": ("fetched", "useful", "wasted", "overtaken", "joined", "failed"),
    "prefetch_bytes": ("fetched", "useful", "wasted"),
}


OF_ADMITTING_TIERS: Mapping[str, Sequence[str]] = {
    "admission": ("admitted_first", "admitted_again", "refused_first", "refused_behind", "refused_budget"),
}
"""Series of a tier with admission, which does not write every page it is offered."""

OF_SEALED_TIERS: Mapping[str, Sequence[str]] = {
    "unsealed": ("",),
    "corrupt": (
        *("seal_tag", "seal_key", "seal_form", "seal_cipher", "unsealed", "codec"),
        *("transform", "transform_version", "transform_length", "encoding", "encoded_length"),
    ),
    "rejected": ("suspect",),
}
"""Series of a tier whose pages are sealed or encoded."""


OF_LOSSY_TIERS: Mapping[str, Sequence[str]] = {"lossy": LOSSY_CODECS}
"""Series of a tier that may return pages that differ from those written."""


def _series_of(tier: PageStore) -> Mapping[str, Sequence[str]]:
    info = tier.describe()
    tables = [OF_EVERY_TIER, series_of_type(info.type)]
    if "admission" in info.details:
        tables.append(OF_ADMITTING_TIERS)
    if {"seal", "codec"} & info.details.keys():
        tables.append(OF_SEALED_TIERS)
    if str(info.details.get("codec", "")).startswith(LOSSY_CODECS):
        tables.append(OF_LOSSY_TIERS)
    if paths := info.details.get("paths"):
        tables.append(dict.fromkeys(("path_out_of_service", "path_back_in_service"), paths))
    series: dict[str, list[str]] = {}
    for table in tables:
        for event, reasons in table.items():
            series.setdefault(event, []).extend(reasons)
    return series

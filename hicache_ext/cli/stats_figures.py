"""What the metrics of a server say of its tiers: the figures of ``hicache-ext stats``, totals or what has grown."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hicache_ext.storage.serving.metrics_export import CALL_SECONDS, PREFIX

_BESIDE = ("pull", "pd_write", "hints", "kernels", "record", "events", "linker")
"""Values of the label ``tier`` that are no tiers, unless a user has named one so."""
_BREAKER_STATES = ("closed", "half open", "open")
_PATH_EVENTS = ("out_of_service", "back_in_service")
PROMPT_TOKENS = "sglang:prompt_tokens_total"
CACHED_TOKENS = "sglang:cached_tokens_total"
CACHE_SOURCES = ("storage", "host", "device", "total")
"""SGLang's label ``cache_source``; "total": SGLang did not find out which."""

CAPACITIES = {"half": "half of it", "capacity": "this one", "twice": "twice", "four_times": "four times"}
"""Capacities of the gauges ``hit_share_at_...``, in words."""

_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+\d+)?")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_ESCAPES = {"\\n": "\n", '\\"': '"', "\\\\": "\\"}


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples at one moment, this package's and SGLang's of prompt tokens: (name, labels) -> value."""

    values: Mapping[tuple[str, tuple[tuple[str, str], ...]], float]
    when: float

    def total(self, name: str, **labels: str) -> float:
        """The sum of all samples of ``name`` that have these labels."""
        return sum(self.each(name, **labels))

    def each(self, name: str, **labels: str) -> list[float]:
        """All samples of ``name`` that have these labels."""
        return [self.values[key] for key in self._matching(name, labels)]

    def by(self, label: str, name: str, **labels: str) -> dict[str, float]:
        """The sums of the samples of ``name`` that have these labels, for each value of ``label``."""
        sums: dict[str, float] = {}
        for key in self._matching(name, labels):
            value = dict(key[1]).get(label, "")
            sums[value] = sums.get(value, 0.0) + self.values[key]
        return sums

    def _matching(self, name: str, labels: Mapping[str, str]) -> Iterator[tuple[str, tuple[tuple[str, str], ...]]]:
        wanted = set(labels.items())
        return (key for key in self.values if key[0] == name and wanted <= set(key[1]))


def read_samples(text: str) -> Samples:
    """The samples for the table, from an answer of ``/metrics`` (Prometheus text format)."""
    values = {}
    for line in text.splitlines():
        wanted = line.startswith((PREFIX, PROMPT_TOKENS, CACHED_TOKENS))
        match = _SAMPLE.fullmatch(line.strip()) if wanted else None
        if match is not None:
            name, labels, value = match.groups()
            found = tuple((key, _unescape(text)) for key, text in _LABEL.findall(labels or ""))
            values[name, found] = float(value)
    return Samples(values, time.monotonic())


def figures(before: Samples | None, now: Samples) -> dict[str, Any]:
    """Totals since the server's start, or what has grown between two looks. NaN where something is not known.

    ``seconds`` is the time between the looks, None for totals. The keys are those of ``--json`` (docs/command-line.md).
    """
    looks = [look for look in (before, now) if look is not None]
    serving = now.each(f"{PREFIX}serving")
    tiers, beside = _tiers_and_others(now)
    tokens = _difference([look.total(PROMPT_TOKENS) for look in looks])
    cached = {
        source: _difference([look.total(CACHED_TOKENS, cache_source=source) for look in looks])
        for source in CACHE_SOURCES
    }
    return {
        "seconds": None if before is None else now.when - before.when,
        "prompt_tokens": {"all": tokens, **cached, "computed": max(0.0, tokens - sum(cached.values()))},
        "ranks": len(serving),
        "ranks_not_serving": serving.count(0.0),
        "tiers": [_tier(before, now, tier) for tier in tiers],
        "beside": {name: counted for name in beside if (counted := _beside(before, now, name))},
    }


def _tier(before: Samples | None, now: Samples, tier: str) -> dict[str, Any]:
    grown = _Growth(before, now, tier)
    pages, why = grown.by_reason("chain_pages"), grown.by_reason("get")
    why.pop("hit", None)
    for event in ("corrupt", "suspect", "rejected", "breaker"):
        why |= {f"{event} {reason}": count for reason, count in grown.by_reason(event).items()}
    worst = max(now.each(f"{PREFIX}breaker_state", tier=tier), default=0.0)
    return {
        "tier": tier,
        "up": _up(now, tier),
        "breaker": _BREAKER_STATES[int(worst)],
        **{f"{stage}_pages": pages.get(stage, 0.0) for stage in ("asked", "found", "used")},
        "filled": _full(now, tier),
        "no_space_since": min(filter(_is_moment, now.each(f"{PREFIX}no_space_since_seconds", tier=tier)), default=None),
        "paths_out": _paths_out(now, tier),
        "read_bytes": grown.of("bytes", "get"),
        "written_bytes": grown.of("bytes", "set"),
        "get_seconds_p50": grown.quantile("get", 0.5),
        "get_seconds_p99": grown.quantile("get", 0.99),
        "queued_bytes": now.total(f"{PREFIX}queue_bytes", tier=tier),
        "admission": {reason: count for reason, count in grown.by_reason("admission").items() if count},
        "dropped_pages": sum(grown.by_reason("dropped_pages").values()),
        "promoted_pages": grown.of("promotion", "stored"),
        "prefetched_pages": grown.of("prefetch", "fetched"),
        "prefetched_useful_pages": grown.of("prefetch", "useful"),
        "prefetched_wasted_pages": grown.of("prefetch", "wasted"),
        "hit_share_at": _curve(now, tier),
        "not_hit": {reason: count for reason, count in why.items() if count},
    }


def _beside(before: Samples | None, now: Samples, name: str) -> dict[str, Any]:
    """What counts beside the tiers (the pull rule, a recording, the copy engines): by reason, or a gauge."""
    grown = _Growth(before, now, name)
    told: dict[str, Any] = {}
    for metric, title in _counted_by(now, name):
        if metric.endswith("_total"):
            if counts := {reason: count for reason, count in grown.by_reason(title).items() if count}:
                told[title] = counts
        else:
            told[title] = now.total(metric, tier=name)
    return told


def _up(now: Samples, tier: str) -> str:
    """Whether every rank reaches the tier and uses it."""
    ups = [up for up in now.each(f"{PREFIX}tier_up", tier=tier) if not math.isnan(up)]
    if not ups:
        return "" if tier == "all" else "-"
    if not any(ups):
        return "no"
    if max(now.each(f"{PREFIX}breaker_state", tier=tier), default=0.0) == _BREAKER_STATES.index("open"):
        return "left out"
    return "yes" if all(ups) else f"{sum(ups):.0f} of {len(ups)}"


def _full(now: Samples, tier: str) -> float:
    """The filled share of the tier, NaN where none is known. Where each rank has a directory, the fullest counts."""
    used = now.by("tp_rank", f"{PREFIX}used_bytes", tier=tier)
    capacity = now.by("tp_rank", f"{PREFIX}capacity_bytes", tier=tier)
    known = [
        used[rank] / most for rank, most in capacity.items() if most > 0 and not math.isnan(used.get(rank, math.nan))
    ]
    return max(known, default=math.nan)


def _is_moment(level: float) -> bool:
    return level > 0


def _paths_out(now: Samples, tier: str) -> list[str]:
    """The directories of a file tier that are out of service, of one rank at least."""
    out, back = (now.by("reason", f"{PREFIX}path_{event}_total", tier=tier) for event in _PATH_EVENTS)
    return sorted(path for path, count in out.items() if count > back.get(path, 0.0))


def _curve(now: Samples, tier: str) -> dict[str, float]:
    """The share of page uses that each of ``CAPACITIES`` would serve, the mean of the ranks; empty where none knows."""
    shares = {}
    for at in CAPACITIES:
        known = [share for share in now.each(f"{PREFIX}hit_share_at_{at}", tier=tier) if not math.isnan(share)]
        if known:
            shares[at] = sum(known) / len(known)
    return shares


def _difference(values: Sequence[float]) -> float:
    # After a restart a server counts from 0 again.
    return sum(max(0.0, later - earlier) for earlier, later in pairwise(values)) if len(values) > 1 else values[0]


class _Growth:
    """The growth of one tier's counters between two samples, or from 0."""

    def __init__(self, before: Samples | None, now: Samples, tier: str) -> None:
        self._looks = [look for look in (before, now) if look is not None]
        self._tier = tier

    def of(self, event: str, reason: str) -> float:
        return _difference(
            [look.total(f"{PREFIX}{event}_total", tier=self._tier, reason=reason) for look in self._looks]
        )

    def by_reason(self, event: str) -> dict[str, float]:
        return self._by("reason", f"{PREFIX}{event}_total")

    def quantile(self, operation: str, share: float) -> float:
        """The quantile ``share`` of the seconds of calls: the bound of a bucket. NaN without calls."""
        buckets = self._by("le", f"{CALL_SECONDS}_bucket", operation=operation)
        ordered = sorted((float(bound), count) for bound, count in buckets.items())
        if not ordered or not ordered[-1][1]:
            return math.nan
        return next(bound for bound, count in ordered if count >= share * ordered[-1][1])

    def _by(self, label: str, name: str, **labels: str) -> dict[str, float]:
        looks = [look.by(label, name, tier=self._tier, **labels) for look in self._looks]
        return {key: _difference([look.get(key, 0.0) for look in looks]) for key in looks[-1]}


def _tiers_and_others(samples: Samples) -> tuple[list[str], list[str]]:
    """The tiers with all of them together last, and what counts beside them. What can be up is a tier."""
    names = {tier for _, labels in samples.values if (tier := dict(labels).get("tier")) is not None}
    beside = [name for name in _BESIDE if not samples.each(f"{PREFIX}tier_up", tier=name)]
    return sorted(names - {"all", "backend", *beside}) + [name for name in ("all",) if name in names], beside


def _counted_by(samples: Samples, source: str) -> list[tuple[str, str]]:
    """(metric, its name without the package's prefix and suffix) of what ``source`` exports."""
    names = sorted({name for name, labels in samples.values if dict(labels).get("tier") == source})
    return [
        (name, name.removeprefix(PREFIX).removesuffix("_total"))
        for name in names
        if not name.endswith("_created") and not name.startswith(CALL_SECONDS)
    ]


def _unescape(text: str) -> str:
    return re.sub(r"\\.", lambda piece: _ESCAPES.get(piece.group(), piece.group()), text)

"""``hicache-ext stats URL``: what the tiers of a running server do, as a table that renews itself.

Reads SGLang's Prometheus endpoint, so the server must run with ``--enable-metrics``; a server's ranks are summed. The
first line is the share of prompt tokens that was not computed, by source. SGLang itself counts that when a request
ends.
"""

from __future__ import annotations

import argparse
import http.client
import math
import re
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hicache_ext.cli.terminal import aligned
from hicache_ext.config import parse_duration
from hicache_ext.errors import ConfigError, StatsError
from hicache_ext.storage.serving.metrics_export import CALL_SECONDS, PREFIX

_TIMEOUT = 10.0
_CLEAR = "\x1b[H\x1b[2J"
_BESIDE = ("pull", "pd_write", "hints", "kernels")
"""Values of the label ``tier`` that are no tiers."""
_BREAKER_STATES = ("closed", "half open", "open")
_PROMPT_TOKENS = "sglang:prompt_tokens_total"
_CACHED_TOKENS = "sglang:cached_tokens_total"
_SOURCES = {
    "storage": "from storage",
    "host": "from host memory",
    "device": "on the device",
    "total": "cached somewhere",
}
"""SGLang's label ``cache_source`` in words; "total": SGLang did not find out which."""

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
        wanted = line.startswith((PREFIX, _PROMPT_TOKENS, _CACHED_TOKENS))
        match = _SAMPLE.fullmatch(line.strip()) if wanted else None
        if match is not None:
            name, labels, value = match.groups()
            found = tuple((key, _unescape(text)) for key, text in _LABEL.findall(labels or ""))
            values[name, found] = float(value)
    return Samples(values, time.monotonic())


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="the server, e.g. http://127.0.0.1:30000")
    parser.add_argument("--interval", default="2s", metavar="DURATION", help="between two looks (default: %(default)s)")
    parser.add_argument("--once", action="store_true", help="print the totals since the server's start, once")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the table until interrupted."""
    url = _metrics_url(arguments.url)
    interval = parse_duration(arguments.interval, "--interval")
    if not 0.1 <= interval <= 3600:
        raise ConfigError("--interval", f"{arguments.interval!r} is not accepted", "a duration from 100ms to 1h")
    now = fetch(url)
    if arguments.once:
        print("\n".join(table(None, now)))
        return 0
    while True:
        time.sleep(interval)
        before, now = now, fetch(url)
        if sys.stdout.isatty():
            print(_CLEAR, end="")
        print("\n".join([*table(before, now), ""]), flush=True)


def fetch(url: str) -> Samples:
    """The samples of the server at ``url``. Raises StatsError with a sentence."""
    try:
        # An operator's own servers are not behind the proxies of the environment.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(url, timeout=_TIMEOUT) as response:
            text = str(response.read(), "utf-8", "replace")
    except urllib.error.HTTPError as error:
        hint = "; was the server started with --enable-metrics?" if error.code == 404 else ""
        raise StatsError(f"{url} answered {error.code}{hint}") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise StatsError(f"{url} cannot be read: {reason}") from None
    samples = read_samples(text)
    if not any(name.startswith(PREFIX) for name, _ in samples.values):
        raise StatsError(f"{url} has no metrics of hicache_ext; is it the storage backend, and --enable-metrics given?")
    return samples


def table(before: Samples | None, now: Samples) -> list[str]:
    """The lines of the table: rates between two samples, or the totals of one."""
    seconds = now.when - before.when if before is not None else 1.0
    unit = "/s" if before is not None else ""
    header: tuple[str, ...] = (
        "tier",
        "up",
        f"asked{unit}",
        f"found{unit}",
        f"used{unit}",
        "used %",
        "full %",
        f"read{unit}",
        f"written{unit}",
        "p50 get",
        "p99 get",
    )
    header = (*header, "queued", f"dropped{unit}", f"promoted{unit}", f"prefetched{unit}", "useful %", f"wasted{unit}")
    rows = [header]
    reasons: list[str] = []
    for tier in _tiers(now):
        grown = _Growth(before, now, tier)
        pages, results = grown.by_reason("chain_pages"), grown.by_reason("get")
        results.pop("hit", None)
        fetched, useful = grown.of("prefetch", "fetched"), grown.of("prefetch", "useful")
        rows.append(
            (
                tier,
                _up(now, tier),
                *(_number(pages.get(stage, 0.0) / seconds) for stage in ("asked", "found", "used")),
                _share(pages.get("used", 0.0), pages.get("asked", 0.0)),
                _full(now, tier),
                _bytes(grown.of("bytes", "get") / seconds),
                _bytes(grown.of("bytes", "set") / seconds),
                _seconds(grown.quantile("get", 0.5)),
                _seconds(grown.quantile("get", 0.99)),
                _bytes(now.total(f"{PREFIX}queue_bytes", tier=tier)),
                _number(sum(grown.by_reason("dropped_pages").values()) / seconds),
                _number(grown.of("promotion", "stored") / seconds),
                _number(fetched / seconds),
                _share(useful, fetched),
                _number(grown.of("prefetch", "wasted") / seconds),
            )
        )
        why = {**results, **{f"corrupt {reason}": n for reason, n in grown.by_reason("corrupt").items()}}
        why |= {f"rejected {reason}": n for reason, n in grown.by_reason("rejected").items()}
        why |= {f"breaker {reason}": n for reason, n in grown.by_reason("breaker").items()}
        told = [f"{_number(count / seconds)}{unit} {reason}" for reason, count in why.items() if count]
        worst = max(now.each(f"{PREFIX}breaker_state", tier=tier), default=0.0)
        if worst:
            told.insert(0, f"breaker is {_BREAKER_STATES[int(worst)]}")
        if _up(now, tier) == "no":
            told.insert(0, "cannot be reached")
        if told:
            reasons.append(f"{tier}: {', '.join(told)}")
    lines = aligned(rows, str.rjust)
    beside = _beside(before, now, seconds, unit)
    return [
        _prompt_tokens(before, now),
        *_not_serving(now),
        "",
        *lines,
        *(["", "not hit because:", *reasons] if reasons else []),
        *(["", "beside the tiers:", *beside] if beside else []),
    ]


def _prompt_tokens(before: Samples | None, now: Samples) -> str:
    """The first line: the sources of the prompt tokens of ended requests."""
    looks = [look for look in (before, now) if look is not None]
    tokens = _difference([look.total(_PROMPT_TOKENS) for look in looks])
    if not tokens:
        return "prompt tokens: no request has ended yet" if before is None else "prompt tokens: no request has ended"
    told = []
    cached = 0.0
    for source, words in _SOURCES.items():
        part = _difference([look.total(_CACHED_TOKENS, cache_source=source) for look in looks])
        cached += part
        if part or source != "total":
            told.append(f"{100 * part / tokens:.1f} % {words}")
    told.append(f"{100 * max(0.0, tokens - cached) / tokens:.1f} % computed")
    return f"prompt tokens: {', '.join(told)} (of {tokens:.0f})"


def _not_serving(now: Samples) -> list[str]:
    ranks = now.each(f"{PREFIX}serving")
    if all(ranks):
        return []
    return [f"{ranks.count(0.0)} of {len(ranks)} ranks store and serve nothing now; the server's log says why"]


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


def _full(now: Samples, tier: str) -> str:
    """How full the tier is. Ranks mostly share a directory or pool; where each has its own, the fullest counts."""
    used = now.by("tp_rank", f"{PREFIX}used_bytes", tier=tier)
    capacity = now.by("tp_rank", f"{PREFIX}capacity_bytes", tier=tier)
    known = [
        used[rank] / most for rank, most in capacity.items() if most > 0 and not math.isnan(used.get(rank, math.nan))
    ]
    return _share(max(known), 1.0) if known else "-"


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


def _tiers(samples: Samples) -> list[str]:
    names = {tier for _, labels in samples.values if (tier := dict(labels).get("tier")) is not None}
    return sorted(names - {"all", "backend", *_BESIDE}) + [name for name in ("all",) if name in names]


def _beside(before: Samples | None, now: Samples, seconds: float, unit: str) -> list[str]:
    """One line each for what counts beside the tiers: the pull rule, the decode writer, the copy engines."""
    lines = []
    for name in _BESIDE:
        grown = _Growth(before, now, name)
        told = []
        for metric, title in _counted_by(now, name):
            if metric.endswith("_total"):
                told += [
                    f"{_number(count / seconds)}{unit} {title} {reason}".rstrip()
                    for reason, count in grown.by_reason(title).items()
                    if count
                ]
            else:
                told.append(f"{_number(now.total(metric, tier=name))} {title} now")
        if told:
            lines.append(f"{name}: {', '.join(told)}")
    return lines


def _counted_by(samples: Samples, source: str) -> list[tuple[str, str]]:
    """(metric, its name without the package's prefix and suffix) of what ``source`` exports."""
    names = sorted({name for name, labels in samples.values if dict(labels).get("tier") == source})
    return [(name, name.removeprefix(PREFIX).removesuffix("_total")) for name in names if not name.endswith("_created")]


def _metrics_url(text: str) -> str:
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urllib.parse.urlsplit(url)
    except ValueError:  # half an IPv6 address
        parts = urllib.parse.SplitResult("", "", "", "", "")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError("URL", f"{text!r} is not an address", "such as http://127.0.0.1:30000")
    path = parts.path.rstrip("/")
    return urllib.parse.urlunsplit(parts._replace(path=path if path.endswith("/metrics") else f"{path}/metrics"))


def _unescape(text: str) -> str:
    return re.sub(r"\\.", lambda piece: _ESCAPES.get(piece.group(), piece.group()), text)


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f}" if whole else "-"


def _bytes(value: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{_number(value)} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def _seconds(value: float) -> str:
    if math.isnan(value):
        return "-"
    if math.isinf(value):
        return "> 10 s"
    return f"{value * 1000:g} ms" if value < 1 else f"{value:g} s"

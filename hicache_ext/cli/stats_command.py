"""``hicache-ext stats URL``: what the tiers of a running server do, as a table that renews itself.

Reads SGLang's Prometheus endpoint, so the server must run with ``--enable-metrics``; a server's ranks are summed. The
first line is the share of prompt tokens that was not computed, by source. SGLang itself counts that when a request
ends. The figures are made in stats_figures.py.
"""

from __future__ import annotations

import argparse
import http.client
import math
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

from hicache_ext.cli.stats_figures import CACHE_SOURCES, CAPACITIES, Samples, figures, read_samples
from hicache_ext.cli.terminal import fitted, rough_span
from hicache_ext.cli.usage import describe, show
from hicache_ext.config import parse_duration
from hicache_ext.errors import ConfigError, StatsError
from hicache_ext.runtime.results import print_json
from hicache_ext.runtime.shown import shown_address
from hicache_ext.storage.serving.metrics_export import PREFIX

_TIMEOUT = 10.0
_LONGEST = 64 << 20
"""Bytes of metrics that are read."""
_CLEAR = "\x1b[H\x1b[2J"
_SOURCES = dict(
    zip(CACHE_SOURCES, ("from storage", "from host memory", "on the device", "cached somewhere"), strict=True)
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="the server, e.g. http://127.0.0.1:30000")
    parser.add_argument("--interval", default="2s", metavar="DURATION", help="between two looks (default: %(default)s)")
    parser.add_argument("--once", action="store_true", help="print the totals since the server's start, once")
    describe(
        parser,
        run=run,
        examples=["hicache-ext stats http://127.0.0.1:30000", "hicache-ext stats http://127.0.0.1:30000 --once --json"],
        problem="the server cannot be read, or has no metrics of hicache_ext",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the table, with ``--json`` a document in a line, until interrupted."""
    url = metrics_url(arguments.url)
    interval = parse_duration(arguments.interval, "--interval")
    if not 0.1 <= interval <= 3600:
        raise ConfigError("--interval", f"{arguments.interval!r} is not accepted", "a duration from 100ms to 1h")
    now = fetch(url)
    if arguments.once:
        show(arguments, figures(None, now), table(None, now))
        return 0
    while True:
        time.sleep(interval)
        before, now = now, fetch(url)
        if arguments.json:
            print_json(figures(before, now), in_one_line=True)
            continue
        if sys.stdout.isatty():
            print(_CLEAR, end="")
        print("\n".join([*table(before, now), ""]), flush=True)


def fetch(url: str) -> Samples:
    """The samples of the server at ``url``. Raises StatsError with a sentence."""
    try:
        # An operator's own servers are not behind the proxies of the environment.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(url, timeout=_TIMEOUT) as response:
            text = str(response.read(_LONGEST), "utf-8", "replace")
    except urllib.error.HTTPError as error:
        hint = "; was the server started with --enable-metrics?" if error.code == 404 else ""
        raise StatsError(f"{shown_address(url)} answered {error.code}{hint}") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise StatsError(f"{shown_address(url)} cannot be read: {shown_address(str(reason))}") from None
    samples = read_samples(text)
    if not any(name.startswith(PREFIX) for name, _ in samples.values):
        remedy = "is it the storage backend, and --enable-metrics given?"
        raise StatsError(f"{shown_address(url)} has no metrics of hicache_ext; {remedy}")
    return samples


def table(before: Samples | None, now: Samples) -> list[str]:
    """The lines of the table: rates between two samples, or the totals of one."""
    found = figures(before, now)
    seconds = 1.0 if found["seconds"] is None else found["seconds"]
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
    for tier in found["tiers"]:
        rows.append(
            (
                tier["tier"],
                tier["up"],
                *(_number(tier[f"{stage}_pages"] / seconds) for stage in ("asked", "found", "used")),
                _share(tier["used_pages"], tier["asked_pages"]),
                "-" if math.isnan(tier["filled"]) else _share(tier["filled"], 1.0),
                _bytes(tier["read_bytes"] / seconds),
                _bytes(tier["written_bytes"] / seconds),
                _seconds(tier["get_seconds_p50"]),
                _seconds(tier["get_seconds_p99"]),
                _bytes(tier["queued_bytes"]),
                _number(tier["dropped_pages"] / seconds),
                _number(tier["promoted_pages"] / seconds),
                _number(tier["prefetched_pages"] / seconds),
                _share(tier["prefetched_useful_pages"], tier["prefetched_pages"]),
                _number(tier["prefetched_wasted_pages"] / seconds),
            )
        )
        told = [f"{_number(count / seconds)}{unit} {reason}" for reason, count in tier["not_hit"].items()]
        if tier["breaker"] != "closed":
            told.insert(0, f"breaker is {tier['breaker']}")
        if tier["up"] == "no":
            told.insert(0, "cannot be reached")
        if told:
            reasons.append(f"{tier['tier']}: {', '.join(told)}")
    admission = [_told_admission(tier, seconds, unit) for tier in found["tiers"] if tier["admission"]]
    curves = [_told_curve(tier["tier"], tier["hit_share_at"]) for tier in found["tiers"] if tier["hit_share_at"]]
    beside = [_told_beside(name, counted, seconds, unit) for name, counted in found["beside"].items()]
    return [
        _prompt_tokens(found["prompt_tokens"], since_start=before is None),
        *_not_serving(found),
        "",
        *fitted(rows, str.rjust),
        *(["", "not hit because:", *reasons] if reasons else []),
        *(["", "stored of what was offered:", *admission] if admission else []),
        *(["", "hits by capacity:", *curves] if curves else []),
        *(["", "beside the tiers:", *beside] if beside else []),
    ]


def _prompt_tokens(tokens: Mapping[str, float], *, since_start: bool) -> str:
    """The first line: the sources of the prompt tokens of ended requests."""
    if not tokens["all"]:
        return "prompt tokens: no request has ended yet" if since_start else "prompt tokens: no request has ended"
    told = [
        f"{100 * tokens[source] / tokens['all']:.1f} % {words}"
        for source, words in _SOURCES.items()
        if tokens[source] or source != "total"
    ]
    told.append(f"{100 * tokens['computed'] / tokens['all']:.1f} % computed")
    return f"prompt tokens: {', '.join(told)} (of {tokens['all']:.0f})"


def _not_serving(found: Mapping[str, Any]) -> Iterator[str]:
    if found["ranks_not_serving"]:
        ranks = f"{found['ranks_not_serving']} of {found['ranks']}"
        yield f"{ranks} ranks store and serve nothing now; the server's log says why"
    for tier in found["tiers"]:
        if tier["no_space_since"] is not None:
            since = rough_span(time.time() - tier["no_space_since"])
            yield f"{tier['tier']}: no space left for new pages, for {since}: the disk is full before the tier is"
        yield from (f"{tier['tier']}: path {path} is out of service" for path in tier["paths_out"])


def _told_admission(tier: Mapping[str, Any], seconds: float, unit: str) -> str:
    """One line of what admission did."""
    counts = tier["admission"]
    offered, refused = sum(counts.values()), {why: n for why, n in counts.items() if why.startswith("refused_")}
    told = [f"{_number(count / seconds)}{unit} {why.replace('_', ' ')}" for why, count in refused.items()]
    return f"{tier['tier']}: {', '.join([f'{_share(offered - sum(refused.values()), offered)} %', *told])}"


def _told_curve(tier: str, shares: Mapping[str, float]) -> str:
    """One line of what other capacities would serve."""
    return f"{tier}: " + ", ".join(f"{100 * share:.1f} % at {CAPACITIES[at]}" for at, share in shares.items())


def _told_beside(name: str, counted: Mapping[str, Any], seconds: float, unit: str) -> str:
    """One line of what counts beside the tiers."""
    told = []
    for title, counts in counted.items():
        if isinstance(counts, Mapping):
            told += [f"{_number(count / seconds)}{unit} {title} {why}".rstrip() for why, count in counts.items()]
        else:
            told.append(f"{_number(counts)} {title} now")
    return f"{name}: {', '.join(told)}"


def metrics_url(text: str) -> str:
    """Where the server at this address has its metrics. Raises ConfigError with a sentence."""
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urllib.parse.urlsplit(url)
    except ValueError:  # half an IPv6 address
        parts = urllib.parse.SplitResult("", "", "", "", "")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError("URL", f"{text!r} is not an address", "such as http://127.0.0.1:30000")
    if parts.username is not None or parts.password is not None:
        raise ConfigError("URL", "an address holds no login", "such as http://127.0.0.1:30000")
    path = parts.path.rstrip("/")
    return urllib.parse.urlunsplit(parts._replace(path=path if path.endswith("/metrics") else f"{path}/metrics"))


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

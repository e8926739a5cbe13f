"""``hicache-ext stats URL`` and ``curve URL``: what the tiers of a running server do, and what other capacities would;
``reload``: have running servers on this machine take over their configuration file.

The first two read SGLang's Prometheus endpoint, so the server must run with ``--enable-metrics``; a server's ranks are
summed. The first line of ``stats`` is the share of prompt tokens that was not computed, by source. SGLang itself counts
that when a request ends.
"""

from __future__ import annotations

import argparse
import http.client
import math
import os
import re
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hicache_ext.cli.output import argument, command, fitted, rough_span, show
from hicache_ext.config import load_document, parse_duration, rounded_size
from hicache_ext.errors import CommandError, ConfigError, ControlError
from hicache_ext.runtime.commands import print_json
from hicache_ext.runtime.shown import shown_address, shown_text
from hicache_ext.storage.serving.control import Answer, ask, has_listener, servers
from hicache_ext.storage.serving.metrics_export import CALL_SECONDS, PREFIX

# -- figures -----------------------------------------------------------------------------------------------------------

_BESIDE = ("pull", "pd_write", "hints", "kv_hints", "kernels", "record", "events", "linker")
"""Values of the label ``tier`` that are no tiers, unless a user has named one so."""
_RATES = ("asked", "found", "used", "dropped", "promoted", "prefetched", "prefetched_wasted")
"""Columns of pages."""
_BREAKER_STATES = ("closed", "half open", "open")
PROMPT_TOKENS = "sglang:prompt_tokens_total"
CACHED_TOKENS = "sglang:cached_tokens_total"
_SOURCES = {
    "storage": "from storage",
    "host": "from host memory",
    "device": "on the device",
    "total": "cached somewhere",
}
"""SGLang's label ``cache_source``, in words; "total": SGLang did not find out which."""

CAPACITIES = {"half": 0.5, "capacity": 1.0, "twice": 2.0, "four_times": 4.0}
"""Capacities of the gauges ``hit_share_at_...``, as multiples of the tier's own."""

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
        """Return all samples of ``name`` that have these labels."""
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
    """The samples for the table, from an answer of ``/metrics`` (Prometheus text format). What is not known (NaN) is
    none."""
    values = {}
    for line in text.splitlines():
        wanted = line.startswith((PREFIX, PROMPT_TOKENS, CACHED_TOKENS))
        match = _SAMPLE.fullmatch(line.strip()) if wanted else None
        if match is not None and not math.isnan(value := float(match[3])):
            name, labels = match[1], match[2]
            found = tuple(
                (key, shown_text(re.sub(r"\\.", lambda piece: _ESCAPES.get(piece[0], piece[0]), text)))
                for key, text in _LABEL.findall(labels or "")
            )
            values[name, found] = value
    return Samples(values, time.monotonic())


def figures(before: Samples | None, now: Samples) -> dict[str, Any]:
    """Totals since the server's start, or what has grown between two looks. NaN where something is not known.

    ``seconds`` is the time between the looks, None for totals. The keys are those of ``--json`` (docs/command-line.md).
    """
    then = {} if before is None else before.values
    # After a restart a server counts from 0 again.
    grown = Samples({key: max(0.0, value - then.get(key, 0.0)) for key, value in now.values.items()}, now.when)
    serving = now.each(f"{PREFIX}serving")
    # What can be up is a tier; all of them together come last.
    names = {tier for _, labels in now.values if (tier := dict(labels).get("tier")) is not None}
    beside = [name for name in _BESIDE if not now.each(f"{PREFIX}tier_up", tier=name)]
    tiers = sorted(names - {"all", "backend", *beside}) + sorted(names & {"all"})
    tokens = grown.total(PROMPT_TOKENS)
    cached = {source: grown.total(CACHED_TOKENS, cache_source=source) for source in _SOURCES}
    return {
        "seconds": None if before is None else now.when - before.when,
        "prompt_tokens": {"all": tokens, **cached, "computed": max(0.0, tokens - sum(cached.values()))},
        "ranks": len(serving),
        "ranks_not_serving": serving.count(0.0),
        "tiers": [_tier(grown, now, tier) for tier in tiers],
        "beside": {name: counted for name in beside if (counted := _beside(grown, now, name))},
    }


def _tier(grown: Samples, now: Samples, tier: str) -> dict[str, Any]:
    def by_reason(event: str) -> dict[str, float]:
        return grown.by("reason", f"{PREFIX}{event}_total", tier=tier)

    def of(event: str, reason: str) -> float:
        return grown.total(f"{PREFIX}{event}_total", tier=tier, reason=reason)

    pages, why = by_reason("chain_pages"), by_reason("get")
    why.pop("hit", None)
    for event in ("corrupt", "suspect", "rejected", "breaker"):
        why |= {f"{event} {reason}": count for reason, count in by_reason(event).items()}
    worst = max(now.each(f"{PREFIX}breaker_state", tier=tier), default=0.0)
    # Where each rank has a directory, the fullest counts.
    used, capacity = (now.by("tp_rank", f"{PREFIX}{name}_bytes", tier=tier) for name in ("used", "capacity"))
    filled = [used[rank] / most for rank, most in capacity.items() if most > 0 and rank in used]
    full_since = now.each(f"{PREFIX}no_space_since_seconds", tier=tier)
    events = ("out_of_service", "back_in_service")
    out, back = (now.by("reason", f"{PREFIX}path_{event}_total", tier=tier) for event in events)
    shares = {at: now.each(f"{PREFIX}hit_share_at_{at}", tier=tier) for at in CAPACITIES}
    return {
        "tier": tier,
        "up": _up(now, tier),
        "breaker": _BREAKER_STATES[int(worst)],
        **{f"{stage}_pages": pages.get(stage, 0.0) for stage in ("asked", "found", "used")},
        "filled": max(filled, default=math.nan),
        "no_space_since": min((moment for moment in full_since if moment > 0), default=None),
        "paths_out": sorted(path for path, count in out.items() if count > back.get(path, 0.0)),
        "read_bytes": of("bytes", "get"),
        "written_bytes": of("bytes", "set"),
        "get_seconds_p50": _quantile(grown, tier, "get", 0.5),
        "get_seconds_p99": _quantile(grown, tier, "get", 0.99),
        "queued_bytes": now.total(f"{PREFIX}queue_bytes", tier=tier),
        "admission": {reason: count for reason, count in by_reason("admission").items() if count},
        "dropped_pages": sum(by_reason("dropped_pages").values()),
        "promoted_pages": of("promotion", "stored"),
        "prefetched_pages": of("prefetch", "fetched"),
        "prefetched_useful_pages": of("prefetch", "useful"),
        "prefetched_wasted_pages": of("prefetch", "wasted"),
        "hit_share_at": {at: sum(of_ranks) / len(of_ranks) for at, of_ranks in shares.items() if of_ranks},
        "tenants": _tenants(grown, now, tier),
        "not_hit": {reason: count for reason, count in why.items() if count},
    }


_OF_TENANTS = {"read_pages": "hits", "evicted_pages": "evicted", "refused_pages": "refused"}


def _tenants(grown: Samples, now: Samples, tier: str) -> dict[str, dict[str, float]]:
    """Return each tenant's usage, which every rank reports for the whole directory, and its counts over all ranks."""
    levels, names = ("pages", "bytes"), sorted(now.by("reason", f"{PREFIX}tenant_pages", tier=tier))
    return {
        name: {at: max(now.each(f"{PREFIX}tenant_{at}", tier=tier, reason=name), default=0.0) for at in levels}
        | {
            figure: grown.total(f"{PREFIX}tenant_{event}_total", tier=tier, reason=name)
            for figure, event in _OF_TENANTS.items()
        }
        for name in names
    }


def _beside(grown: Samples, now: Samples, name: str) -> dict[str, Any]:
    """Return what is counted outside the tiers (pull rule, recording, copy engines): by reason, or a gauge."""
    told: dict[str, Any] = {}
    for metric in sorted({metric for metric, labels in now.values if dict(labels).get("tier") == name}):
        title = metric.removeprefix(PREFIX).removesuffix("_total")
        if metric.endswith("_total"):
            if counts := {reason: count for reason, count in grown.by("reason", metric, tier=name).items() if count}:
                told[title] = counts
        elif not metric.endswith("_created") and not metric.startswith(CALL_SECONDS):
            told[title] = now.total(metric, tier=name)
    return told


def _up(now: Samples, tier: str) -> str:
    """Return whether every rank reaches the tier and uses it."""
    ups = now.each(f"{PREFIX}tier_up", tier=tier)
    if not ups:
        return "" if tier == "all" else "-"
    if not any(ups):
        return "no"
    if max(now.each(f"{PREFIX}breaker_state", tier=tier), default=0.0) == _BREAKER_STATES.index("open"):
        return "left out"
    return "yes" if all(ups) else f"{sum(ups):.0f} of {len(ups)}"


def _quantile(grown: Samples, tier: str, operation: str, share: float) -> float:
    """The quantile ``share`` of the seconds of calls: the bound of a bucket. NaN without calls."""
    buckets = grown.by("le", f"{CALL_SECONDS}_bucket", tier=tier, operation=operation)
    ordered = sorted((float(bound), count) for bound, count in buckets.items())
    if not ordered or not ordered[-1][1]:
        return math.nan
    return next(bound for bound, count in ordered if count >= share * ordered[-1][1])


# -- stats -------------------------------------------------------------------------------------------------------------

_TIMEOUT = 10.0
_LONGEST = 64 << 20
"""Bytes of metrics that are read."""
_CLEAR = "\x1b[H\x1b[2J"


_SERVER = argument("url", metavar="URL", help="the server, e.g. http://127.0.0.1:30000")


@command(
    _SERVER,
    argument("--interval", default="2s", metavar="DURATION", help="between two looks (default: %(default)s)"),
    argument("--once", action="store_true", help="print the totals since the server's start, once"),
    examples=("http://127.0.0.1:30000", "http://127.0.0.1:30000 --once --json"),
    problem="the server cannot be read, or has no metrics of hicache_ext",
)
def stats_command(arguments: argparse.Namespace) -> int:
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
    """The samples of the server at ``url``. Raises CommandError with a sentence."""
    try:
        # An operator's own servers are not behind the proxies of the environment.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(url, timeout=_TIMEOUT) as response:
            text = str(response.read(_LONGEST), "utf-8", "replace")
    except urllib.error.HTTPError as error:
        hint = "; was the server started with --enable-metrics?" if error.code == 404 else ""
        raise CommandError(f"{shown_address(url)} answered {error.code}{hint}") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise CommandError(f"{shown_address(url)} cannot be read: {shown_address(str(reason))}") from None
    samples = read_samples(text)
    if not any(name.startswith(PREFIX) for name, _ in samples.values):
        remedy = "is it the storage backend, and --enable-metrics given?"
        raise CommandError(f"{shown_address(url)} has no metrics of hicache_ext; {remedy}")
    return samples


def table(before: Samples | None, now: Samples) -> list[str]:
    """The lines of the table: rates between two samples, or the totals of one."""
    found = figures(before, now)
    seconds, unit = (1.0, "") if before is None else (found["seconds"], "/s")

    def counts(of: Mapping[str, float]) -> list[str]:
        return [f"{_number(count / seconds)}{unit} {what}".rstrip() for what, count in of.items()]

    rows: list[dict[str, str]] = []
    why: dict[str, list[str]] = {"not hit because:": [], "stored of what was offered:": [], "pages of tenants:": []}
    not_hit, admission, of_tenants = why.values()
    for tier in found["tiers"]:
        name, offered = tier["tier"], sum(tier["admission"].values())
        rates = {stage: _number(tier[f"{stage}_pages"] / seconds) for stage in _RATES}
        rows.append(
            {
                "tier": name,
                "up": tier["up"],
                **{f"{stage}{unit}": rates[stage] for stage in ("asked", "found", "used")},
                "used %": _share(tier["used_pages"], tier["asked_pages"]),
                "full %": "-" if math.isnan(tier["filled"]) else _share(tier["filled"], 1.0),
                **{f"{done}{unit}": rounded_size(tier[f"{done}_bytes"] / seconds) for done in ("read", "written")},
                **{f"p{at} get": _seconds(tier[f"get_seconds_p{at}"]) for at in (50, 99)},
                "queued": rounded_size(tier["queued_bytes"]),
                **{f"{stage}{unit}": rates[stage] for stage in ("dropped", "promoted", "prefetched")},
                "useful %": _share(tier["prefetched_useful_pages"], tier["prefetched_pages"]),
                f"wasted{unit}": rates["prefetched_wasted"],
            }
        )
        told = ["cannot be reached"] if tier["up"] == "no" else []
        told += [f"breaker is {tier['breaker']}"] if tier["breaker"] != "closed" else []
        if told := [*told, *counts(tier["not_hit"])]:
            not_hit.append(f"{name}: {', '.join(told)}")
        if offered:
            refused = {reason: n for reason, n in tier["admission"].items() if reason.startswith("refused_")}
            share = f"{_share(offered - sum(refused.values()), offered)} %"
            told = counts({reason.replace("_", " "): n for reason, n in refused.items()})
            admission.append(f"{name}: {', '.join([share, *told])}")
        for tenant, of in tier["tenants"].items():
            told = counts({figure.removesuffix("_pages"): of[figure] for figure in _OF_TENANTS})
            held = f"{_number(of['pages'])} pages, {rounded_size(of['bytes'])}"
            of_tenants.append(f"{name}: {tenant}: {', '.join([held, *told])}")
    beside = why["beside the tiers:"] = []
    for name, counted in found["beside"].items():
        told = []
        for title, value in counted.items():
            by_reason = isinstance(value, Mapping)
            told += counts({f"{title} {reason}": n for reason, n in value.items()}) if by_reason else []
            told += [] if by_reason else [f"{_number(value)} {title} now"]
        beside.append(f"{name}: {', '.join(told)}")
    heading = tuple(rows[0]) if rows else ("tier",)
    return [
        _prompt_tokens(found["prompt_tokens"]),
        *_not_serving(found),
        "",
        *fitted([heading, *(tuple(row.values()) for row in rows)], str.rjust),
        *(line for title, lines in why.items() if lines for line in ("", title, *lines)),
    ]


def _prompt_tokens(tokens: Mapping[str, float]) -> str:
    """The first line: the sources of the prompt tokens of ended requests."""
    if not tokens["all"]:
        return "prompt tokens: no request has ended"
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


def metrics_url(text: str) -> str:
    """Return the URL of the server's metrics. Raises ConfigError with a sentence."""
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


def _seconds(value: float) -> str:
    if math.isnan(value):
        return "-"
    if math.isinf(value):
        return "> 10 s"
    return f"{value * 1000:g} ms" if value < 1 else f"{value:g} s"


# -- curve -------------------------------------------------------------------------------------------------------------

_WIDTH = 50
"""Characters of a bar for all uses."""


@command(_SERVER, examples=["http://127.0.0.1:30000"], problem="the server cannot be read, or no tier of it knows")
def curve_command(arguments: argparse.Namespace) -> int:
    """Print a bar for each capacity of each tier that knows; 1 where none does."""
    samples = fetch(metrics_url(arguments.url))
    tiers: list[dict[str, Any]] = []
    lines = []
    for tier in figures(None, samples)["tiers"]:
        if not (shares := tier["hit_share_at"]):
            continue
        sizes = samples.each(f"{PREFIX}capacity_bytes", tier=tier["tier"])
        capacity = max((size for size in sizes if size > 0), default=None)
        tiers.append({"tier": tier["tier"], "capacity_bytes": capacity, "hit_share_at": shares})
        lines.append(f"{tier['tier']}: share of page uses served, by capacity")
        for at, share in shares.items():
            times = CAPACITIES[at]
            size = f"{times:g} times" if capacity is None else rounded_size(int(times * capacity))
            bar = "#" * round(_WIDTH * share)
            lines.append(f"{size:>10} {100 * share:5.1f} % |{bar:<{_WIDTH}}|{' now' if times == 1 else ''}")
    show(arguments, {"tiers": tiers}, lines or ["No tier knows yet: a file tier in slabs that was written to does."])
    return 0 if tiers else 1


# -- reload ------------------------------------------------------------------------------------------------------------


@command(
    argument("file", metavar="FILE", help="the file that the servers were started with (@FILE)"),
    argument("--check", action="store_true", help="only say whether it would be taken over"),
    examples=("--check hicache.yaml", "hicache.yaml"),
    problem="no server runs with that file, or a process refuses it",
)
def reload_command(arguments: argparse.Namespace) -> int:
    file = os.path.abspath(arguments.file.removeprefix("@"))
    load_document(file)  # its mistakes are reported here, once, before any server is asked
    found = [facts for path in servers() if (facts := facts_of(path)) is not None]
    chosen = [
        facts for facts in found if "file" not in facts or os.path.realpath(facts["file"]) == os.path.realpath(file)
    ]
    if not any(facts.get("file") for facts in chosen):
        print(f"no running server of this user was started with @{file}", file=sys.stderr)
        print("(a server that was given its configuration inline has to be restarted)", file=sys.stderr)
        return 1
    # All ranks are asked before the first one changes, so that they stay equal.
    answers = [_asked(facts, only_check=True) for facts in chosen]
    refused = sum(not answer["ok"] for answer in answers)
    if not refused and not arguments.check:
        answers = [_asked(facts, only_check=False) for facts in chosen]
    willing, total = sum(answer["ok"] for answer in answers), len(answers)
    if refused:
        print(f"refused by {refused} of {total} processes; nothing was changed", file=sys.stderr)
    document = {
        "file": file,
        "check": arguments.check,
        "changed": not refused and not arguments.check,
        "processes": answers,
    }
    done = (
        f"{total} processes would take it over" if arguments.check else f"taken over by {willing} of {total} processes"
    )
    show(arguments, document, [] if refused else [done])
    return 0 if willing == total else 1


def facts_of(path: Path) -> dict[str, Any] | None:
    """What one process of a server says of itself; without ``file`` where it did not answer: it may be a rank of the
    server that is to be reloaded. None for one that has ended meanwhile."""
    try:
        return {"path": path, "pid": path.stem, "file": "", **ask(path, {"call": "facts"}, seconds=5)}
    except ControlError as error:
        if not has_listener(path):
            return None
        print(error, file=sys.stderr)
        return {"path": path, "pid": path.stem}


def _asked(facts: Mapping[str, Any], *, only_check: bool) -> dict[str, Any]:
    """Return one process's answer for ``--json``. Its pid is not unique: another container may have the same one."""
    process = str(facts["pid"])
    try:
        if "file" not in facts:
            raise ControlError("it does not answer; it may have been started with this file, too")
        answer: Answer = ask(facts["path"], {"call": "reload", "only_check": only_check})
    except ControlError as error:
        answer = {"ok": False, "messages": [str(error)]}
    told = answer.get("messages", [])
    messages = [str(line) for line in told] if isinstance(told, list) else []
    ok = bool(answer.get("ok"))
    for line in messages:
        print(f"process {process}: {line}", file=sys.stdout if ok else sys.stderr)
    if ok and not messages and not only_check:
        print(f"process {process}: nothing to change")
    return {"process": process, "ok": ok, "messages": messages}

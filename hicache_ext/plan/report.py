"""Turn a trace and a fleet into a plan: the figures of ``--json``, and the page with diagrams that people read."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hicache_ext.config import ExtraConfig
from hicache_ext.plan.fleet import COMPUTED, NEAR, POOL, WRITTEN_NEAR, WRITTEN_POOL, Fleet, Outcome, simulate
from hicache_ext.plan.model import ModelSize
from hicache_ext.plan.traces import Trace

# -- figures -----------------------------------------------------------------------------------------------------------

CURVE_POINTS = 12
_HOUR = 3600.0
_WARRANTY_YEARS = 5.0
"""Years for which vendors promise their drive writes per day."""
POOL_NODE = 500 * 10**9
"""Most bytes of memory that one pool server has for pages: an assumption, and the plan says so."""


def plan_of(
    hardware: argparse.Namespace, trace: Trace, model: ModelSize, rate: tuple[float, str] | None, fleet: Fleet
) -> dict[str, Any]:
    """Compute all figures that ``--json`` prints: bytes, seconds, shares from 0 to 1. ``hardware``: the options as
    numbers, 0 if not given. ``rate``: tokens per second of one node, and the source of that figure."""
    block_bytes = model.token_bytes * trace.block_tokens
    outcome = simulate(trace, fleet)
    seconds = max(trace.seconds, 1.0)
    per_hour = _HOUR / seconds
    # Caches start empty; the first half of the requests warms them up.
    later = outcome.per_request[len(trace) // 2 :, [NEAR, POOL, COMPUTED]].sum(axis=0)
    tokens = {name: int(outcome.totals[column]) * trace.block_tokens for name, column in _SOURCES.items()}
    # The last block of a prompt is usually partial.
    tokens["computed"] = max(0, int(trace.prompt.sum()) - tokens["disk"] - tokens["pool"])
    document: dict[str, Any] = {
        "trace": {
            "name": trace.name,
            "requests": len(trace),
            "seconds": trace.seconds,
            "blocks": int(trace.offsets[-1]),
            "distinct_blocks": trace.distinct,
            "block_tokens": trace.block_tokens,
            "prompt_tokens": int(trace.prompt.sum()),
            "remarks": list(trace.remarks),
        },
        "model": {
            "name": model.name,
            "kind": model.kind,
            "token_bytes": model.token_bytes,
            "rank_token_bytes": model.rank_token_bytes,
            "writing_ranks": model.writing_ranks,
            "page_size": hardware.page_size,
            "page_bytes": model.page_bytes(hardware.page_size),
            "remarks": list(model.remarks),
        },
        "fleet": {
            "nodes": hardware.nodes,
            "disk_bytes": hardware.disk,
            "pool_bytes": hardware.pool,
            "pool_nodes": pool_nodes(hardware.pool) if hardware.pool else 0,
            "router": fleet.router,
            "tokens": tokens,
            "disk_share": outcome.share(NEAR),
            "pool_share": outcome.share(POOL),
            "hit_share": outcome.hit_share,
            "warm_hit_share": float(later[:2].sum() / max(1, later.sum())),
            "infinite_share": simulate(trace, Fleet(near=None)).hit_share,
        },
        "curve": curve(trace, block_bytes),
        "writes": _writes(outcome, hardware, block_bytes, seconds),
        "pool_network": _network(outcome, trace, hardware, block_bytes),
    }
    document["prefill"] = _prefill(hardware, model, rate, tokens, per_hour)
    document["money"] = _money(hardware, document["prefill"], document["writes"]["years_until_worn_out"])
    document["does_not_fit"] = list(_overloads(hardware, outcome, document, block_bytes, seconds))
    return document


def _overloads(
    hardware: argparse.Namespace, outcome: Outcome, document: Mapping[str, Any], block_bytes: int, seconds: float
) -> Iterator[str]:
    """Describe each load that these nodes cannot carry within the duration of the trace."""
    prefill = document["prefill"]
    if prefill is not None and (computed := prefill["computed_seconds_per_hour"]) > _HOUR * hardware.nodes:
        yield f"{computed:,.0f} s of prefill in an hour, and {hardware.nodes} nodes have {_HOUR * hardware.nodes:,.0f}"
    written = float(outcome.written_by_node.max()) * block_bytes / seconds if hardware.disk else 0.0
    if 0 < hardware.disk_speed < written:
        yield f"{_size(written)}/s of writes on one node, whose disks read {_size(hardware.disk_speed)}/s"
    network = document["pool_network"]
    moved = network["read_bytes_per_second"] + network["written_bytes_per_second"]
    if 0 < hardware.pool_speed * hardware.nodes < moved:
        yield f"{_size(moved)}/s between nodes and pool, which has {_size(hardware.pool_speed)}/s for each node"


_SOURCES = {"disk": NEAR, "pool": POOL, "computed": COMPUTED}


def curve(trace: Trace, block_bytes: int) -> list[dict[str, Any]]:
    """Return the hit share of one cache by capacity, from a thousandth of all distinct blocks to all of them."""
    capacities = np.unique(
        np.geomspace(max(1, trace.distinct / 1000), max(1, trace.distinct), CURVE_POINTS).astype(int)
    )
    return [
        {
            "bytes": int(capacity) * block_bytes,
            "blocks": int(capacity),
            "hit_share": simulate(trace, Fleet(near=int(capacity))).hit_share,
        }
        for capacity in capacities
    ]


def _writes(outcome: Outcome, hardware: argparse.Namespace, block_bytes: int, seconds: float) -> dict[str, Any]:
    """Compute writes and wear. The node that writes most decides: its disk wears out first."""
    day_bytes = hardware.busy_hours * _HOUR / seconds * block_bytes
    worst = float(outcome.written_by_node.max()) * day_bytes if hardware.disk else 0.0
    mean = float(outcome.totals[WRITTEN_NEAR]) * day_bytes / hardware.nodes
    allowed = hardware.dwpd * hardware.disk
    life = allowed * _WARRANTY_YEARS / worst if worst and allowed else None
    return {
        "disk_bytes_per_day": mean,
        "disk_bytes_per_day_worst_node": worst,
        "disk_writes_per_day": worst / hardware.disk if hardware.disk else 0.0,
        "allowed_bytes_per_day": allowed,
        "years_until_worn_out": life,
        "pool_bytes_per_day": float(outcome.totals[WRITTEN_POOL]) * day_bytes,
    }


def _network(outcome: Outcome, trace: Trace, hardware: argparse.Namespace, block_bytes: int) -> dict[str, float]:
    """Return bytes per second over all nodes: the mean, and the busiest minute."""
    minutes = (trace.times // 60).astype(np.int64)
    seconds = max(trace.seconds, 1.0)
    figures = {}
    for name, column in (("read", POOL), ("written", WRITTEN_POOL)):
        blocks = outcome.per_request[:, column]
        peak = np.bincount(minutes, weights=blocks).max() if len(blocks) else 0.0
        figures[f"{name}_bytes_per_second"] = float(blocks.sum()) * block_bytes / seconds
        figures[f"{name}_bytes_per_second_peak_minute"] = float(peak) * block_bytes / min(60.0, seconds)
    return figures


def _prefill(
    hardware: argparse.Namespace,
    model: ModelSize,
    known: tuple[float, str] | None,
    tokens: dict[str, int],
    per_hour: float,
) -> dict[str, Any] | None:
    """Return the seconds of prefill that hits save per hour, and the time to read them if the speeds are known."""
    if known is None:
        return None
    (rate, source), size = known, model.token_bytes
    saved = (tokens["disk"] + tokens["pool"]) / rate * per_hour
    reading = 0.0
    for name, speed in (("disk", hardware.disk_speed), ("pool", hardware.pool_speed)):
        reading += tokens[name] * size / speed * per_hour if speed else 0.0
    return {
        "tokens_per_second": rate,
        "source": source,
        "computed_seconds_per_hour": tokens["computed"] / rate * per_hour,
        "saved_seconds_per_hour": saved,
        "reading_seconds_per_hour": reading,
        "break_even_bytes_per_second": rate * size,
    }


def _money(hardware: argparse.Namespace, prefill: dict[str, Any] | None, life: float | None) -> dict[str, Any] | None:
    """Return costs and savings per year. Disks worn out after ``life`` years are replaced then."""
    terabyte = 1e12
    disks = hardware.nodes * hardware.disk / terabyte * hardware.price_disk
    years = hardware.years or 3.0
    disks /= years if life is None else min(years, life)
    pool = hardware.pool / terabyte * hardware.price_pool / years
    if not (disks or pool or hardware.price_node_hour):
        return None
    saved = 0.0
    if prefill is not None:
        hours = (prefill["saved_seconds_per_hour"] - prefill["reading_seconds_per_hour"]) / _HOUR
        saved = max(0.0, hours) * hardware.busy_hours * 365.25 * hardware.price_node_hour
    net = saved - disks - pool
    return {"disks_per_year": disks, "pool_per_year": pool, "saved_per_year": saved, "net_per_year": net}


# -- the page ----------------------------------------------------------------------------------------------------------

_BAR = 40
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def page_of(plan: Mapping[str, Any], launch: Sequence[str], yaml: str) -> Iterator[str]:
    """Yield lines of at most 120 columns, apart from names the user chose."""
    trace, model, fleet = plan["trace"], plan["model"], plan["fleet"]
    ranks = model["writing_ranks"]
    where = "the rank that writes" if ranks == 1 else f"each of {ranks} ranks"
    yield (
        f"{trace['name']}: {trace['requests']:,} requests in {trace['seconds'] / 3600:.2f} h, "
        f"{trace['prompt_tokens'] / 1e6:,.1f} million prompt tokens;"
    )
    yield (
        f"  {trace['blocks']:,} blocks of {trace['block_tokens']} tokens, {trace['distinct_blocks']:,} different ones; "
        f"{fleet['infinite_share']:.1%} were there before"
    )
    yield (
        f"{model['name']}: {model['kind']}, {model['token_bytes']:,} bytes a token; "
        f"a page of {model['page_size']} tokens is {_size(model['page_bytes'])} on {where}"
    )
    for remark in (*trace["remarks"], *model["remarks"]):
        yield f"  note: {remark}"
    yield ""
    yield "Found in one cache, by its size"
    largest = max([point["hit_share"] for point in plan["curve"]] + [0.01])
    for point in plan["curve"]:
        yield f"  {_size(point['bytes']):>9} {_bar(point['hit_share'] / largest)} {point['hit_share']:6.1%}"
    yield ""
    yield (
        f"The fleet: {fleet['nodes']} nodes, {_size(fleet['disk_bytes'])} of disk each, "
        f"a pool of {_size(fleet['pool_bytes'])}, router by {fleet['router']}. Prompt tokens come from"
    )
    whole = sum(fleet["tokens"].values()) or 1
    for name, tokens in fleet["tokens"].items():
        yield f"  {name:>9} {_bar(tokens / whole)} {tokens / whole:6.1%}"
    yield (
        f"  caches were empty at first: {fleet['hit_share']:.1%} of all blocks were found, "
        f"{fleet['warm_hit_share']:.1%} in the second half of the requests"
    )
    yield ""
    yield f"By the hour, day and year, as if all of it were like these {trace['seconds'] / 60:,.0f} minutes"
    yield from (f"  DOES NOT FIT: {sentence}" for sentence in plan["does_not_fit"])
    yield from _wear(plan["writes"], fleet)
    if fleet["pool_bytes"]:
        network = plan["pool_network"]
        mean, peak = (
            [network[f"{way}_bytes_per_second{when}"] for way in ("read", "written")] for when in ("", "_peak_minute")
        )
        yield f"Network of the pool, mean: {_size(mean[0])}/s read and {_size(mean[1])}/s written,"
        yield f"  up to {_size(sum(peak))}/s in the busiest minutes, all nodes together"
    yield from _saved(plan["prefill"])
    if (money := plan["money"]) is not None:
        yield f"A year: disks {money['disks_per_year']:,.0f}, pool {money['pool_per_year']:,.0f},"
        yield f"  GPU time saved {money['saved_per_year']:,.0f}: {money['net_per_year']:+,.0f}"
    yield ""
    yield "The configuration (hicache.yaml), and how SGLang is launched with it"
    yield from (f"  {line}" for line in yaml.rstrip().splitlines())
    yield "  " + " \\\n    ".join(launch)


def _bar(share: float) -> str:
    eighths = round(max(0.0, min(1.0, share)) * _BAR * 8)
    return ("█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()).ljust(_BAR)


def _size(size: float) -> str:
    """Format bytes in decimal units, in which disks, their endurance and their prices are quoted."""
    power = max((power for power in range(1, 6) if size >= 1000**power), default=0)
    return f"{size / 1000**power:.4g} {('bytes', 'kB', 'MB', 'GB', 'TB', 'PB')[power]}"


def _wear(writes: Mapping[str, Any], fleet: Mapping[str, Any]) -> Iterator[str]:
    if not fleet["disk_bytes"]:
        return
    per_day, worst = writes["disk_bytes_per_day"], writes["disk_bytes_per_day_worst_node"]
    yield f"Written to the disks of a node: {_size(per_day)} a day, {_size(worst)} where it is most:"
    times = f"  {writes['disk_writes_per_day']:.2f} times the disk a day"
    if writes["allowed_bytes_per_day"]:
        life = writes["years_until_worn_out"]
        told = f"{life:.1f} years" if life is not None and life >= 1 else f"{365.25 * (life or 0.0):.0f} days"
        told = "never" if life is None else "more than 100 years" if life >= 100 else told
        times += f"; {_size(writes['allowed_bytes_per_day'])} a day are allowed for {_WARRANTY_YEARS:.0f} years:"
        times += f" worn out after {told}"
    yield times


def _saved(prefill: Mapping[str, Any] | None) -> Iterator[str]:
    if prefill is None:
        yield "Time saved: not known without a prefill rate (--prefill-rate TOKENS_PER_SECOND, or --gpu)"
        return
    saved, reading = prefill["saved_seconds_per_hour"], prefill["reading_seconds_per_hour"]
    yield f"Prefill: {prefill['tokens_per_second']:,.0f} tokens/s on a node ({prefill['source']})"
    less = f", less {reading:,.0f} s of reading" if reading else ""
    computed = prefill["computed_seconds_per_hour"]
    yield f"  {saved:,.0f} s of prefill saved in an hour{less}; {computed:,.0f} s are computed"
    yield f"  reading pays above {_size(prefill['break_even_bytes_per_second'])}/s"


def pool_nodes(size: int) -> int:
    """Return the number of pool servers: one, or a cluster of at least three."""
    return 1 if size <= POOL_NODE else max(3, -(-size // POOL_NODE))


def configuration(disk: int, pool: int) -> dict[str, Any]:
    """Return one node's configuration for a file tier and a pool of so many bytes.

    Directory and host names are placeholders for the user to replace.
    """
    tiers: dict[str, Any] = {}
    if disk:
        # A round number in the largest unit, the way disks are sold.
        units = {"TB": 10**12, "TiB": 1 << 40, "GB": 10**9, "GiB": 1 << 30}
        capacity = next((f"{disk // size}{unit}" for unit, size in units.items() if disk % size == 0), disk)
        tiers["nvme"] = {"type": "file", "path": "/mnt/nvme0/hicache", "capacity": capacity}
    if pool:
        # A few nodes are enough to discover the whole cluster.
        cluster = [f"redis://pool-{number}:6379" for number in range(3)]
        url = cluster if pool_nodes(pool) > 1 else "redis://pool:6379"
        tiers["pool"] = {"type": "redis", "url": url, "required": False}
    return ExtraConfig.around({"tiers": tiers})

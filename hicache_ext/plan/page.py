"""A plan as one page of text, and the configuration that follows from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hicache_ext.config import rounded_size

_BAR = 40
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def page_of(plan: Mapping[str, Any], launch: Sequence[str], yaml: str) -> Iterator[str]:
    """Lines of at most 120 columns, but for names of the user's."""
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
        f"a page of {model['page_size']} tokens is {rounded_size(model['page_bytes'])} on {where}"
    )
    for remark in (*trace["remarks"], *model["remarks"]):
        yield f"  note: {remark}"
    yield ""
    yield "Found in one cache, by its size"
    largest = max([point["hit_share"] for point in plan["curve"]] + [0.01])
    for point in plan["curve"]:
        yield f"  {rounded_size(point['bytes']):>9} {_bar(point['hit_share'] / largest)} {point['hit_share']:6.1%}"
    yield ""
    yield (
        f"The fleet: {fleet['nodes']} nodes, {_size(fleet['disk_bytes'])} of disk each, "
        f"a pool of {_size(fleet['pool_bytes'])}, router by {fleet['router']}. Prompt tokens come from"
    )
    whole = sum(fleet["tokens"].values()) or 1
    for name, tokens in fleet["tokens"].items():
        yield f"  {name:>9} {_bar(tokens / whole)} {tokens / whole:6.1%}"
    yield ""
    yield from _wear(plan["writes"], fleet)
    yield from _load(plan["pool_network"], fleet)
    yield from _saved(plan["prefill"])
    yield from _prices(plan["money"])
    yield ""
    yield "The configuration (hicache.yaml), and how SGLang is launched with it"
    yield from (f"  {line}" for line in yaml.rstrip().splitlines())
    yield "  " + " \\\n    ".join(launch)


def _bar(share: float) -> str:
    eighths = round(max(0.0, min(1.0, share)) * _BAR * 8)
    return ("█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()).ljust(_BAR)


def _size(size: int) -> str:
    return rounded_size(size) if size else "nothing"


def _wear(writes: Mapping[str, Any], fleet: Mapping[str, Any]) -> Iterator[str]:
    if not fleet["disk_bytes"]:
        return
    per_day, worst = writes["disk_bytes_per_day"], writes["disk_bytes_per_day_worst_node"]
    yield (f"Written to the disks of a node: {per_day / 1e12:.2f} TB a day, {worst / 1e12:.2f} TB where it is most:")
    times = f"  {writes['disk_writes_per_day']:.2f} times the disk a day"
    if writes["allowed_bytes_per_day"]:
        life = writes["years_until_worn_out"]
        told = "never" if life is None else f"{life:.1f} years" if life < 100 else "more than 100 years"
        times += f"; {writes['allowed_bytes_per_day'] / 1e12:.2f} TB a day are allowed: worn out after {told}"
    yield times


def _load(network: Mapping[str, float], fleet: Mapping[str, Any]) -> Iterator[str]:
    if not fleet["pool_bytes"]:
        return
    read, written = network["read_bytes_per_second"], network["written_bytes_per_second"]
    peak = network["read_bytes_per_second_peak_minute"] + network["written_bytes_per_second_peak_minute"]
    yield f"Network of the pool, mean: {read * 8 / 1e9:.2f} Gbit/s read and {written * 8 / 1e9:.2f} Gbit/s written,"
    yield f"  up to {peak * 8 / 1e9:.2f} Gbit/s in the busiest minutes, all nodes together"


def _saved(prefill: Mapping[str, Any] | None) -> Iterator[str]:
    if prefill is None:
        yield "Time saved: not known without a prefill rate (--prefill-rate TOKENS_PER_SECOND, or --gpu)"
        return
    saved, reading = prefill["saved_seconds_per_hour"], prefill["reading_seconds_per_hour"]
    yield f"Prefill: {prefill['tokens_per_second']:,.0f} tokens/s on a node ({prefill['source']})"
    less = f", less {reading:,.0f} s of reading" if reading else ""
    computed = prefill["computed_seconds_per_hour"]
    yield f"  {saved:,.0f} s of prefill saved in an hour{less}; {computed:,.0f} s are computed"
    yield f"  reading pays above {prefill['break_even_bytes_per_second'] / 1e9:.2f} GB/s"


def _prices(money: Mapping[str, float] | None) -> Iterator[str]:
    if money is None:
        return
    yield f"A year: disks {money['disks_per_year']:,.0f}, pool {money['pool_per_year']:,.0f},"
    yield f"  GPU time saved {money['saved_per_year']:,.0f}: {money['net_per_year']:+,.0f}"


def configuration(disk: str | None, pool: bool) -> dict[str, Any]:
    """The document of one node. ``disk``: the capacity of its file tier, as the user wrote it.

    Names of directories and hosts are the user's to replace.
    """
    tiers: dict[str, Any] = {}
    if disk is not None:
        capacity = int(disk) if disk.isdecimal() else disk
        tiers["nvme"] = {"type": "file", "path": "/mnt/nvme0/hicache", "capacity": capacity}
    if pool:
        tiers["pool"] = {"type": "redis", "url": "redis://pool:6379", "required": False}
    return {
        "backend_name": "hicache_ext",
        "module_path": "hicache_ext.storage.backend",
        "class_name": "HiCacheExtBackend",
        "interface_v1": 1,
        "hicache_ext": {"tiers": tiers},
    }

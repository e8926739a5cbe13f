"""``hicache-ext ls`` and ``stat``: what a directory of the file tier holds, and how full it is.

They may be used while servers run. They print models, dtypes, ages and bytes, not files and slots.
"""

from __future__ import annotations

import argparse
import shutil
import time
from contextlib import closing
from typing import Any

from hicache_ext.cli.directories import Group, Trouble, groups_in, groups_of, opened
from hicache_ext.cli.inputs import Target, add_target, directories_of, targets
from hicache_ext.cli.terminal import fitted, rough_span
from hicache_ext.cli.usage import describe, show
from hicache_ext.config import format_duration, rounded_size
from hicache_ext.page.transforms.forms import STORED_AS
from hicache_ext.storage.tiers.file.path_store import recorded_ttl
from hicache_ext.storage.tiers.file.pins import read_pins

_AMOUNTS = ("pages", "bytes", "hits", "last written", "last used")
_NOT_READ = "the directory cannot be read"


def configure_ls(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    describe(
        parser,
        run=_ls,
        examples=["hicache-ext ls hicache.yaml", "hicache-ext ls /mnt/nvme0/hicache"],
        problem=_NOT_READ,
    )


def configure_stat(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    describe(
        parser,
        run=_stat,
        examples=["hicache-ext stat hicache.yaml", "hicache-ext stat /mnt/nvme0/hicache --json"],
        problem=_NOT_READ,
    )


def _ls(arguments: argparse.Namespace) -> int:
    trouble = Trouble()
    found = groups_of(directories_of(arguments.target), trouble)
    code = trouble.told()
    groups = sorted(found, key=lambda group: (group.model, -group.size))
    stored_as = any(STORED_AS in (group.document or {}) for group in groups)
    facts = ("identity", "model", "revision", "pool", "dtype", "layout", "page", "shard")
    rows: list[tuple[str, ...]] = [(*facts, *(["stored as"] if stored_as else []), *_AMOUNTS)]
    for group in groups:
        document = group.document or {}
        model, pool = document.get("model", {}), document.get("pool", {})
        rows.append(
            (
                group.digest.hex()[:12],
                group.model,
                str(model.get("revision", "")) or "-",
                str(pool.get("name", "?")),
                str(pool.get("dtype", "?")),
                str(pool.get("layout", "?")),
                str(pool.get("page_size", "?")),
                _shard(document.get("shard", {})),
                *([_stored_as(document.get(STORED_AS))] if stored_as else []),
                str(group.pages),
                rounded_size(group.size),
                "-" if group.hits is None else str(group.hits),
                _age(group.written),
                _age(group.used),
            )
        )
    show(arguments, [group.document_for_json() for group in groups], fitted(rows))
    return code


def _stat(arguments: argparse.Namespace) -> int:
    trouble = Trouble()
    tiers = [found for target in targets(arguments.target) if (found := _stat_of(target, trouble))]
    code = trouble.told()
    show(arguments, tiers, ["\n\n".join("\n".join(_stat_lines(tier)) for tier in tiers)])
    return code


def _stat_of(target: Target, trouble: Trouble) -> dict[str, Any] | None:
    """How full the directories of one tier are, together; a capacity is known from a configuration alone. None where no
    directory can be read."""
    groups: list[Group] = []
    occupied = pinned = pins = free = total = 0
    without_space: list[int] = []
    devices: set[int] = set()
    layout = None
    for path in target.directories:
        with trouble.noted(), closing(opened(path)) as inspector:
            groups += groups_in(inspector)
            occupied += inspector.occupied()
            layout = inspector.layout
            without_space += [inspector.no_space_since] if inspector.no_space_since else []
            found = read_pins(path)
            pinned += sum(inspector.occupied_by(list(dict.fromkeys(page for pin in found for page in pin.hashes))))
            pins = max(pins, len(found))
            if (device := path.stat().st_dev) not in devices:
                devices.add(device)
                disk = shutil.disk_usage(path)
                total, free = total + disk.total, free + disk.free
    if layout is None:
        return None
    return {
        **({} if target.tier is None else {"tier": target.tier}),
        "directories": [str(path) for path in target.directories],
        "layout": layout,
        "ttl_seconds": recorded_ttl(target.directories[0]),
        "models": len({group.model for group in groups}),
        "identities": len({group.digest for group in groups}),
        "pages": sum(group.pages for group in groups),
        "bytes": sum(group.size for group in groups),
        "bytes_on_disk": occupied,
        "capacity_bytes": target.capacity,
        "pinned_bytes": pinned,
        "pins": pins,
        "disk_bytes": total,
        "disk_free_bytes": free,
        "no_space_since": min(without_space, default=None),
    }


def _stat_lines(tier: dict[str, Any]) -> list[str]:
    ttl, capacity, since = tier["ttl_seconds"], tier["capacity_bytes"], tier["no_space_since"]
    share = f" of {rounded_size(capacity)}, {100 * tier['bytes_on_disk'] / capacity:.0f} %" if capacity else ""
    return [
        *([f"tier        {tier['tier']}: {', '.join(tier['directories'])}"] if "tier" in tier else []),
        f"layout      {tier['layout']}",
        f"ttl         {'none recorded' if ttl is None else format_duration(ttl)}",
        f"models      {tier['models']}",
        f"identities  {tier['identities']}",
        f"pages       {tier['pages']}",
        f"bytes       {rounded_size(tier['bytes'])}",
        f"on disk     {rounded_size(tier['bytes_on_disk'])}{share}",
        f"pinned      {rounded_size(tier['pinned_bytes'])}, {tier['pins']} pins",
        f"disk        {rounded_size(tier['disk_bytes'])}, {rounded_size(tier['disk_free_bytes'])} free",
        *([f"no space    since {_age(since)}: the disk is full before the tier is"] if since else []),
    ]


def _shard(shard: dict[str, Any]) -> str:
    places = [(axis, place) for axis, place in shard.items() if isinstance(place, list) and len(place) == 2]
    parts = [f"{axis} {rank}/{size}" for axis, (rank, size) in places if size != 1]
    return ", ".join(parts) or "whole"


def _stored_as(facts: object) -> str:
    """What the pages went through, and with which key."""
    if not isinstance(facts, dict):
        return "-"
    return ", ".join(str(facts[name]) for name in ("seal", "key", "codec", "room") if facts.get(name)) or "-"


def _age(moment: float | None) -> str:
    return "-" if moment is None else f"{rough_span(time.time() - moment)} ago"

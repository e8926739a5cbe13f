"""``hicache-ext ls``, ``stat``, ``verify``, ``gc``, ``clear``: tools over a directory of the file tier.

They may be used while servers run. They print models, dtypes, ages and bytes, not files and slots.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hicache_ext.cli.inputs import Target, add_json_argument, add_target, targets
from hicache_ext.cli.terminal import Progress, print_json, print_table, rough_span
from hicache_ext.config import format_duration, rounded_size
from hicache_ext.errors import ConfigError
from hicache_ext.storage.tiers.file.expiry import recorded_ttl
from hicache_ext.storage.tiers.file.inspection import (
    Inspector,
    StoredPage,
    open_editor,
    open_inspector,
    reason_it_is_bad,
)
from hicache_ext.storage.tiers.file.pages.tree import load_document
from hicache_ext.storage.tiers.file.pins import pins_that_are_over, read_pins, remove_pin

_REMOVE_BATCH = 256
_LEAST_DIGITS = 8
_DIGITS = re.compile(rf"[0-9a-f]{{{_LEAST_DIGITS},32}}")
_GONE = "gone"
_AMOUNTS = ("pages", "bytes", "hits", "last written", "last used")


@dataclass(slots=True)
class _Group:
    """The pages of one identity."""

    digest: bytes
    document: dict[str, Any] | None
    pages: int = 0
    size: int = 0
    hits: int | None = None
    written: float | None = None
    """When the newest page was written."""
    used: float | None = None

    @property
    def model(self) -> str:
        return str((self.document or {}).get("model", {}).get("id", "")) or "unknown"

    def document_of(self) -> dict[str, Any]:
        """For ``--json``; moments in seconds since 1970."""
        return {
            "identity": self.digest.hex(),
            "facts": self.document,
            "pages": self.pages,
            "bytes": self.size,
            "hits": self.hits,
            "last_written": self.written,
            "last_used": self.used,
        }


def configure_ls(parser: argparse.ArgumentParser) -> None:
    _add_path(parser)
    add_json_argument(parser)
    parser.set_defaults(run=_ls)


def configure_stat(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    add_json_argument(parser)
    parser.set_defaults(run=_stat)


def configure_verify(parser: argparse.ArgumentParser) -> None:
    _add_path(parser)
    parser.add_argument("--remove", action="store_true", help="remove the pages that are bad")
    parser.set_defaults(run=_verify)


def configure_gc(parser: argparse.ArgumentParser) -> None:
    _add_path(parser)
    parser.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    parser.set_defaults(run=_gc)


def configure_clear(parser: argparse.ArgumentParser) -> None:
    _add_path(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", help="remove the pages of this model (its name as `hicache-ext ls` prints it)")
    what.add_argument(
        "--identity", help=f"remove the pages of this identity ({_LEAST_DIGITS} of its digits or more, see `ls`)"
    )
    what.add_argument("--all", action="store_true", help="remove all pages of this package")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    parser.add_argument("--yes", action="store_true", help="do not ask; without a terminal nothing is asked")
    parser.set_defaults(run=_clear)


def _add_path(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, metavar="PATH", help="a directory of a file tier")


def _ls(arguments: argparse.Namespace) -> int:
    with closing(_opened(arguments.path)) as inspector:
        groups = sorted(_groups(inspector), key=lambda group: (group.model, -group.size))
    if arguments.json:
        print_json([group.document_of() for group in groups])
        return 0
    rows = [("identity", "model", "revision", "pool", "dtype", "layout", "page", "shard", *_AMOUNTS)]
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
                str(group.pages),
                rounded_size(group.size),
                "-" if group.hits is None else str(group.hits),
                _age(group.written),
                _age(group.used),
            )
        )
    print_table(rows)
    return 0


def _stat(arguments: argparse.Namespace) -> int:
    tiers = [_stat_of(target) for target in targets(arguments.target)]
    if arguments.json:
        print_json(tiers)
    else:
        print("\n\n".join("\n".join(_stat_lines(tier)) for tier in tiers))
    return 0


def _stat_of(target: Target) -> dict[str, Any]:
    """How full the directories of one tier are, together; a capacity is known from a configuration alone."""
    groups: list[_Group] = []
    occupied = pinned = pins = free = total = 0
    devices: set[int] = set()
    for path in target.directories:
        with closing(_opened(path)) as inspector:
            groups += _groups(inspector)
            occupied += inspector.occupied()
            layout = inspector.layout
            found = read_pins(path)
            pinned += sum(inspector.occupied_by(list(dict.fromkeys(page for pin in found for page in pin.hashes))))
        pins = max(pins, len(found))
        if (device := path.stat().st_dev) not in devices:
            devices.add(device)
            disk = shutil.disk_usage(path)
            total, free = total + disk.total, free + disk.free
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
    }


def _stat_lines(tier: dict[str, Any]) -> list[str]:
    ttl, capacity = tier["ttl_seconds"], tier["capacity_bytes"]
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
    ]


def _verify(arguments: argparse.Namespace) -> int:
    good = gone = unread = 0
    reasons: Counter[str] = Counter()
    bad: list[bytes] = []
    removed = 0
    with closing(_opened(arguments.path)) as inspector:
        pages = list(inspector.pages())
        bar = Progress("pages read")
        for number, page in enumerate(pages, start=1):
            bar.show(number, len(pages))
            try:
                reason = _look_at(inspector, page)
            except OSError as error:
                unread += 1
                print(f"not looked at ({error.strerror}): page {page.key[16:].hex()}", file=sys.stderr)
                continue
            if reason == _GONE:
                gone += 1
            elif not reason:
                good += 1
            else:
                reasons[reason] += 1
                bad.append(page.key)
                document = load_document(arguments.path, page.identity) or {}
                print(f"bad ({reason}): page {page.key[16:].hex()} of {document.get('model', {}).get('id', 'unknown')}")
        bar.end()
    if arguments.remove and bad:
        with closing(open_editor(arguments.path)) as editor:
            for first in range(0, len(bad), _REMOVE_BATCH):
                removed += editor.remove(bad[first : first + _REMOVE_BATCH])
    print(f"{good} good, {len(bad)} bad, {gone} evicted meanwhile" + (f", {unread} not looked at" if unread else ""))
    for reason, count in reasons.most_common():
        print(f"  {count} x {reason}")
    if arguments.remove:
        print(f"{removed} removed")
    return 1 if unread or len(bad) > removed else 0


def _look_at(inspector: Inspector, page: StoredPage) -> str:
    """Why a page is bad, ``_GONE``, or nothing. Raises OSError where that is not known."""
    reason = ""
    # Twice: a server may have written there during the first read.
    for _ in range(2):
        stored = inspector.read(page)
        if stored is None:
            return _GONE
        reason = reason_it_is_bad(page.key, stored) or ""
        if not reason:
            break
    return reason


def _gc(arguments: argparse.Namespace) -> int:
    with closing(_opened(arguments.path)) as inspector:
        before = inspector.occupied()
        left_over = inspector.left_overs()
    over = pins_that_are_over(arguments.path)
    if arguments.dry_run:
        print(f"{left_over} left-overs of killed processes would be removed")
        if over:
            print(f"{len(over)} pins whose time is up would be removed")
        return 0
    with closing(open_editor(arguments.path)) as editor:
        # Opening the directory has removed some already.
        cleaned = max(left_over, editor.clean_up())
    pins = sum(remove_pin(arguments.path, name) for name in over)
    with closing(open_inspector(arguments.path)) as inspector:
        after = inspector.occupied()
    print(f"{cleaned} left-overs of killed processes removed, {rounded_size(max(0, before - after))} freed")
    if pins:
        print(f"{pins} pins removed whose time was up")
    return 0


def _clear(arguments: argparse.Namespace) -> int:
    with closing(_opened(arguments.path)) as inspector:
        groups = _groups(inspector)
    chosen = _chosen(groups, arguments)
    if not chosen and not arguments.all:
        if arguments.identity is not None:
            known = ", ".join(sorted(group.digest.hex() for group in groups)) or "none"
            print(f"no pages of the identity {arguments.identity!r}; identities here: {known}", file=sys.stderr)
        else:
            known = ", ".join(sorted({group.model for group in groups})) or "none"
            print(f"no pages of {arguments.model!r}; models here: {known}", file=sys.stderr)
        return 1
    what = f"{sum(group.pages for group in chosen)} pages, {rounded_size(sum(group.size for group in chosen))}"
    if arguments.dry_run:
        for group in chosen:
            print(f"{group.digest.hex()} of {group.model}: {group.pages} pages, {rounded_size(group.size)}")
        print(f"{what} would be removed")
        return 0
    if not arguments.yes and not _agrees(f"Remove {what} of {_models(chosen)} from {arguments.path}?"):
        print("nothing was removed", file=sys.stderr)
        return 1
    with closing(open_editor(arguments.path)) as editor:
        editor.clear([group.digest for group in chosen])
    print(f"{what} removed")
    return 0


def _chosen(groups: list[_Group], arguments: argparse.Namespace) -> list[_Group]:
    """What ``clear`` is to remove. Raises ConfigError if that is ambiguous."""
    if arguments.all:
        return groups
    if arguments.model is not None:
        return [group for group in groups if group.model == arguments.model]
    digits = arguments.identity.lower()
    if not _DIGITS.fullmatch(digits):
        problem = f"{arguments.identity!r} does not name an identity"
        raise ConfigError("--identity", problem, f"{_LEAST_DIGITS} to 32 of its hex digits, as `ls` prints them")
    chosen = [group for group in groups if group.digest.hex().startswith(digits)]
    if len(chosen) > 1:
        candidates = ", ".join(f"{group.digest.hex()} ({group.model}, {group.pages} pages)" for group in chosen)
        raise ConfigError("--identity", f"{arguments.identity!r} fits several identities: {candidates}", "one of them")
    return chosen


def _models(groups: list[_Group]) -> str:
    return ", ".join(sorted({group.model for group in groups})) or "no model"


def _agrees(question: str) -> bool:
    """Ask at a terminal; a script, which has nobody to ask, agrees."""
    if not sys.stdin.isatty():
        return True
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _opened(path: Path) -> Inspector:
    """An inspector of the directory; prints a warning if it cannot see everything. Raises StoreError."""
    inspector = open_inspector(path)
    if inspector.remark:
        print(f"{path}: {inspector.remark}", file=sys.stderr)
    return inspector


def _groups(inspector: Inspector) -> list[_Group]:
    groups: dict[bytes, _Group] = {}
    for page in inspector.pages():
        group = groups.get(page.identity)
        if group is None:
            group = groups[page.identity] = _Group(page.identity, load_document(inspector.path, page.identity))
        group.pages += 1
        group.size += page.size
        group.written = max(filter(None, (page.written, group.written)), default=None)
        group.used = max(filter(None, (page.used, group.used)), default=None)
    for group in groups.values():
        uses = inspector.uses(group.digest)
        if uses is not None:
            group.hits, group.used = uses
    return list(groups.values())


def _shard(shard: dict[str, Any]) -> str:
    places = [(axis, place) for axis, place in shard.items() if isinstance(place, list) and len(place) == 2]
    parts = [f"{axis} {rank}/{size}" for axis, (rank, size) in places if size != 1]
    return ", ".join(parts) or "whole"


def _age(moment: float | None) -> str:
    return "-" if moment is None else f"{rough_span(time.time() - moment)} ago"

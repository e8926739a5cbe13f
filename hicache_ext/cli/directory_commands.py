"""``hicache-ext ls``, ``stat``, ``verify``, ``gc``, ``clear``: directories of the file tier. Servers may be using them.

They print models, dtypes, ages and bytes, not files and slots.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hicache_ext.cli.inputs import TARGET, Target, targets
from hicache_ext.cli.output import argument, command, fitted, one_of, progress, rough_span, show
from hicache_ext.config import format_duration, rounded_size
from hicache_ext.errors import ConfigError, FormatError, StoreError
from hicache_ext.page import envelope
from hicache_ext.page.envelope import IDENTITY_LENGTH
from hicache_ext.page.transforms import header as headers
from hicache_ext.page.transforms.body import is_sealed_with, reason_it_is_not_sealed
from hicache_ext.page.transforms.forms import STORED_AS, Form, Transforms
from hicache_ext.page.transforms.sealing import SealMode
from hicache_ext.runtime.shown import shown_text
from hicache_ext.storage.serving.prompts import documents_in
from hicache_ext.storage.tiers.file.inspection import open_editor, open_inspector
from hicache_ext.storage.tiers.file.inspector import Inspector, StoredPage, reason_it_is_bad
from hicache_ext.storage.tiers.file.layouts import IDENTITY_NAME
from hicache_ext.storage.tiers.file.pages.tree import load_document
from hicache_ext.storage.tiers.file.path_store import PathStore
from hicache_ext.storage.tiers.file.pins import pins_that_are_over, read_pins, remove_pin
from hicache_ext.storage.tiers.file.usage import occupied_bytes

# -- what a directory holds --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Group:
    """The pages of one identity, as ``ls --json`` has them."""

    identity: str
    """Its digest."""
    facts: dict[str, Any] | None = None
    """Its document."""
    pages: int = 0
    bytes: int = 0
    hits: int | None = None
    last_written: float | None = None
    """The time of the newest page's write, in seconds since 1970."""
    last_used: float | None = None

    @property
    def model(self) -> str:
        return str((self.facts or {}).get("model", {}).get("id", "")) or "unknown"


def opened(path: Path) -> Inspector:
    """An inspector of the directory; prints a warning if it cannot see everything. Raises StoreError."""
    inspector = open_inspector(path)
    if inspector.remark:
        print(f"{path}: {inspector.remark}", file=sys.stderr)
    return inspector


def of_each(chosen: Sequence[Target], do: Callable[[Path, Target], None]) -> int:
    """Do it to every directory, and return the exit code: one that cannot be read does not keep a command from the
    others. Raises the first StoreError where none can be read."""
    errors: list[StoreError] = []
    directories = [(directory, target) for target in chosen for directory in target.directories]
    for directory, target in directories:
        try:
            do(directory, target)
        except StoreError as error:
            errors.append(error)
    if errors and len(errors) == len(directories):
        raise errors[0]
    for left_out in errors:
        print(f"left out: {left_out}", file=sys.stderr)
    return 1 if errors else 0


def add_pages(inspector: Inspector, groups: dict[bytes, Group]) -> None:
    """Add the pages of one directory to the groups of their identities."""
    found = set()
    for page in inspector.pages():
        found.add(page.identity)
        group = groups.setdefault(page.identity, Group(page.identity.hex()))
        group.pages += 1
        group.bytes += page.size
        group.last_written = _later(page.written, group.last_written)
        group.last_used = _later(page.used, group.last_used)
    for digest in found:
        group = groups[digest]
        group.facts = group.facts or load_document(inspector.path, digest)
        if (uses := inspector.uses(digest)) is not None:
            group.hits = (group.hits or 0) + uses[0]
            group.last_used = _later(uses[1], group.last_used)


def _later(one: float | None, other: float | None) -> float | None:
    return max((moment for moment in (one, other) if moment), default=None)


# -- ls, stat ----------------------------------------------------------------------------------------------------------

_AMOUNTS = ("pages", "bytes", "hits", "last written", "last used")
_NOT_READ = "the directory cannot be read"


@command(TARGET, examples=("hicache.yaml", "/mnt/nvme0/hicache"), problem=_NOT_READ)
def ls_command(arguments: argparse.Namespace) -> int:
    found: dict[bytes, Group] = {}
    code = of_each(targets(arguments.target), lambda directory, _: add_pages(opened(directory), found))
    groups = sorted(found.values(), key=lambda group: (group.model, -group.bytes))
    stored_as = any(STORED_AS in (group.facts or {}) for group in groups)
    facts = ("identity", "model", "revision", "pool", "dtype", "layout", "page", "shard")
    rows: list[tuple[str, ...]] = [(*facts, *(["stored as"] if stored_as else []), *_AMOUNTS)]
    for group in groups:
        document = group.facts or {}
        model, pool = document.get("model", {}), document.get("pool", {})
        rows.append(
            (
                group.identity[:12],
                shown_text(group.model),
                shown_text(model.get("revision", "")) or "-",
                *(shown_text(pool.get(fact, "?")) for fact in ("name", "dtype", "layout", "page_size")),
                shown_text(_shard(document.get("shard", {}))),
                *([shown_text(_stored_as(document.get(STORED_AS)))] if stored_as else []),
                str(group.pages),
                rounded_size(group.bytes),
                "-" if group.hits is None else str(group.hits),
                _age(group.last_written),
                _age(group.last_used),
            )
        )
    show(arguments, [asdict(group) for group in groups], fitted(rows))
    return code


@command(TARGET, examples=("hicache.yaml", "/mnt/nvme0/hicache --json"), problem=_NOT_READ)
def stat_command(arguments: argparse.Namespace) -> int:
    chosen = targets(arguments.target)
    groups: dict[str | None, dict[bytes, Group]] = {target.tier: {} for target in chosen}
    looks: dict[str | None, list[dict[str, Any]]] = {target.tier: [] for target in chosen}

    def look(path: Path, target: Target) -> None:
        inspector = opened(path)
        add_pages(inspector, groups[target.tier])
        pins, device = read_pins(path), path.stat().st_dev
        pinned = list(dict.fromkeys(page for pin in pins for page in pin.hashes))
        looks[target.tier].append(
            {
                "layout": inspector.layout,
                "occupied": occupied_bytes(path),
                "tenants": inspector.tenant_pages(target.tenants) if target.tenants else {},
                "no_space_since": inspector.no_space_since,
                "pinned": sum(inspector.occupied_by(pinned)),
                "pins": len(pins),
                "disk": (device, shutil.disk_usage(path)),
            }
        )

    code = of_each(chosen, look)
    tiers = [_together(one, looks[one.tier], list(groups[one.tier].values())) for one in chosen if looks[one.tier]]
    show(arguments, tiers, ["\n\n".join("\n".join(_stat_lines(tier)) for tier in tiers)])
    return code


def _together(target: Target, looks: Sequence[Mapping[str, Any]], groups: Sequence[Group]) -> dict[str, Any]:
    """Usage of one tier's directories together; only a configuration tells capacity and ttl."""
    disks = dict(look["disk"] for look in looks).values()
    tenants = Counter[str]()
    for look in looks:
        tenants.update(look["tenants"])
    return {
        **({} if target.tier is None else {"tier": target.tier}),
        "directories": [str(path) for path in target.directories],
        "layout": looks[-1]["layout"],
        "ttl_seconds": target.ttl,
        "models": len({group.model for group in groups}),
        "identities": len(groups),
        "pages": sum(group.pages for group in groups),
        "bytes": sum(group.bytes for group in groups),
        "bytes_on_disk": sum(look["occupied"] for look in looks),
        "capacity_bytes": target.capacity,
        "pinned_bytes": sum(look["pinned"] for look in looks),
        "pins": max(look["pins"] for look in looks),
        "disk_bytes": sum(disk.total for disk in disks),
        "disk_free_bytes": sum(disk.free for disk in disks),
        "no_space_since": min((look["no_space_since"] for look in looks if look["no_space_since"]), default=None),
        "tenants": dict(tenants),
    }


def _stat_lines(tier: dict[str, Any]) -> list[str]:
    ttl, capacity, since = tier["ttl_seconds"], tier["capacity_bytes"], tier["no_space_since"]
    share = f" of {rounded_size(capacity)}, {100 * tier['bytes_on_disk'] / capacity:.0f} %" if capacity else ""
    return [
        *([f"tier        {tier['tier']}: {', '.join(tier['directories'])}"] if "tier" in tier else []),
        f"layout      {tier['layout']}",
        *([f"ttl         {format_duration(ttl)}"] if ttl else []),
        f"models      {tier['models']}",
        f"identities  {tier['identities']}",
        f"pages       {tier['pages']}",
        f"bytes       {rounded_size(tier['bytes'])}",
        f"on disk     {rounded_size(tier['bytes_on_disk'])}{share}",
        f"pinned      {rounded_size(tier['pinned_bytes'])}, {tier['pins']} pins",
        f"disk        {rounded_size(tier['disk_bytes'])}, {rounded_size(tier['disk_free_bytes'])} free",
        *(f"tenant      {name}: {pages} pages" for name, pages in tier["tenants"].items()),
        *([f"no space    since {_age(since)}: the disk is full before the tier is"] if since else []),
    ]


def _shard(shard: dict[str, Any]) -> str:
    places = [(axis, place) for axis, place in shard.items() if isinstance(place, list) and len(place) == 2]
    parts = [f"{axis} {rank}/{size}" for axis, (rank, size) in places if size != 1]
    return ", ".join(parts) or "whole"


def _stored_as(facts: object) -> str:
    """The transforms of the pages, and the key's id."""
    if not isinstance(facts, dict):
        return "-"
    return ", ".join(str(facts[name]) for name in ("seal", "key", "codec", "room") if facts.get(name)) or "-"


def _age(moment: float | None) -> str:
    return "-" if moment is None else f"{rough_span(time.time() - moment)} ago"


# -- seals of stored pages ---------------------------------------------------------------------------------------------


_OTHER_KINDS = {
    "seals_not_checked": "of the good ones are sealed: whole, but their keys are not given",
    "unsealed": "are whole and have no seal: this tier does not serve them",
    "sealed_otherwise": "are whole and sealed with another key or in another mode: this tier does not serve them",
}
"""What ``verify`` calls a page that is neither bad nor fully verified."""


class StoredSeals:
    """Those in one directory. ``transforms``: of the tier that it belongs to; None without one, or without any."""

    def __init__(self, directory: Path, transforms: Transforms | None) -> None:
        self._directory = directory
        self._seal = None if transforms is None else transforms.seal
        self._forms: dict[bytes, Form] = {}
        if transforms is not None and transforms.seal is not None:
            # Those of which the directory may have pages in any form: of a stored form, and what it is a form of.
            found: dict[bytes, dict[str, Any]] = {}
            for digest, document in documents_in(directory):
                stored_as = document.get(STORED_AS)
                of = stored_as.get("of") if isinstance(stored_as, dict) else None
                if isinstance(of, str) and IDENTITY_NAME.fullmatch(of):
                    found.setdefault(bytes.fromhex(of), document)
                found[digest] = document
            for identity, document in found.items():
                self._forms |= {form.identity: form for form in transforms.forms(identity, document).all}

    def kind(self, key: bytes, payload: memoryview) -> str:
        """Return how the page ``key``, whose checksum fits, is counted. Raises FormatError for a bad page."""
        identity = key[:IDENTITY_LENGTH]
        if self._seal is None:
            document = load_document(self._directory, identity) or {}
            return _by_its_document(document.get(STORED_AS), payload)
        if (form := self._forms.get(identity)) is not None:
            if reason := reason_it_is_not_sealed(payload, key, form):
                raise FormatError(reason)
            return "good"
        # A name that no known identity has: of another key, mode or codec; or its document is lost.
        if any(is_sealed_with(payload, key, of_tier, self._seal.mode) for of_tier in self._seal.keys):
            return "good"
        try:
            return "sealed_otherwise" if headers.decode(payload).seal else "unsealed"
        except FormatError:
            return "unsealed"


def _by_its_document(stored_as: object, payload: memoryview) -> str:
    """Return how a page is counted without keys, according to its identity's document."""
    if not isinstance(stored_as, dict):
        return "good"
    header = headers.decode(payload)
    if not header.seal:
        if stored_as.get("seal") is not None:
            raise FormatError("unsealed")
        return "good"
    mode = SealMode(header.seal).name.lower() if header.seal in tuple(SealMode) else ""
    if stored_as.get("seal") != mode:
        raise FormatError("seal_form")
    if stored_as.get("key") != header.key_id.decode("ascii", "replace"):
        raise FormatError("seal_key")
    return "seals_not_checked"


# -- verify ------------------------------------------------------------------------------------------------------------

_REMOVE_BATCH = 256


_Bad = tuple[str, bytes | None]
"""The reason, and which copy of the page it is (``envelope.page_seal``), where it is whole but for its seal."""


@command(
    TARGET,
    argument("--remove", action="store_true", help="remove the pages that are bad"),
    examples=("/mnt/nvme0/hicache", "/mnt/nvme0/hicache --remove --json"),
    problem="bad pages are there, or pages could not be looked at",
)
def verify_command(arguments: argparse.Namespace) -> int:
    counts = dict.fromkeys(("good", "evicted", "not_looked_at", "removed"), 0)
    counts |= dict.fromkeys(_OTHER_KINDS, 0)
    bad_pages: list[dict[str, str | None]] = []

    def verify(directory: Path, target: Target) -> None:
        bad = _verify_directory(directory, counts, bad_pages, target.transforms)
        if arguments.remove and bad:
            with closing(open_editor(directory)) as editor:
                counts["removed"] += _remove(editor, bad)

    code = of_each(targets(arguments.target, keys=True), verify)
    told = f"{counts['good']} good, {len(bad_pages)} bad, {counts['evicted']} evicted meanwhile"
    lines = [
        told + (f", {counts['not_looked_at']} not looked at" if counts["not_looked_at"] else ""),
        *(f"{counts[key]} {what}" for key, what in _OTHER_KINDS.items() if counts[key]),
        *(f"  {count} x {why}" for why, count in Counter(page["reason"] for page in bad_pages).most_common()),
        *([f"{counts['removed']} removed"] if arguments.remove else []),
    ]
    show(arguments, {**counts, "bad_pages": bad_pages, "bad": len(bad_pages)}, lines)
    return 1 if counts["not_looked_at"] or len(bad_pages) > counts["removed"] else code


def _verify_directory(
    directory: Path, counts: dict[str, int], bad_pages: list[dict[str, str | None]], transforms: Transforms | None
) -> dict[bytes, bytes | None]:
    """Look at every page, and add to ``counts`` and ``bad_pages``. Return the keys of bad ones, with the copy seen."""
    bad: dict[bytes, bytes | None] = {}
    seals = StoredSeals(directory, transforms)
    inspector = opened(directory)
    with progress("pages read") as told:
        pages = list(inspector.pages())
        for number, page in enumerate(pages, start=1):
            told(number, len(pages))
            name = page.key[16:].hex()
            try:
                seen = _look_at(inspector, page, seals)
            except OSError as error:
                counts["not_looked_at"] += 1
                print(f"not looked at ({error.strerror}): page {name}", file=sys.stderr)
                continue
            if not isinstance(seen, str):
                reason, bad[page.key] = seen
                model = (load_document(directory, page.identity) or {}).get("model", {}).get("id")
                bad_pages.append({"hash": name, "identity": page.identity.hex(), "model": model, "reason": reason})
                print(f"bad ({reason}): page {name} of {shown_text(model or 'unknown')}")
                continue
            counts[seen] += 1
            counts["good"] += seen == "seals_not_checked"
    return bad


def _look_at(inspector: Inspector, page: StoredPage, seals: StoredSeals) -> str | _Bad:
    """Return as what a page is counted, or what is bad. Raises OSError where that is not known."""
    bad: _Bad | None = None
    # Twice: a server may have written there during the first read.
    for _ in range(2):
        content = inspector.read(page)
        if content is None:
            return "evicted"
        reason = reason_it_is_bad(page, content)
        if reason is not None:
            bad = reason, None
            continue
        header = envelope.decode_header(content)
        payload = memoryview(content)[header.header_length :]
        try:
            return seals.kind(page.key, payload)
        except FormatError as error:
            bad = error.reason, envelope.page_seal(page.key, payload.nbytes, [payload])
    assert bad is not None
    return bad


def _remove(editor: PathStore, bad: Mapping[bytes, bytes | None]) -> int:
    """Remove pages; return how many were there. Of an intact page only the copy that was seen is removed."""
    removed = editor.remove_copies({key: copy for key, copy in bad.items() if copy is not None})
    others = [key for key, copy in bad.items() if copy is None]
    for first in range(0, len(others), _REMOVE_BATCH):
        removed += editor.remove(others[first : first + _REMOVE_BATCH])
    return removed


# -- gc, clear ---------------------------------------------------------------------------------------------------------

_LEAST_DIGITS = 8
_DIGITS = re.compile(rf"[0-9a-f]{{{_LEAST_DIGITS},32}}")


_DRY_RUN = argument("--dry-run", action="store_true", help="only say what would be removed")


@command(TARGET, _DRY_RUN, examples=["/mnt/nvme0/hicache --dry-run"], problem="the directory cannot be read or changed")
def gc_command(arguments: argparse.Namespace) -> int:
    found = {"left_overs": 0, "pins": 0, "freed_bytes": 0}
    chosen, look_only = targets(arguments.target), arguments.dry_run
    code = of_each(chosen, lambda directory, _: _clean(directory, found, look_only=look_only))
    done = "would be removed" if arguments.dry_run else "removed"
    freed = "" if arguments.dry_run else f", {rounded_size(found['freed_bytes'])} freed"
    lines = [f"{found['left_overs']} left-overs of killed processes {done}{freed}"]
    lines += [f"{found['pins']} pins {done} whose time was up"] if found["pins"] else []
    unknown = {"freed_bytes": None} if arguments.dry_run else {}
    show(arguments, {"dry_run": arguments.dry_run, **found, **unknown}, lines)
    return code


def _clean(directory: Path, found: dict[str, int], *, look_only: bool) -> None:
    """Add to ``found`` what is left over in the directory, or was removed."""
    left_over = opened(directory).left_overs()
    before = occupied_bytes(directory)
    over = pins_that_are_over(directory)
    if look_only:
        found["left_overs"] += left_over
        found["pins"] += len(over)
        return
    with closing(open_editor(directory)) as editor:
        # Opening the directory has removed some already.
        found["left_overs"] += max(left_over, editor.clean_up())
    found["pins"] += sum(remove_pin(directory, name) for name in over)
    found["freed_bytes"] += max(0, before - occupied_bytes(directory))


@command(
    # One directory, by its name: a configuration may hold tiers that other nodes share.
    argument("path", type=Path, metavar="PATH", help="a directory of a file tier"),
    one_of(
        argument("--model", help="remove the pages of this model (its name as `hicache-ext ls` prints it)"),
        argument(
            "--identity", help=f"remove the pages of this identity ({_LEAST_DIGITS} of its digits or more, see `ls`)"
        ),
        argument("--all", action="store_true", help="remove all pages of this package"),
    ),
    _DRY_RUN,
    argument("--yes", action="store_true", help="do not ask; needed where there is no terminal to ask at"),
    examples=("/mnt/nvme0/hicache --model meta-llama/Llama-3.1-8B --dry-run", "/mnt/nvme0/hicache --all --yes"),
    problem="there is no such model or identity, or it was not agreed to",
)
def clear_command(arguments: argparse.Namespace) -> int:
    of_identities: dict[bytes, Group] = {}
    add_pages(opened(arguments.path), of_identities)
    groups = list(of_identities.values())
    chosen = _chosen(groups, arguments)
    if not chosen and not arguments.all:
        by = "model" if arguments.identity is None else "identity"
        known = ", ".join(sorted({shown_text(getattr(group, by)) for group in groups})) or "none"
        print(f"no pages of the {by} {getattr(arguments, by)!r}; there are: {known}", file=sys.stderr)
        return 1
    pages, size = sum(group.pages for group in chosen), sum(group.bytes for group in chosen)
    what = f"{pages} pages, {rounded_size(size)}"
    document: dict[str, Any] = {
        "dry_run": arguments.dry_run,
        "pages": pages,
        "bytes": size,
        "freed_bytes": None,
        "identities": [
            {name: getattr(group, name) for name in ("identity", "model", "pages", "bytes")} for group in chosen
        ],
    }
    if arguments.dry_run:
        lines = [f"{g.identity} of {shown_text(g.model)}: {g.pages} pages, {rounded_size(g.bytes)}" for g in chosen]
        show(arguments, document, [*lines, f"{what} would be removed"])
        return 0
    models = ", ".join(sorted({shown_text(group.model) for group in chosen})) or "no model"
    if not arguments.yes and not _agrees(f"Remove {what} of {models} from {arguments.path}?"):
        return 1
    before = occupied_bytes(arguments.path)
    with closing(open_editor(arguments.path)) as editor:
        # With --all also what a killed command had cleared, and not freed.
        editor.clear(None if arguments.all else [bytes.fromhex(group.identity) for group in chosen])
        layout = editor.layout
    document["freed_bytes"] = freed = max(0, before - occupied_bytes(arguments.path))
    lines = [f"{what} removed, {rounded_size(freed)} of disk freed"]
    if layout == "slab" and freed < size:
        lines += ["the rest of their room is in slabs that hold other pages, too: new pages take it"]
    show(arguments, document, lines)
    return 0


def _chosen(groups: list[Group], arguments: argparse.Namespace) -> list[Group]:
    """Return what ``clear`` is to remove. Raises ConfigError if that is ambiguous."""
    if arguments.all:
        return groups
    if arguments.model is not None:
        return [group for group in groups if arguments.model in (group.model, shown_text(group.model))]
    digits = arguments.identity.lower()
    if not _DIGITS.fullmatch(digits):
        problem = f"{arguments.identity!r} does not name an identity"
        raise ConfigError("--identity", problem, f"{_LEAST_DIGITS} to 32 of its hex digits, as `ls` prints them")
    chosen = [group for group in groups if group.identity.startswith(digits)]
    if len(chosen) > 1:
        candidates = ", ".join(f"{group.identity} ({shown_text(group.model)}, {group.pages} pages)" for group in chosen)
        raise ConfigError("--identity", f"{arguments.identity!r} fits several identities: {candidates}", "one of them")
    return chosen


def _agrees(question: str) -> bool:
    """Ask at a terminal. A script, which has nobody to ask, must have said so before."""
    if not sys.stdin.isatty():
        print("nothing was removed: there is no terminal to ask at; --yes removes without a question", file=sys.stderr)
        return False
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    agreed = sys.stdin.readline().strip().lower() in ("y", "yes")
    if not agreed:
        print("nothing was removed", file=sys.stderr)
    return agreed

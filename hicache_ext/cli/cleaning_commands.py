"""``hicache-ext verify``, ``gc``, ``clear``: what is bad, left over or not wanted in a directory of the file tier.

They may be used while servers run.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hicache_ext.cli.directories import Group, Trouble, groups_of, opened
from hicache_ext.cli.inputs import add_target, directories_of, targets
from hicache_ext.cli.terminal import Progress
from hicache_ext.cli.usage import describe, show
from hicache_ext.config import rounded_size
from hicache_ext.errors import ConfigError
from hicache_ext.page.envelope import decode_header
from hicache_ext.page.transforms.body import reason_its_seal_is_bad
from hicache_ext.page.transforms.forms import STORED_AS
from hicache_ext.page.transforms.sealing import SealKey
from hicache_ext.storage.tiers.file.inspection import (
    Inspector,
    StoredPage,
    open_editor,
    open_inspector,
    reason_it_is_bad,
)
from hicache_ext.storage.tiers.file.pages.tree import load_document
from hicache_ext.storage.tiers.file.pins import pins_that_are_over, remove_pin

_REMOVE_BATCH = 256
_LEAST_DIGITS = 8
_DIGITS = re.compile(rf"[0-9a-f]{{{_LEAST_DIGITS},32}}")
_GONE = "gone"
_NOT_CHECKED = "its key is not known"


def configure_verify(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    parser.add_argument("--remove", action="store_true", help="remove the pages that are bad")
    describe(
        parser,
        run=_verify,
        examples=["hicache-ext verify /mnt/nvme0/hicache", "hicache-ext verify /mnt/nvme0/hicache --remove --json"],
        success="no bad page is left",
        problem="bad pages are there, or pages could not be looked at",
    )


def configure_gc(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    parser.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    describe(
        parser,
        run=_gc,
        examples=["hicache-ext gc /mnt/nvme0/hicache --dry-run", "hicache-ext gc /mnt/nvme0/hicache"],
        problem="the directory cannot be read or changed",
    )


def configure_clear(parser: argparse.ArgumentParser) -> None:
    # One directory, by its name: a configuration may hold tiers that other nodes share.
    parser.add_argument("path", type=Path, metavar="PATH", help="a directory of a file tier")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", help="remove the pages of this model (its name as `hicache-ext ls` prints it)")
    what.add_argument(
        "--identity", help=f"remove the pages of this identity ({_LEAST_DIGITS} of its digits or more, see `ls`)"
    )
    what.add_argument("--all", action="store_true", help="remove all pages of this package")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    parser.add_argument("--yes", action="store_true", help="do not ask; without a terminal nothing is asked")
    describe(
        parser,
        run=_clear,
        examples=[
            "hicache-ext clear /mnt/nvme0/hicache --model meta-llama/Llama-3.1-8B --dry-run",
            "hicache-ext clear /mnt/nvme0/hicache --all --yes",
        ],
        problem="there is no such model or identity, or it was not agreed to",
    )


@dataclass(slots=True)
class _Verified:
    """What was found in the directories so far."""

    good: int = 0
    evicted: int = 0
    not_looked_at: int = 0
    removed: int = 0
    seals_not_checked: int = 0
    """Of the good ones: sealed pages whose keys are not known here."""
    bad_pages: list[dict[str, str | None]] = field(default_factory=list)


def _verify(arguments: argparse.Namespace) -> int:
    found = _Verified()
    trouble = Trouble()
    for target in targets(arguments.target, keys=True):
        seal = None if target.transforms is None else target.transforms.seal
        keys = {} if seal is None else {key.id: key for key in seal.keys}
        for directory in target.directories:
            with trouble.noted():
                bad = _verify_directory(directory, found, keys)
                if arguments.remove and bad:
                    with closing(open_editor(directory)) as editor:
                        for first in range(0, len(bad), _REMOVE_BATCH):
                            found.removed += editor.remove(bad[first : first + _REMOVE_BATCH])
    code = trouble.told()
    bad_count = len(found.bad_pages)
    told = f"{found.good} good, {bad_count} bad, {found.evicted} evicted meanwhile"
    reasons = Counter(page["reason"] for page in found.bad_pages).most_common()
    lines = [
        told + (f", {found.not_looked_at} not looked at" if found.not_looked_at else ""),
        *(
            [f"{found.seals_not_checked} of the good ones are sealed: whole, but their keys are not given"]
            if found.seals_not_checked
            else []
        ),
        *(f"  {count} x {reason}" for reason, count in reasons),
        *([f"{found.removed} removed"] if arguments.remove else []),
    ]
    show(arguments, {**asdict(found), "bad": bad_count}, lines)
    return 1 if found.not_looked_at or bad_count > found.removed else code


def _verify_directory(directory: Path, found: _Verified, keys: Mapping[str, SealKey]) -> list[bytes]:
    """Adds to ``found``; the keys of the bad pages."""
    bad = []
    sealed = functools.cache(functools.partial(_are_transformed, directory))
    with closing(opened(directory)) as inspector, Progress("pages read") as bar:
        pages = list(inspector.pages())
        for number, page in enumerate(pages, start=1):
            bar.show(number, len(pages))
            try:
                reason = _look_at(inspector, page, keys, sealed(page.identity))
            except OSError as error:
                found.not_looked_at += 1
                print(f"not looked at ({error.strerror}): page {page.key[16:].hex()}", file=sys.stderr)
                continue
            if reason == _GONE:
                found.evicted += 1
            elif reason in ("", _NOT_CHECKED):
                found.good += 1
                found.seals_not_checked += reason == _NOT_CHECKED
            else:
                bad.append(page.key)
                found.bad_pages.append(_bad_page(directory, page, reason))
                print(f"bad ({reason}): page {page.key[16:].hex()} of {found.bad_pages[-1]['model'] or 'unknown'}")
    return bad


def _bad_page(directory: Path, page: StoredPage, reason: str) -> dict[str, str | None]:
    model = (load_document(directory, page.identity) or {}).get("model", {}).get("id")
    return {"hash": page.key[16:].hex(), "identity": page.identity.hex(), "model": model, "reason": reason}


def _are_transformed(directory: Path, identity: bytes) -> bool:
    """Whether the pages of an identity are encoded or sealed."""
    return STORED_AS in (load_document(directory, identity) or {})


def _look_at(inspector: Inspector, page: StoredPage, keys: Mapping[str, SealKey], transformed: bool) -> str:
    """Why a page is bad, ``_GONE``, ``_NOT_CHECKED``, or nothing. Raises OSError where that is not known."""
    reason = ""
    # Twice: a server may have written there during the first read.
    for _ in range(2):
        stored = inspector.read(page)
        if stored is None:
            return _GONE
        reason = reason_it_is_bad(page.key, stored) or ""
        if not reason and transformed:
            payload = memoryview(stored.content)[decode_header(stored.content).header_length :]
            try:
                reason = reason_its_seal_is_bad(payload, page.key, keys) or ""
            except KeyError:
                return _NOT_CHECKED
        if not reason:
            break
    return reason


@dataclass(slots=True)
class _Cleaned:
    """What is left over in the directories, or was removed."""

    left_overs: int = 0
    freed_bytes: int = 0
    pins: int = 0


def _gc(arguments: argparse.Namespace) -> int:
    found = _Cleaned()
    trouble = Trouble()
    for directory in directories_of(arguments.target):
        with trouble.noted():
            _clean(directory, found, look_only=arguments.dry_run)
    code = trouble.told()
    if arguments.dry_run:
        lines = [f"{found.left_overs} left-overs of killed processes would be removed"]
        lines += [f"{found.pins} pins whose time is up would be removed"] if found.pins else []
        show(arguments, {"dry_run": True, **asdict(found), "freed_bytes": None}, lines)
        return code
    lines = [f"{found.left_overs} left-overs of killed processes removed, {rounded_size(found.freed_bytes)} freed"]
    lines += [f"{found.pins} pins removed whose time was up"] if found.pins else []
    show(arguments, {"dry_run": False, **asdict(found)}, lines)
    return code


def _clean(directory: Path, found: _Cleaned, *, look_only: bool) -> None:
    """Adds to ``found``."""
    with closing(opened(directory)) as inspector:
        before = inspector.occupied()
        left_over = inspector.left_overs()
    over = pins_that_are_over(directory)
    if look_only:
        found.left_overs += left_over
        found.pins += len(over)
        return
    with closing(open_editor(directory)) as editor:
        # Opening the directory has removed some already.
        found.left_overs += max(left_over, editor.clean_up())
    found.pins += sum(remove_pin(directory, name) for name in over)
    with closing(open_inspector(directory)) as inspector:
        found.freed_bytes += max(0, before - inspector.occupied())


def _clear(arguments: argparse.Namespace) -> int:
    trouble = Trouble()
    groups = groups_of([arguments.path], trouble)
    trouble.told()
    chosen = _chosen(groups, arguments)
    if not chosen and not arguments.all:
        if arguments.identity is not None:
            known = ", ".join(sorted(group.digest.hex() for group in groups)) or "none"
            print(f"no pages of the identity {arguments.identity!r}; identities here: {known}", file=sys.stderr)
        else:
            known = ", ".join(sorted({group.model for group in groups})) or "none"
            print(f"no pages of {arguments.model!r}; models here: {known}", file=sys.stderr)
        return 1
    pages, size = sum(group.pages for group in chosen), sum(group.size for group in chosen)
    what = f"{pages} pages, {rounded_size(size)}"
    document = {
        "dry_run": arguments.dry_run,
        "pages": pages,
        "bytes": size,
        "identities": [
            {"identity": group.digest.hex(), "model": group.model, "pages": group.pages, "bytes": group.size}
            for group in chosen
        ],
    }
    if arguments.dry_run:
        lines = [f"{g.digest.hex()} of {g.model}: {g.pages} pages, {rounded_size(g.size)}" for g in chosen]
        show(arguments, document, [*lines, f"{what} would be removed"])
        return 0
    if not arguments.yes and not _agrees(f"Remove {what} of {_models(chosen)} from {arguments.path}?"):
        print("nothing was removed", file=sys.stderr)
        return 1
    with closing(open_editor(arguments.path)) as editor:
        editor.clear([group.digest for group in chosen])
    show(arguments, document, [f"{what} removed"])
    return 0


def _chosen(groups: list[Group], arguments: argparse.Namespace) -> list[Group]:
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


def _models(groups: list[Group]) -> str:
    return ", ".join(sorted({group.model for group in groups})) or "no model"


def _agrees(question: str) -> bool:
    """Ask at a terminal; a script, which has nobody to ask, agrees."""
    if not sys.stdin.isatty():
        return True
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")

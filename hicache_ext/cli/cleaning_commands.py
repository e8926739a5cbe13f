"""``hicache-ext gc`` and ``clear``: what is left over or not wanted in a directory of the file tier.

They may be used while servers run.
"""

from __future__ import annotations

import argparse
import re
import sys
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hicache_ext.cli.directories import Group, Trouble, groups_of, opened
from hicache_ext.cli.inputs import add_target, directories_of
from hicache_ext.cli.usage import describe, show
from hicache_ext.config import rounded_size
from hicache_ext.errors import ConfigError
from hicache_ext.storage.tiers.file.inspection import open_editor, open_inspector
from hicache_ext.storage.tiers.file.pins import pins_that_are_over, remove_pin

_LEAST_DIGITS = 8
_DIGITS = re.compile(rf"[0-9a-f]{{{_LEAST_DIGITS},32}}")


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
    parser.add_argument("--yes", action="store_true", help="do not ask; needed where there is no terminal to ask at")
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
    document: dict[str, Any] = {
        "dry_run": arguments.dry_run,
        "pages": pages,
        "bytes": size,
        "freed_bytes": None,
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
        return 1
    with closing(open_inspector(arguments.path)) as inspector:
        before = inspector.occupied()
    with closing(open_editor(arguments.path)) as editor:
        # With --all also what a killed command had cleared, and not freed.
        editor.clear(None if arguments.all else [group.digest for group in chosen])
    with closing(open_inspector(arguments.path)) as inspector:
        document["freed_bytes"] = freed = max(0, before - inspector.occupied())
    lines = [f"{what} removed, {rounded_size(freed)} of disk freed"]
    if inspector.layout == "slab" and freed < size:
        lines += ["the rest of their room is in slabs that hold other pages, too: new pages take it"]
    show(arguments, document, lines)
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
    """Ask at a terminal. A script, which has nobody to ask, must have said so before."""
    if not sys.stdin.isatty():
        print("nothing was removed: there is no terminal to ask at; --yes removes without a question", file=sys.stderr)
        return False
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    agreed = sys.stdin.readline().strip().lower() in ("y", "yes")
    if not agreed:
        print("nothing was removed", file=sys.stderr)
    return agreed

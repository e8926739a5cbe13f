"""Hints as small files, ``PATH/hints/<nanoseconds>-<random>.hint``, for file systems that nodes share.

Names come from the writers' clocks, which differ: a reader therefore remembers the names it has seen, not a time.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from contextlib import suppress
from pathlib import Path

from hicache_ext.runtime.access import make_directory, open_file
from hicache_ext.runtime.whole_file import read_small
from hicache_ext.storage.contract.abilities import AT_ONCE, HINTS_LAST, KEPT_HINTS, LONGEST_HINT

_NAME = re.compile(r"[0-9]{20}-[A-Za-z0-9_.-]{1,200}\.(hint|new)")


def post_hint(path: Path, hint: bytes) -> None:
    """Write a hint, and remove the oldest ones. Raises OSError."""
    directory = path / "hints"
    make_directory(directory)
    name = f"{time.time_ns():020d}-{secrets.token_hex(8)}"
    scratch = directory / f"{name}.new"
    try:
        with open(scratch, "wb", opener=lambda _, flags: open_file(scratch, flags)) as file:
            file.write(hint)
        scratch.rename(directory / f"{name}.hint")
    except OSError:
        scratch.unlink(missing_ok=True)
        raise
    names = _names(directory)
    # This also removes scratch files of killed writers, together with hints of the same age.
    too_old = f"{int((time.time() - 2 * HINTS_LAST) * 1e9):020d}"
    for place, old in enumerate(names):
        if place < len(names) - KEPT_HINTS or old < too_old:
            (directory / old).unlink(missing_ok=True)


def read_hints(path: Path, since: frozenset[str] | None) -> tuple[frozenset[str], list[bytes]]:
    """Return the names seen so far and the hints not in ``since``; None skips all current hints. Raises OSError."""
    directory = path / "hints"
    names = [name for name in _names(directory)[-KEPT_HINTS:] if name.endswith(".hint")]
    if since is None:
        return frozenset(names), []
    chosen = [name for name in names if name not in since][:AT_ONCE]
    hints = [hint for name in chosen if (hint := _read(directory / name)) is not None]
    # Keep only names that are still there: the set never outgrows the directory.
    return frozenset(name for name in names if name in since) | frozenset(chosen), hints


def _names(directory: Path) -> list[str]:
    """Return the names of hints, oldest first; foreign files are ignored."""
    try:
        return sorted(name for name in os.listdir(directory) if _NAME.fullmatch(name))
    except FileNotFoundError:
        return []


def _read(file: Path) -> bytes | None:
    """Read a hint; None if it is gone meanwhile, is too long, or is not a regular file."""
    with suppress(OSError):
        hint = read_small(file)
        return hint if 0 < len(hint) <= LONGEST_HINT else None
    return None

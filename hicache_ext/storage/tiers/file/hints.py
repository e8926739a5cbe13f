"""Hints as small files, ``PATH/hints/<nanoseconds>-<random>.hint``, for file systems that nodes share.

Names are given by the writers' clocks, which differ: a reader remembers which names it has seen instead of a moment.
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
from hicache_ext.storage.contract import hint_board

_NAME = re.compile(r"[0-9]{20}-[A-Za-z0-9_.-]{1,200}\.(hint|new)")


def post_hint(path: Path, hint: bytes) -> None:
    """Raises OSError."""
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
    # What a writer that was killed has left behind goes with the hints of its time.
    too_old = f"{int((time.time() - 2 * hint_board.LIFETIME) * 1e9):020d}"
    for place, old in enumerate(names):
        if place < len(names) - hint_board.KEPT or old < too_old:
            (directory / old).unlink(missing_ok=True)


def read_hints(path: Path, since: frozenset[str] | None) -> tuple[frozenset[str], list[bytes]]:
    """Raises OSError."""
    directory = path / "hints"
    names = [name for name in _names(directory)[-hint_board.KEPT :] if name.endswith(".hint")]
    if since is None:
        return frozenset(names), []
    chosen = [name for name in names if name not in since][: hint_board.AT_ONCE]
    hints = [hint for name in chosen if (hint := _read(directory / name)) is not None]
    # Only what is still there: the set never outgrows the directory.
    return frozenset(name for name in names if name in since) | frozenset(chosen), hints


def _names(directory: Path) -> list[str]:
    """Oldest first; strangers' files are no hints."""
    try:
        return sorted(name for name in os.listdir(directory) if _NAME.fullmatch(name))
    except FileNotFoundError:
        return []


def _read(file: Path) -> bytes | None:
    """None for what has gone meanwhile, is too long, or is no plain file."""
    with suppress(OSError):
        hint = read_small(file)
        return hint if 0 < len(hint) <= hint_board.LONGEST else None
    return None

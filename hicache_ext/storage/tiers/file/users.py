"""What ``hicache-ext doctor`` says about the processes that use a directory: one that is stopped holds others up."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from hicache_ext.storage.contract.diagnosis import Finding, Level
from hicache_ext.storage.tiers.file.manifest import slab_home
from hicache_ext.storage.tiers.file.slab.listing import servers_out_of_reach

_STOPPED = "Tt"
"""States of a process in /proc: by a signal, or by a debugger."""


def of_users(path: Path, layout: str) -> list[Finding]:
    """A warning where a process that uses the directory does not go on. Raises OSError only for ``path`` itself."""
    stopped = list(stopped_processes(path))
    if stopped:
        one = len(stopped) == 1
        which = f"process {stopped[0]}" if one else f"processes {', '.join(map(str, stopped))}"
        seen = (
            f"{path}: {which} {'has' if one else 'have'} it open and {'is' if one else 'are'} stopped; "
            "while a stopped process holds a lock, nothing is stored, and a server that starts goes without this path"
        )
        remedy = f"let it go on (kill -CONT {' '.join(map(str, stopped))}), or end it"
        return [Finding("processes", Level.WARNING, seen, remedy)]
    home = slab_home(path)
    if layout == "slab" and servers_out_of_reach(home):
        seen = f"{path}: processes use it and none of them gives its index: stopped, perhaps, or of another account"
        return [Finding("processes", Level.WARNING, seen, f"fuser {home / 'lock'} names them")]
    return []


def stopped_processes(path: Path) -> Iterator[int]:
    """The ids of stopped processes that have a file below ``path`` open.

    Those of other accounts and of other containers cannot be seen.
    """
    below = f"{os.path.realpath(path)}/"
    for pid in filter(str.isdigit, os.listdir("/proc")):
        # It may have ended meanwhile, and may belong to another account.
        with suppress(OSError):
            if _state(pid) in _STOPPED and any(file.startswith(below) for file in _open_files(pid)):
                yield int(pid)


def _state(pid: str) -> str:
    # The name before it may hold blanks and brackets.
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]


def _open_files(pid: str) -> Iterator[str]:
    directory = f"/proc/{pid}/fd"
    for number in os.listdir(directory):
        with suppress(FileNotFoundError):
            yield os.readlink(f"{directory}/{number}")

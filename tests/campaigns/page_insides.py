"""What campaigns know of the inside of a directory of page files; everything else they ask of stores.

``path`` is always the directory of a tier (PATH of the documents).
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

_BLOCK = 4096


def account_of(path: Path) -> dict[str, Any]:
    """What the processes that write have noted (storage/tiers/file/usage.py)."""
    account: dict[str, Any] = json.loads((path / "usage").read_bytes().partition(b"\n")[0].partition(b" ")[2])
    return account


def noted_bytes(path: Path) -> int:
    """What the account says is stored, and reserved."""
    account = account_of(path)
    return int(account["stored"] + sum(reserved for reserved, _ in account["under_way"].values()))


def occupied_by_walk(path: Path) -> int:
    """Bytes of disk of the pages, packs and their directories, without the package's help."""
    total = 0
    for entry in (path / "pages").glob("**/*"):
        total += _BLOCK if entry.is_dir() else -(-entry.stat().st_size // _BLOCK) * _BLOCK
    return total


def faults(path: Path, within: float = 0.0) -> list[str]:
    """Every contradiction between the account and the files that is still there after ``within`` seconds, one sentence
    each. Nobody may be writing; with ``within`` somebody has the directory open, and counts."""
    deadline = time.monotonic() + within
    while True:
        account, found = account_of(path), []
        if account["under_way"]:
            found.append("operations are still under way")
        if within and (account["recount"] or not account["counted"]):
            found.append("nobody has counted what is stored")
        elif not account["recount"] and account["stored"] != occupied_by_walk(path):
            found.append("the account differs from a walk")
        if list((path / "tmp").iterdir()):
            found.append("files are left in tmp/")
        if not found or time.monotonic() >= deadline:
            return found
        time.sleep(0.05)

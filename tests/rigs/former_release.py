"""The release before slabs moved to PATH/v3, frozen: the files of its slabs (format 2), and what its start makes of a
directory. Written from commit f9feeea; never follows the code of today."""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SLAB_FILE = re.compile(r"([0-9a-f]{8})-([0-9]+)\.(slab|headers)")
_INDEX_FILE = re.compile(r"(data|lock)\.mdb|header|records|seals|groups|(buckets|ghosts)-[0-9]+")
_IDENTITY_NAME = re.compile(r"[0-9a-f]{32}")
_IN_ORDER = "closed in order, index 6"

SLOT_SIZE, SLOTS = 8192, 16


def make_former_slabs(path: Path, *, number: int = 2, slabs: int = 3) -> None:
    """What a server of that release left when it was closed in order."""
    for directory in ("", "identities", "pins", "index", "slabs"):
        (path / directory).mkdir(mode=0o700, parents=True, exist_ok=True)
    files = {
        "lock": b"",
        "trust": _IN_ORDER.encode(),
        "hicache_ext.json": json.dumps({"format": number, "layout": "slab"}).encode() + b"\n",
        "ttl.json": b"{}",
        f"identities/{bytes(16).hex()}.json": b"{}",
    }
    for name in ("data.mdb", "lock.mdb", "header", "records", "seals", "groups", "buckets-512", "ghosts-64"):
        files[f"index/{name}"] = b"i" * 5000
    for slab in range(slabs):
        files[f"slabs/{slab:08x}-{SLOT_SIZE}.slab"] = b"p" * SLOT_SIZE * SLOTS
        files[f"slabs/{slab:08x}-{SLOT_SIZE}.headers"] = b"h" * 128 * SLOTS
    for name, content in files.items():
        (path / name).write_bytes(content)
        (path / name).chmod(0o600)


@contextmanager
def former_server(path: Path) -> Iterator[None]:
    """While a process of that release has the directory open."""
    fd = os.open(path / "lock", os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        yield
    finally:
        os.close(fd)


def former_start(path: Path) -> str:
    """What its start makes of ``path``: "is refused", "trusts its index", "rebuilds N slabs" or "is empty"."""
    if not _takes(path):
        return "is refused"
    trust = path / "trust"
    slabs = [name for name in _names(path / "slabs") if _SLAB_FILE.fullmatch(name) and name.endswith(".slab")]
    if trust.exists() and trust.read_text() == _IN_ORDER and (path / "index" / "data.mdb").exists():
        return "trusts its index"
    return f"rebuilds {len(slabs)} slabs" if slabs else "is empty"


def _takes(path: Path) -> bool:
    """``check_before_start`` of that release."""
    try:
        recorded = json.loads((path / "hicache_ext.json").read_bytes())
    except (FileNotFoundError, ValueError):
        recorded = None
    if isinstance(recorded, dict) and "format" in recorded and "layout" in recorded:
        return (recorded["format"], recorded["layout"]) in ((1, "slab"), (2, "slab"))
    there = (path / "hicache_ext.json").exists()
    holds = [
        layout
        for layout, where, name in (("pages", "pages", _IDENTITY_NAME), ("slab", "slabs", _SLAB_FILE))
        if any(name.fullmatch(found) for found in _names(path / where))
    ]
    if not holds and there:
        wanted = {"pages": ("pages", "identities", "tmp"), "slab": ("slabs", "identities")}
        holds = [layout for layout, names in wanted.items() if all((path / name).is_dir() for name in names)]
    if holds:
        return holds == ["slab"]
    return not there and not any(_INDEX_FILE.fullmatch(name) for name in _names(path / "index"))


def _names(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []

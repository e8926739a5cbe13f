"""Findings of ``hicache-ext doctor`` about a file tier that it does not open: nothing at its paths is changed."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path

from hicache_ext import native
from hicache_ext.config.values import format_size, rounded_size
from hicache_ext.errors import StoreSetupError
from hicache_ext.runtime.access import Access
from hicache_ext.runtime.file_systems import file_system_of, on_root_file_system
from hicache_ext.storage.contract.diagnosis import Finding, Level, moves_of
from hicache_ext.storage.contract.store import PageStore
from hicache_ext.storage.contract.trial import nearest_directory, trial_directory, try_store
from hicache_ext.storage.tiers.file.config import FileTierConfig
from hicache_ext.storage.tiers.file.layouts import Layout, newer_versions, slab_home
from hicache_ext.storage.tiers.file.opening import chosen_layout, open_paths
from hicache_ext.storage.tiers.file.slab.listing import servers_out_of_reach
from hicache_ext.storage.tiers.file.usage import occupied_bytes

_TRIAL_CAPACITY = 256 << 20
"""Most bytes of capacity per path in a trial, which uses only part of it."""
_MEMORY = frozenset({"tmpfs", "ramfs"})

_TRIAL_PAGE = 1 << 20

_SMALL_FILE = 1 << 18
"""Smallest expected average size of a file in the layout "pages", in bytes: packs of short batches."""
_SMALL_SLAB = 1 << 24

_LAYOUTS = {
    "pages": "files of pages: works on shared file systems too",
    "slab": "slots of preallocated files with an index: for local disks",
}


def examine(name: str, tier: FileTierConfig) -> list[Finding]:
    """Check layout, file systems, free space against capacity, users of the paths, and a round trip.

    The round trip uses a separate tier in directories next to the data, on the same file systems, then removes it.
    Raises StoreSetupError if a server would not start, and ConfigError.
    """
    paths = [Path(path) for path in tier.path]
    layouts: dict[Path, Layout] = {}
    reasons: dict[Path, str] = {}
    findings: list[Finding] = []
    broken: dict[Path, StoreSetupError] = {}
    with ExitStack() as trials:
        places: dict[Path, Path] = {}
        for path in paths:
            try:
                layouts[path], reasons[path] = chosen_layout(name, tier, path)
                findings += [*_start_changes(path, tier), *check_users(path, layouts[path])]
                places[path] = trials.enter_context(trial_directory(path))
            except OSError as error:
                remedies = ["run the doctor as the server's account"] if isinstance(error, PermissionError) else []
                reason = f"directory {str(path)!r}: {error.strerror or error}"
                broken[path] = StoreSetupError(name, reason, remedies)
        if not places:
            raise next(iter(broken.values()))
        for path, refusal in broken.items():
            findings.append(Finding("path", Level.ERROR, f"{path}: {refusal.reason}", "look at its disk and mount"))
        store = trials.enter_context(closing(_trial_store(name, tier, layouts, places)))
        findings += diagnose(list(places), tier.capacity, store, list(dict.fromkeys(map(reasons.__getitem__, places))))
        # Use small pages if little fits, so that the trial does not evict its own pages.
        capacity = store.describe().details["capacity"]
        page = _TRIAL_PAGE if capacity is None else min(_TRIAL_PAGE, capacity // len(places) // 256)
        return findings + try_store(store, page)


def _trial_store(
    name: str, tier: FileTierConfig, layouts: Mapping[Path, Layout], places: Mapping[Path, Path]
) -> PageStore:
    """Open a small tier like this one in other directories. Raises StoreSetupError or ConfigError that name the tier's
    own paths."""
    chosen = set(layouts.values())
    small = {
        "path": tuple(str(place) for place in places.values()),
        "capacity": None if tier.capacity is None else min(tier.capacity, len(places) * _TRIAL_CAPACITY),
        "layout": chosen.pop() if len(chosen) == 1 else "auto",
        "ttl": None,
    }
    try:
        return open_paths(name, tier.model_copy(update=small))
    except StoreSetupError as error:
        reason = error.reason
        for path, place in places.items():
            reason = reason.replace(str(place), str(path))
        raise StoreSetupError(name, reason) from None


def _start_changes(path: Path, tier: FileTierConfig) -> list[Finding]:
    """Return findings on what a server would change at its start. Raises OSError."""
    if not path.exists():
        return []
    findings: list[Finding] = []
    for newer in newer_versions(path):
        seen = f"{newer} is of a newer release; it stays as it is, and does not count in the capacity"
        findings.append(Finding("newer release", Level.WARNING, seen, "remove it if no such release will come back"))
    status, wanted = path.stat(), Access(tier.mode == "group")
    if stat.S_IMODE(status.st_mode) & ~0o2000 & ~wanted.directory_mode:
        seen = f"{path} has mode {stat.S_IMODE(status.st_mode):04o} and not {wanted.directory_mode:04o}"
        if status.st_uid == os.geteuid():
            findings.append(Finding("mode", Level.NOTE, f"{seen}; a server changes that at its start", "nothing"))
        else:
            seen += f", and belongs to uid {status.st_uid}; what a server makes in it is closed to others all the same"
            findings.append(Finding("mode", Level.NOTE, seen, "chown it to the server's account"))
    return findings


def diagnose(paths: Sequence[Path], capacity: int | None, store: PageStore, why: Sequence[str] = ()) -> list[Finding]:
    """Return findings on the layout and I/O of ``store``, and on the file systems and space of ``paths``. ``why``: the
    reasons for the layout."""
    layout = store.describe().details["layout"]
    layout = ", ".join(layout) if isinstance(layout, list) else str(layout)
    seen = "; ".join([f"{layout}: {_LAYOUTS.get(layout, '')}".rstrip(": "), *why])
    findings = [Finding("layout", Level.OK, seen)]
    if "slab" in layout or native.why_not() is not None:
        findings.append(moves_of("docs/file-tier.md"))
    try:
        findings += [_file_system(path, layout) for path in paths]
        findings += _space(paths, capacity, sum(occupied_bytes(path) for path in paths), layout)
    except OSError as error:
        findings.append(Finding("directory", Level.ERROR, f"{error.filename}: {error.strerror}", "check the mount"))
    return findings


def _file_system(path: Path, layout: str) -> Finding:
    file_system = file_system_of(path)
    kind = file_system.type
    missing = "" if path.exists() else " and does not exist; a server makes it at its start"
    if layout == "slab" and file_system.shared:
        remedy = "use layout: pages; the index of slabs needs locks that a shared file system does not keep"
        return Finding("file system", Level.ERROR, f"{path}: {kind}, shared between machines", remedy)
    root = on_root_file_system(str(path))
    if root is not None:
        remedy = "mount the disk that is meant; with require_mount: true a server does not start without it"
        return Finding("file system", Level.WARNING, f"{path} is on {root}{missing}", remedy)
    if kind in _MEMORY:
        remedy = "its pages take the memory that SGLang's host pool could have; name a disk"
        return Finding("file system", Level.WARNING, f"{path}: {kind}, which is memory{missing}", remedy)
    if missing:
        return Finding(
            "file system", Level.NOTE, f"{path} is on {kind}{missing}", "make it first to be sure of its disk"
        )
    return Finding("file system", Level.OK, f"{path}: {kind}")


def _space(paths: Sequence[Path], capacity: int | None, stored: int, layout: str) -> list[Finding]:
    """Return a finding on whether the disk has the bytes and inodes that the tier may still take."""
    # Several paths may be on one device, whose space counts once.
    devices = {os.stat(place).st_dev: place for place in map(nearest_directory, paths)}
    free = sum(shutil.disk_usage(path).free for path in devices.values())
    systems = [os.statvfs(path) for path in devices.values()]
    # Some file systems create inodes on demand, and report 0.
    inodes = sum(system.f_favail for system in systems) if all(system.f_files for system in systems) else None
    if capacity is None:
        remedy = "set a capacity: nothing is evicted before the disk is full"
        return [Finding("capacity", Level.WARNING, f"unlimited; {rounded_size(free)} are free", remedy)]
    words = (
        f"{format_size(capacity)}, of which {rounded_size(stored)} are taken; {rounded_size(free)} are free on the disk"
    )
    if capacity - stored > free:
        return [Finding("capacity", Level.WARNING, words, "lower capacity: the disk is full before the tier is")]
    file = _SMALL_FILE if "pages" in layout else _SMALL_SLAB
    if inodes is not None and inodes < (capacity - stored) / file:
        remedy = "lower capacity, or make the file system with more inodes: they run out before the tier is full"
        return [Finding("capacity", Level.WARNING, f"{words}, with {inodes} inodes", remedy)]
    return [Finding("capacity", Level.OK, words)]


_STOPPED = "Tt"
"""States in /proc of a process stopped by a signal or by a debugger."""


def check_users(path: Path, layout: str) -> list[Finding]:
    """Return a warning if a process that uses the directory is stuck. Raises OSError only for ``path`` itself."""
    if stopped := list(map(str, stopped_processes(path))):
        seen = (
            f"{path}: stopped processes have it open ({', '.join(stopped)}); while one of them holds a lock, nothing "
            "is stored, and a server that starts goes without this path"
        )
        remedy = f"let them go on (kill -CONT {' '.join(stopped)}), or end them"
        return [Finding("processes", Level.WARNING, seen, remedy)]
    home = slab_home(path)
    if layout == "slab" and servers_out_of_reach(home):
        seen = f"{path}: processes use it and none of them gives its index: stopped, perhaps, or of another account"
        return [Finding("processes", Level.WARNING, seen, f"fuser {home / 'lock'} names them")]
    return []


def stopped_processes(path: Path) -> Iterator[int]:
    """Yield the ids of stopped processes that have a file below ``path`` open.

    Processes of other accounts and of other containers cannot be seen.
    """
    below = f"{os.path.realpath(path)}/"
    for process in Path("/proc").glob("[0-9]*"):
        # The process may have ended meanwhile, or may belong to another account.
        with suppress(OSError):
            # The name in front of the state may contain spaces and parentheses.
            state = (process / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
            if state in _STOPPED and any(os.readlink(file).startswith(below) for file in (process / "fd").iterdir()):
                yield int(process.name)

"""What ``hicache-ext doctor`` says about a file tier."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hicache_ext.config.units import format_size, rounded_size
from hicache_ext.errors import StoreSetupError
from hicache_ext.runtime.access import Access
from hicache_ext.runtime.mounts import on_root_file_system
from hicache_ext.storage.contract.diagnosis import Finding, Level
from hicache_ext.storage.contract.store import PageStore
from hicache_ext.storage.contract.trial import nearest_directory, trial_directory, try_store
from hicache_ext.storage.tiers.file import chosen_layout, open_paths
from hicache_ext.storage.tiers.file.file_system import file_system_of
from hicache_ext.storage.tiers.file.manifest import MANIFEST, check_before_start, format_and_layout, is_taken_over
from hicache_ext.storage.tiers.file.slab.compiled_code import wait_for_compiled_code, why_not_compiled
from hicache_ext.storage.tiers.file.usage import recorded_total

if TYPE_CHECKING:
    from hicache_ext.config import FileTierConfig

_MEMORY = frozenset({"tmpfs", "ramfs"})

_TRIAL_PAGE = 1 << 20
_TRIAL_CAPACITY = 256 << 20
"""Of a path in a trial; a part of it is taken."""

_LAYOUTS = {
    "pages": "one file per page: works on shared file systems too",
    "slab": "slots of preallocated files with an index: for local disks",
}


def diagnose(store: PageStore, in_service: Sequence[Path]) -> list[Finding]:
    """File system, free space against capacity, layout, round trip. Never raises OSError.

    ``in_service``: the paths whose capacity counts. The round trip evicts pages of a full store.
    """
    details = store.describe().details
    paths = [Path(path) for path in details["paths"]]
    capacity: int | None = details["capacity"]
    findings = _of_paths(paths, in_service, capacity, store)
    for path in details.get("out_of_service", []):
        findings.append(Finding("path", Level.ERROR, f"{path}: out of service", "look at its disk and mount"))
    return findings + try_store(store, _trial_page(capacity, len(paths)))


def examine(name: str, tier: FileTierConfig) -> list[Finding]:
    """What ``diagnose`` says, for a tier that is not opened: what is at its paths stays as it is.

    The trial is a tier of its own in a directory beside the data, on the same file systems, which is taken away again.
    Raises StoreSetupError where a server would not start, ConfigError.
    """
    paths = [Path(path) for path in tier.path]
    layouts: dict[Path, str] = {}
    findings: list[Finding] = []
    broken: dict[Path, StoreSetupError] = {}
    with ExitStack() as trials:
        places: dict[Path, Path] = {}
        for path in paths:
            try:
                layouts[path] = chosen_layout(name, tier, path).layout
                check_before_start(path, layouts[path], name)
                findings += _as_found(path, layouts[path], tier)
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
        findings += _of_paths(list(places), list(places), tier.capacity, store)
        return findings + try_store(store, _trial_page(store.describe().details["capacity"], len(places)))


def _trial_store(
    name: str, tier: FileTierConfig, layouts: Mapping[Path, str], places: Mapping[Path, Path]
) -> PageStore:
    """A small tier like this one, in other directories. Raises StoreSetupError or ConfigError, in which the tier's own
    paths are named."""
    chosen = set(layouts.values())
    if tier.io == "direct" and chosen != {"slab"}:
        pages = next(path for path, layout in layouts.items() if layout != "slab")
        raise StoreSetupError(name, f"io is 'direct', and {str(pages)!r} holds page files, which are not aligned")
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


def _as_found(path: Path, layout: str, tier: FileTierConfig) -> list[Finding]:
    """What a server would change at its start. Raises OSError."""
    if not path.exists():
        return []
    findings: list[Finding] = []
    if is_taken_over(path, layout):
        number, _ = format_and_layout(path) or (0, "")
        seen = f"{path} holds format {number}, an older one: the first server that has it alone gives its pages up"
        findings.append(Finding("format", Level.WARNING, seen, "name another path to keep them for an older release"))
    elif (path / MANIFEST).exists() and format_and_layout(path) is None:
        seen = f"{path / MANIFEST} cannot be read, after a power loss perhaps; a server makes it anew at its start"
        findings.append(Finding("format", Level.WARNING, seen, "nothing: its pages are kept"))
    status, wanted = path.stat(), Access(tier.mode == "group")
    if stat.S_IMODE(status.st_mode) & ~0o2000 & ~wanted.directory_mode:
        seen = f"{path} has mode {stat.S_IMODE(status.st_mode):04o} and not {wanted.directory_mode:04o}"
        if status.st_uid == os.geteuid():
            findings.append(Finding("mode", Level.NOTE, f"{seen}; a server changes that at its start", "nothing"))
        else:
            seen += f", and belongs to uid {status.st_uid}; what a server makes in it is closed to others all the same"
            findings.append(Finding("mode", Level.NOTE, seen, "chown it to the server's account"))
    return findings


def _of_paths(
    paths: Sequence[Path], in_service: Sequence[Path], capacity: int | None, store: PageStore
) -> list[Finding]:
    """Layout and I/O of ``store``, file systems and space of ``paths``."""
    layout = store.describe().details["layout"]
    layout = ", ".join(layout) if isinstance(layout, list) else str(layout)
    findings = [Finding("layout", Level.OK, f"{layout}: {_LAYOUTS.get(layout, '')}".rstrip(": "))]
    if "slab" in layout:
        findings.append(_moves())
    try:
        findings += [_file_system(path, layout) for path in paths]
        findings += _space(paths, capacity, sum(_stored_bytes(path) for path in in_service))
    except OSError as error:
        findings.append(Finding("directory", Level.ERROR, f"{error.filename}: {error.strerror}", "check the mount"))
    return findings


def _trial_page(capacity: int | None, paths: int) -> int:
    """Small pages where little fits, so that the trial does not evict its own."""
    return _TRIAL_PAGE if capacity is None else min(_TRIAL_PAGE, capacity // paths // 256)


def _moves() -> Finding:
    wait_for_compiled_code()
    missing = why_not_compiled()
    if missing is None:
        return Finding("pages", Level.OK, "move in compiled code")
    remedy = "pip install 'hicache-ext[compiled]'; docs/file-tier.md"
    return Finding("pages", Level.WARNING, f"move in Python, which is slower and holds the GIL: {missing}", remedy)


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


def _space(paths: Sequence[Path], capacity: int | None, stored: int) -> list[Finding]:
    """Whether what the tier may still take is there to be had."""
    # Several paths may be on one device, whose space is there once.
    devices = {os.stat(place).st_dev: place for place in map(nearest_directory, paths)}
    free = sum(shutil.disk_usage(path).free for path in devices.values())
    if capacity is None:
        remedy = "set a capacity: nothing is evicted before the disk is full"
        return [Finding("capacity", Level.WARNING, f"unlimited; {rounded_size(free)} are free", remedy)]
    words = (
        f"{format_size(capacity)}, of which {rounded_size(stored)} are taken; {rounded_size(free)} are free on the disk"
    )
    if capacity - stored > free:
        return [Finding("capacity", Level.WARNING, words, "lower capacity: the disk is full before the tier is")]
    return [Finding("capacity", Level.OK, words)]


def _stored_bytes(path: Path) -> int:
    """Page files keep an account; slabs are few files, which are counted. Raises OSError."""
    with suppress(FileNotFoundError):
        counted = recorded_total(path / "usage")
        if counted is not None:
            return counted
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
            except OSError:
                continue
    return total

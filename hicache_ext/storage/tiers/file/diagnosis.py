"""What ``hicache-ext doctor`` says about a file tier."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from hicache_ext import native
from hicache_ext.config.values import format_size, rounded_size
from hicache_ext.runtime.file_systems import file_system_of, on_root_file_system
from hicache_ext.storage.contract.diagnosis import Finding, Level, moves_of
from hicache_ext.storage.contract.store import PageStore
from hicache_ext.storage.contract.trial import nearest_directory, try_store
from hicache_ext.storage.tiers.file.usage import occupied_bytes

_MEMORY = frozenset({"tmpfs", "ramfs"})

_TRIAL_PAGE = 1 << 20

_SMALL_FILE = 1 << 18
"""Bytes that files of the layout "pages" have at least, on average: packs of short batches."""
_SMALL_SLAB = 1 << 24

_LAYOUTS = {
    "pages": "files of pages: works on shared file systems too",
    "slab": "slots of preallocated files with an index: for local disks",
}


def diagnose(store: PageStore, in_service: Sequence[Path]) -> list[Finding]:
    """File system, free space against capacity, layout, round trip. Never raises OSError.

    ``in_service``: the paths whose capacity counts. The round trip evicts pages of a full store.
    """
    details = store.describe().details
    paths = [Path(path) for path in details["paths"]]
    capacity: int | None = details["capacity"]
    findings = of_paths(paths, in_service, capacity, store)
    for path in details.get("out_of_service", []):
        findings.append(Finding("path", Level.ERROR, f"{path}: out of service", "look at its disk and mount"))
    return findings + try_store(store, trial_page(capacity, len(paths)))


def of_paths(
    paths: Sequence[Path], in_service: Sequence[Path], capacity: int | None, store: PageStore, why: Sequence[str] = ()
) -> list[Finding]:
    """Layout and I/O of ``store``, file systems and space of ``paths``. ``why``: the reasons for the layout."""
    layout = store.describe().details["layout"]
    layout = ", ".join(layout) if isinstance(layout, list) else str(layout)
    seen = "; ".join([f"{layout}: {_LAYOUTS.get(layout, '')}".rstrip(": "), *why])
    findings = [Finding("layout", Level.OK, seen)]
    if "slab" in layout or native.why_not() is not None:
        findings.append(moves_of("docs/file-tier.md"))
    try:
        findings += [_file_system(path, layout) for path in paths]
        findings += _space(paths, capacity, sum(occupied_bytes(path) for path in in_service), layout)
    except OSError as error:
        findings.append(Finding("directory", Level.ERROR, f"{error.filename}: {error.strerror}", "check the mount"))
    return findings


def trial_page(capacity: int | None, paths: int) -> int:
    """Small pages where little fits, so that the trial does not evict its own."""
    return _TRIAL_PAGE if capacity is None else min(_TRIAL_PAGE, capacity // paths // 256)


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
    """Whether what the tier may still take is there to be had, in bytes and in inodes."""
    # Several paths may be on one device, whose space is there once.
    devices = {os.stat(place).st_dev: place for place in map(nearest_directory, paths)}
    free = sum(shutil.disk_usage(path).free for path in devices.values())
    systems = [os.statvfs(path) for path in devices.values()]
    # Some make inodes as they need them, and say 0.
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

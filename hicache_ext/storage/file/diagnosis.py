"""What ``hicache-ext doctor`` says about a file tier."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from hicache_ext.config.units import format_size, rounded_size
from hicache_ext.storage.diagnosis import Finding, Level
from hicache_ext.storage.file.file_system import file_system_of
from hicache_ext.storage.file.pages import PageFileStore
from hicache_ext.storage.file.slab.compiled_code import wait_for_compiled_code, why_not_compiled
from hicache_ext.storage.store import PageStore
from hicache_ext.storage.trial import try_store

_MEMORY = frozenset({"tmpfs", "ramfs"})

_TRIAL_PAGE = 1 << 20

_LAYOUTS = {
    "pages": "one file per page: works on shared file systems too",
    "slab": "slots of preallocated files with an index: for local disks",
}


def diagnose(store: PageStore, in_service: Sequence[tuple[Path, PageStore]]) -> list[Finding]:
    """File system, free space against capacity, layout, round trip. Never raises OSError.

    ``in_service``: the paths whose capacity counts, with their stores.
    """
    details = store.describe().details
    layout = ", ".join(details["layout"]) if isinstance(details["layout"], list) else str(details["layout"])
    paths = [Path(path) for path in details["paths"]]
    findings = [Finding("layout", Level.OK, f"{layout}: {_LAYOUTS.get(layout, '')}".rstrip(": "))]
    if "slab" in layout:
        findings.append(_moves())
    capacity: int | None = details["capacity"]
    try:
        findings += [_file_system(path, layout) for path in paths]
        findings += _space(paths, capacity, sum(_stored_bytes(path, part) for path, part in in_service))
    except OSError as error:
        findings.append(Finding("directory", Level.ERROR, f"{error.filename}: {error.strerror}", "check the mount"))
    for path in details.get("out_of_service", []):
        findings.append(Finding("path", Level.ERROR, f"{path}: out of service", "look at its disk and mount"))
    # Small pages where little fits, so that the trial does not evict its own.
    page_bytes = _TRIAL_PAGE if capacity is None else min(_TRIAL_PAGE, capacity // len(paths) // 256)
    return findings + try_store(store, page_bytes)


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
    if layout == "slab" and file_system.shared:
        remedy = "use layout: pages; the index of slabs needs locks that a shared file system does not keep"
        return Finding("file system", Level.ERROR, f"{path}: {kind}, shared between machines", remedy)
    if kind in _MEMORY:
        remedy = "its pages take the memory that SGLang's host pool could have; name a disk"
        return Finding("file system", Level.WARNING, f"{path}: {kind}, which is memory", remedy)
    return Finding("file system", Level.OK, f"{path}: {kind}")


def _space(paths: Sequence[Path], capacity: int | None, stored: int) -> list[Finding]:
    """Whether what the tier may still take is there to be had."""
    # Several paths may be on one device, whose space is there once.
    devices = {os.stat(path).st_dev: path for path in paths}
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


def _stored_bytes(path: Path, store: PageStore) -> int:
    """Page files keep an account; slabs are few files, which are counted. Raises OSError."""
    if isinstance(store, PageFileStore):
        return store.used_bytes()
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
            except OSError:
                continue
    return total

"""Opens a file tier as configured: the layout of each path, how it is read and written, its share of the capacity."""

from __future__ import annotations

import grp
import logging
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hicache_ext.errors import ConfigError, StoreSetupError
from hicache_ext.runtime.access import Access
from hicache_ext.runtime.file_systems import file_system_of, on_root_file_system
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.storage.contract.reports import RecentMean
from hicache_ext.storage.contract.store import PageStore
from hicache_ext.storage.tiers.file.devices import IoPlan, Measured, Trouble, choose_io, measured_device, takes_direct
from hicache_ext.storage.tiers.file.layouts import Layout, check_before_start, choose_layout, prepare_directory
from hicache_ext.storage.tiers.file.multipath import SpreadStore
from hicache_ext.storage.tiers.file.path_store import PathStore

if TYPE_CHECKING:
    from hicache_ext.storage.tiers.file.config import FileTierConfig

logger = logging.getLogger(__name__)

_warned_of_root: set[tuple[str, str]] = set()


def open_file_tier(name: str, tier: FileTierConfig) -> PageStore:
    """Open the store for ``tiers.<name>`` of type file. Raises ConfigError or StoreSetupError."""
    for path in tier.path:
        root = on_root_file_system(path)
        # Warn once per process: a tier that cannot start is opened again and again.
        if root is not None and not tier.require_mount and (name, path) not in _warned_of_root:
            _warned_of_root.add((name, path))
            otherwise = "if a disk of its own is meant, it is not mounted (require_mount: true refuses that)"
            logger.warning("tier %s: %s is on %s; %s", name, path, root, otherwise)
    return open_paths(name, tier)


def open_paths(name: str, tier: FileTierConfig) -> SpreadStore:
    """Open the store without a warning. Raises the same errors as ``open_file_tier``."""
    access = _access(f"hicache_ext.tiers.{name}", tier)
    metrics, evicted_age = TierMetrics(name), RecentMean()
    paths, shared = [Path(path) for path in tier.path], tier.sharing().shared

    def open_path(path: Path, trouble: Trouble) -> PathStore:
        """Open the store of one path with its share of the capacity."""
        try:
            layout, reason = chosen_layout(name, tier, path)
            prepare_directory(path, access, name)
            plan = _plan(name, tier, path, direct_possible=layout == "slab")
        except OSError as error:
            owner_remedy = ["run the server as the account that owns it, or share it with mode: group"]
            remedies = owner_remedy if isinstance(error, PermissionError) else []
            raise StoreSetupError(name, f"directory {str(path)!r}: {error.strerror or error}", remedies) from error
        logger.info("tier %s: %s: layout %s (%s); I/O %s (%s)", name, path, layout, reason, plan, plan.reason)
        share = None if tier.capacity is None else tier.capacity // len(tier.path)
        options: dict[str, Any] = {"capacity": share, "plan": plan, "ttl": tier.ttl}
        options |= {"metrics": metrics, "trouble": trouble, "evicted_age": evicted_age}
        if layout == "slab":
            from hicache_ext.storage.tiers.file.slab.store import SlabStore

            return SlabStore(name, path, **options)
        from hicache_ext.storage.tiers.file.pages.store import PageFileStore

        return PageFileStore(name, path, shared=shared, **options)

    for path in paths:
        # Check all paths before creating one. A failing disk is left to the store: another path may serve.
        with suppress(OSError):
            chosen_layout(name, tier, path)
    return SpreadStore(name, paths, open_path, metrics, evicted_age=evicted_age, shared=shared)


def chosen_layout(name: str, tier: FileTierConfig, path: Path) -> tuple[Layout, str]:
    """Return the layout that a server uses for ``path``, and why. Changes nothing. Raises StoreSetupError if it would
    not start, and the disk's OSError."""
    root = on_root_file_system(str(path)) if tier.require_mount else None
    if root is not None:
        raise StoreSetupError(
            name,
            f"{str(path)!r} is on {root}, and require_mount is true",
            ["mount its disk, or set require_mount: false"],
        )
    layout, reason = choose_layout(path, tier.capacity, shared=bool(tier.shared))
    if tier.layout != "auto":
        layout, reason = tier.layout, "as configured"
    if layout == "slab" and tier.capacity is None:
        raise StoreSetupError(name, f"{str(path)!r} holds slabs, which need a capacity", ["set capacity to a size"])
    if layout == "slab" and tier.shared:
        problem = f"{str(path)!r} holds slabs, which belong to one machine, and shared is true"
        raise StoreSetupError(name, problem, ["leave shared out, or name another directory"])
    if layout == "pages" and tier.io == "direct":
        raise StoreSetupError(name, f"io is 'direct', and {str(path)!r} holds page files, which are not aligned")
    check_before_start(path, layout, name)
    return layout, reason


def _access(key: str, tier: FileTierConfig) -> Access:
    """Return the tier's access. Raises ConfigError for a group that this machine does not have."""
    if not isinstance(tier.group, str):
        return Access(tier.mode == "group", tier.group)
    try:
        return Access(True, grp.getgrnam(tier.group).gr_gid)
    except KeyError:
        raise ConfigError(
            f"{key}.group", f"this machine has no group {tier.group!r}", "a group, or its number"
        ) from None


def _plan(name: str, tier: FileTierConfig, path: Path, *, direct_possible: bool) -> IoPlan:
    """Return the I/O plan of a path. Raises StoreSetupError, and the disk's OSError."""
    if tier.io == "direct" and not takes_direct(path):
        raise StoreSetupError(name, f"io is 'direct', and the file system of {str(path)!r} does not do O_DIRECT")
    if tier.io == "auto" and file_system_of(path).type in ("tmpfs", "ramfs"):
        return IoPlan(threads=tier.threads or IoPlan().threads, reason="the file system is memory")
    if tier.io == "buffered" and tier.threads is not None:
        measured = Measured()
    else:
        try:
            measured = measured_device(path)
        except OSError as error:
            # A usable tier must not fail because a measurement does (no room for its file).
            logger.warning("tier %s: %s was not measured: %s", name, path, error)
            measured = Measured()
    return choose_io(tier.io, tier.capacity, tier.threads, measured, direct_possible=direct_possible)

"""The file tier: pages on local disks and shared file systems."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hicache_ext.errors import ConfigError
from hicache_ext.storage.store import PageStore

if TYPE_CHECKING:
    from hicache_ext.config import FileTierConfig


def open_file_tier(name: str, tier: FileTierConfig) -> PageStore:
    """The store for ``tiers.<name>`` of type file. Raises ConfigError or StoreSetupError."""
    key = f"hicache_ext.tiers.{name}"
    if tier.io == "direct":
        raise ConfigError(f"{key}.io", "'direct' is not in this version", "auto, buffered")
    paths = [Path(path) for path in tier.path]
    if tier.layout == "slab":
        from hicache_ext.storage.file.slab.store import SlabStore

        if tier.capacity is None:
            raise ConfigError(f"{key}.capacity", "the slab layout preallocates its files", "a size such as 512GiB")
        return SlabStore(name, paths, capacity=tier.capacity, threads=tier.threads)
    from hicache_ext.storage.file.pages import PageFileStore

    return PageFileStore(name, paths, capacity=tier.capacity, threads=tier.threads)

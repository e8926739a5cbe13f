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
    from hicache_ext.storage.file.pages import PageFileStore

    key = f"hicache_ext.tiers.{name}"
    if tier.layout == "slab":
        raise ConfigError(f"{key}.layout", "'slab' is not in this version", "auto, pages")
    if tier.io == "direct":
        raise ConfigError(f"{key}.io", "'direct' needs the slab layout, which is not in this version", "auto, buffered")
    return PageFileStore(
        name,
        [Path(path) for path in tier.path],
        capacity=tier.capacity,
        threads=tier.threads,
    )

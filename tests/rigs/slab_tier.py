"""A file tier of slabs, as a server opens it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hicache_ext.config import ExtraConfig, load_config
from hicache_ext.storage.tiers.file.multipath import SpreadStore
from hicache_ext.storage.tiers.file.opening import open_file_tier


def open_slab_tier(*paths: Path, capacity: int, **settings: Any) -> SpreadStore:
    """``settings``: other keys of the tier. Raises ConfigError and StoreSetupError, as a start does."""
    # A device that is not measured: that takes longer than most tests.
    disk = {"type": "file", "path": [str(path) for path in paths], "capacity": capacity, "layout": "slab"}
    disk |= {"io": "buffered", "threads": 2} | settings
    return open_file_tier("disk", load_config(ExtraConfig.around({"tiers": {"disk": disk}})).tiers["disk"])  # type: ignore

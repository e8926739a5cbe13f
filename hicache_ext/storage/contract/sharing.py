"""Whether other machines have the pages of a tier.

A shared tier is the pool: what a decode node writes there is found by prefill nodes, it is slow enough to be fetched
ahead, and with a nearer tier before it it is written in the background (tier_use.py).
"""

from __future__ import annotations

from pathlib import Path

from hicache_ext.config import FileTierConfig, RemoteTierConfig, TierConfig
from hicache_ext.runtime.mounts import MOUNTINFO
from hicache_ext.storage.tiers.file.file_system import Sharing, sharing_of_paths


def sharing_of(tier: TierConfig, mountinfo: Path = MOUNTINFO) -> Sharing:
    """Of a tier as configured, on this node. Asks no server."""
    directories = tier.directories()
    if not directories:
        remote = isinstance(tier, RemoteTierConfig)
        return Sharing(remote, "reached over the network" if remote else "of this machine")
    told = tier.shared if isinstance(tier, FileTierConfig) else None
    slabs = isinstance(tier, FileTierConfig) and tier.layout == "slab"
    return sharing_of_paths(directories, told, slabs=slabs, mountinfo=mountinfo)

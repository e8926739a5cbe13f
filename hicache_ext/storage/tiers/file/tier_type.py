"""``type: file``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from hicache_ext.storage.contract.diagnosis import Finding
from hicache_ext.storage.contract.registry import TierType
from hicache_ext.storage.tiers.file.config import FileTierConfig

if TYPE_CHECKING:
    from hicache_ext.storage.contract.store import PageStore
    from hicache_ext.storage.tiers.file.read_only import ReadOnlyStore

_ERRORS = ("EIO", "ENOSPC", "EDQUOT", "EROFS", "ENOENT", "ESTALE", "ETIMEDOUT", "unknown", "Error", "MapFullError")


def _read_only(name: str, tier: FileTierConfig) -> ReadOnlyStore | None:
    from hicache_ext.storage.tiers.file.read_only import ReadOnlyStore, cannot_be_written

    return ReadOnlyStore(name, tier) if cannot_be_written(tier) else None


class FileTier(TierType):
    """Local disks and shared file systems."""

    config = FileTierConfig

    def open(self, name: str, tier: FileTierConfig) -> PageStore:
        from hicache_ext.storage.tiers.file.opening import open_file_tier

        if tier.only_read and (store := _read_only(name, tier)) is not None:
            return store
        return open_file_tier(name, tier)

    def examine(self, name: str, tier: FileTierConfig) -> Sequence[Finding]:
        from hicache_ext.storage.tiers.file.examination import examine

        if tier.only_read and (store := _read_only(name, tier)) is not None:
            with closing(store):
                return store.diagnose()
        return examine(name, tier)

    def series(self) -> Mapping[str, Sequence[str]]:
        return {
            "bytes": ("evicted",),
            "evicted": ("capacity", "ttl"),
            "corrupt": ("seal", "unreadable", "not_a_file"),
            "rejected": ("capacity", "no_space", "held", "obstacle"),
            "error": _ERRORS,
            "io": ("unaligned",),
            "suspect": ("good",),
            "scrub": ("good", "bad", "ended", "failed"),
        }

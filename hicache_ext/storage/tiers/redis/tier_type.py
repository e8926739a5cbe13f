"""``type: redis``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hicache_ext.storage.contract.registry import TierType
from hicache_ext.storage.tiers.redis.config import RedisTierConfig

if TYPE_CHECKING:
    from hicache_ext.storage.contract.store import PageStore


class RedisTier(TierType):
    """A Redis or Valkey server, or a cluster of them."""

    config = RedisTierConfig

    def open(self, name: str, tier: RedisTierConfig) -> PageStore:
        """Open the tier. With ``required: false`` an unreachable server is attached once it can be reached."""
        from hicache_ext.storage.tiers.redis.store import RedisPageStore

        return RedisPageStore(name, tier)

    def series(self) -> Mapping[str, Sequence[str]]:
        from hicache_ext.storage.contract.reports import SUSPECTS

        return {
            "node": ("up", "down"),
            "connection": ("opened", "lost"),
            "redirect": ("moved", "ask"),
            "cleared": ("",),
            "suspect": SUSPECTS,
            "corrupt": ("type",),
            "rejected": ("memory", "readonly", "too_large", "clearing", "suspect", "moving"),
            "error": ("no_node", "redirected", "busy", "timeout", "protocol", "connection", "identity", "clear"),
        }

"""The Redis/Valkey tier: docs/redis.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_ext.storage.contract.store import PageStore
from hicache_ext.storage.tiers.redis.settings import RedisSettings
from hicache_ext.storage.tiers.redis.store import RedisPageStore

if TYPE_CHECKING:
    from hicache_ext.config.redis_tier import RedisTierConfig


def open_redis_tier(name: str, tier: RedisTierConfig) -> PageStore:
    """The store for ``tiers.<name>`` of type redis. Raises ConfigError or StoreSetupError.

    With ``required: false`` a server that cannot be reached yet is attached when it can.
    """
    return RedisPageStore(name, RedisSettings.of(tier), required=tier.required)

"""The object tier: pages in S3-compatible stores, Google Cloud Storage, Azure Blob Storage, or a directory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_ext.storage.contract.sharing import sharing_of
from hicache_ext.storage.tiers.object.client import make_client

if TYPE_CHECKING:
    from hicache_ext.config import ObjectTierConfig
    from hicache_ext.storage.tiers.object.store import ObjectPageStore


def open_object_tier(name: str, tier: ObjectTierConfig) -> ObjectPageStore:
    """The store for ``tiers.<name>`` of type object. Raises ConfigError or StoreSetupError."""
    client = make_client(name, tier)
    from hicache_ext.storage.tiers.object.store import ObjectPageStore

    return ObjectPageStore(
        name,
        client,
        url=tier.url,
        shared=sharing_of(tier).shared,
        timeout=tier.longest_call,
        concurrency=tier.concurrency,
        required=tier.required,
        reopen=lambda: make_client(name, tier),
    )

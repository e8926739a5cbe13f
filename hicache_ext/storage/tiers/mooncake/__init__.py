"""The Mooncake tier: pages in the memory of a Mooncake Store cluster that runs already."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_ext.storage.contract.store import PageStore

if TYPE_CHECKING:
    from hicache_ext.config import MooncakeTierConfig


def open_mooncake_tier(name: str, tier: MooncakeTierConfig) -> PageStore:
    """The store for ``tiers.<name>`` of type mooncake. Raises StoreSetupError.

    With ``required: false`` a pool that is down is no error: the store answers REJECTED and attaches by itself later.
    """
    from hicache_ext.storage.tiers.mooncake.attachment import Attachment
    from hicache_ext.storage.tiers.mooncake.engine import Engine
    from hicache_ext.storage.tiers.mooncake.pages import MooncakeStore

    attachment = Attachment(name, Engine(name, tier), required=tier.required)
    return MooncakeStore(name, tier, attachment)

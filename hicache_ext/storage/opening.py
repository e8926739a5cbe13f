"""From the configuration to one store."""

from __future__ import annotations

from hicache_ext.config import HicacheExtConfig
from hicache_ext.storage.reload import ReloadableStore


def open_tiers(config: HicacheExtConfig) -> ReloadableStore:
    """The store that SGLang's calls go to: every tier opened, its guards around it, the tiers put together.

    Raises StoreSetupError for a required tier that cannot start, after closing what was opened before; a tier with
    ``required: false`` is opened later by itself.
    """
    return ReloadableStore(config)

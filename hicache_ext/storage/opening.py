"""From the configuration to one store: opens every tier and puts them together."""

from __future__ import annotations

import logging

from hicache_ext.config import HicacheExtConfig, TierConfig
from hicache_ext.errors import ConfigError, StoreSetupError
from hicache_ext.storage.registry import open_tier
from hicache_ext.storage.store import PageStore
from hicache_ext.storage.tiered import TieredStore, TieringSettings

logger = logging.getLogger(__name__)


def open_tiers(config: HicacheExtConfig, tp_rank: int = 0) -> TieredStore:
    """The store that SGLang's calls go to, on the tensor-parallel rank ``tp_rank``.

    Raises StoreSetupError for a required tier that cannot start, after closing what was opened before; a tier with
    ``required: false`` is left out with a warning.
    """
    opened: dict[str, PageStore] = {}
    try:
        for name, tier in config.tiers.items():
            try:
                opened[name] = open_tier(name, _for_rank(name, tier, tp_rank))
            except StoreSetupError as error:
                if tier.required:
                    raise
                logger.warning("hicache_ext: %s; going on without it (required: false)", error)
    except BaseException:
        for store in opened.values():
            store.close()
        raise
    return TieredStore(
        retrieve=[opened[name] for name in config.retrieve_locations if name in opened],
        store=[opened[name] for name in config.store_locations if name in opened],
        promote_to=opened.get(config.promote_to) if config.promote_to else None,
        settings=TieringSettings.of(config),
    )


def _for_rank(name: str, tier: TierConfig, tp_rank: int) -> TierConfig:
    try:
        return tier.for_rank(tp_rank)
    except ConfigError as error:
        raise ConfigError(f"hicache_ext.tiers.{name}.{error.key}", error.problem, error.allowed) from None

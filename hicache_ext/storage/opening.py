"""From the configuration to one store: opens every tier and puts them together."""

from __future__ import annotations

import logging

from hicache_ext.config import HicacheExtConfig
from hicache_ext.errors import StoreSetupError
from hicache_ext.storage.pulling.measured_store import MeasuredStore
from hicache_ext.storage.registry import open_tier
from hicache_ext.storage.store import PageStore
from hicache_ext.storage.tiered import TieredStore

logger = logging.getLogger(__name__)


def open_tiers(config: HicacheExtConfig) -> TieredStore:
    """The store that SGLang's calls go to.

    Raises StoreSetupError for a required tier that cannot start, after closing what was opened before; a tier with
    ``required: false`` is left out with a warning.
    """
    opened: dict[str, PageStore] = {}
    try:
        for name, tier in config.tiers.items():
            try:
                opened[name] = open_tier(name, tier)
            except StoreSetupError as error:
                if tier.required:
                    raise
                logger.warning("hicache_ext: %s; going on without it (required: false)", error)
    except BaseException:
        for store in opened.values():
            store.close()
        raise
    if config.promote_to is not None:
        # Said aloud: a setting that is read and does nothing would be found out much later.
        logger.warning("hicache_ext.promote_to: promotion is not in this version; pages stay in the tier that has them")
    if config.pd.pull.mode == "adaptive":
        opened = {name: MeasuredStore(store) for name, store in opened.items()}
    return TieredStore(
        retrieve=[opened[name] for name in config.retrieve_locations if name in opened],
        store=[opened[name] for name in config.store_locations if name in opened],
    )

"""From the configuration to one store: opens every tier with its guards and combines the tiers."""

from __future__ import annotations

from collections.abc import Callable

from hicache_ext.config import HicacheExtConfig, ServerRole, TierConfig
from hicache_ext.errors import ConfigError
from hicache_ext.storage.tiering.reload import ReloadableStore


def open_tiers(config: HicacheExtConfig, *, writers: int = 1) -> ReloadableStore:
    """Open all tiers with their guards and return the store that SGLang's calls go to.
    ``writers``: number of ranks of the server that write their own pages.

    Raises StoreSetupError for a required tier that cannot start, after closing what was opened before; a tier with
    ``required: false`` opens later on its own.
    """
    return ReloadableStore(config, writers)


def server_view(role: ServerRole, tp_rank: int) -> Callable[[HicacheExtConfig], HicacheExtConfig]:
    """Return the view of a shared configuration file that applies to a server of ``role`` on this rank.

    The view raises ConfigError if the file has nothing for this rank.
    """

    def view(config: HicacheExtConfig) -> HicacheExtConfig:
        mine = config.for_role(role)
        tiers = {name: _for_rank(name, tier, tp_rank) for name, tier in mine.tiers.items()}
        return mine.model_copy(update={"tiers": tiers})

    return view


def _for_rank(name: str, tier: TierConfig, tp_rank: int) -> TierConfig:
    try:
        return tier.for_rank(tp_rank)
    except ConfigError as error:
        raise ConfigError(f"hicache_ext.tiers.{name}.{error.key}", error.problem, error.allowed) from None

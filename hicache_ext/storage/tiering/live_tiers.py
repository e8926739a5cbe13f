"""Tiers in use: opened, guarded, and held by the arrangements that read and write them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass

from hicache_ext.config import HicacheExtConfig, TierConfig
from hicache_ext.storage.contract.registry import open_tier
from hicache_ext.storage.contract.store import PageStore
from hicache_ext.storage.guards.composition import guarded, plan_guards
from hicache_ext.storage.guards.late_open import LateStore
from hicache_ext.storage.tiering.hot_swap import SharedStore
from hicache_ext.storage.tiering.pulling.measured_store import MeasuredStore
from hicache_ext.storage.tiering.tier_use import tier_use
from hicache_ext.storage.tiering.tiered import TieredStore, TieringSettings

logger = logging.getLogger(__name__)

_FIRST_WAIT = 10.0
"""Seconds that the start waits for a tier that is not required; it goes on opening in the background."""


@dataclass(frozen=True, slots=True)
class LiveTier:
    """A tier in use, and the configuration it has now."""

    config: TierConfig
    bare: SharedStore
    """The store as registry.py opened it."""
    guarded: SharedStore
    """The store with its guards, which are one holder of the bare one."""


def used_tiers(config: HicacheExtConfig) -> dict[str, TierConfig]:
    """The tiers that are read or written, in written order."""
    used = {*config.retrieve_locations, *config.store_locations}
    return {name: tier for name, tier in config.tiers.items() if name in used}


def open_live_tiers(configs: Mapping[str, TierConfig]) -> dict[str, LiveTier]:
    """Open all of these tiers, or none. Raises StoreSetupError or ConfigError."""
    opened: dict[str, LiveTier] = {}
    try:
        for name, config in configs.items():
            opened[name] = guard(config, SharedStore(_open(name, config)))
    except BaseException:
        close_unused(opened.values())
        raise
    return opened


def guard(config: TierConfig, bare: SharedStore, before: LiveTier | None = None) -> LiveTier:
    """Guards as configured around a store; ``before``: the tier in use with its old ones.

    Where they cannot be made, ``bare`` is let go of. Raises StoreSetupError.
    """
    known = None if before is None else before.guarded.store
    with ExitStack() as undo:
        handle = undo.enter_context(closing(bare.handle()))
        store = guarded(handle, plan_guards(config), known)
        undo.pop_all()
    return LiveTier(config, bare, SharedStore(store))


def close_unused(tiers: Iterable[LiveTier]) -> None:
    """Close tiers that no arrangement holds yet."""
    for tier in tiers:
        tier.guarded.handle().close()


def arrange(config: HicacheExtConfig, tiers: Mapping[str, LiveTier]) -> TieredStore:
    """The tiers together, as ``config`` orders them. They are held until what is returned is closed, or not at all."""
    with ExitStack() as undo:
        held: dict[str, PageStore] = {
            name: undo.enter_context(closing(tier.guarded.handle())) for name, tier in tiers.items()
        }
        if config.pd.pull.mode == "adaptive":
            held = {name: MeasuredStore(store) for name, store in held.items()}
        use = tier_use(config)
        logger.info("hicache_ext: %s", "; ".join(use.lines()))
        arranged = TieredStore(
            retrieve=[held[name] for name in config.retrieve_locations],
            store=[held[name] for name in config.store_locations],
            promote_to=None if use.promote_to is None else held[use.promote_to],
            settings=TieringSettings.of(config, use.async_tiers),
        )
        undo.pop_all()
    return arranged


def _open(name: str, config: TierConfig) -> PageStore:
    if config.required:
        return open_tier(name, config)
    shared = config.sharing().shared
    return LateStore(name, config.type, lambda: open_tier(name, config), shared=shared, first_wait=_FIRST_WAIT)

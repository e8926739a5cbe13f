"""Tiers in use: opened, with their guards around them, and a handle."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from hicache_ext.config import HicacheExtConfig, TierConfig
from hicache_ext.storage.contract.registry import open_tier
from hicache_ext.storage.contract.store import PageStore
from hicache_ext.storage.guards.late_open import LateStore
from hicache_ext.storage.guards.pipeline import GuardedStore, guarded, plan_guards
from hicache_ext.storage.tiering.admission.gate import AdmissionSettings
from hicache_ext.storage.tiering.pulling.measured_store import MeasuredStore
from hicache_ext.storage.tiering.tier_handle import TierHandle
from hicache_ext.storage.tiering.tier_use import tier_use
from hicache_ext.storage.tiering.tiered import Arrangement, TieringSettings

logger = logging.getLogger(__name__)

_FIRST_WAIT = 10.0
"""Seconds that the start waits for a tier that is not required; it goes on opening in the background."""


@dataclass(slots=True)
class LiveTier:
    """A tier in use, with the configuration and the guards it has now."""

    config: TierConfig
    bare: PageStore
    """The store as registry.py opened it."""
    guarded: PageStore
    """That store with its guards; the same one where it has none."""
    handle: TierHandle

    def close(self) -> None:
        self.handle.close()


def used_tiers(config: HicacheExtConfig) -> dict[str, TierConfig]:
    """The tiers that are read or written, in written order."""
    used = {*config.retrieve_locations, *config.store_locations}
    return {name: tier for name, tier in config.tiers.items() if name in used}


def open_live_tiers(configs: Mapping[str, TierConfig], role: str, *, measured: bool = False) -> dict[str, LiveTier]:
    """Open all of these tiers, or none. ``measured``: for the pull rule. Raises StoreSetupError or ConfigError."""
    opened: dict[str, LiveTier] = {}
    with ExitStack() as undo:
        for name, config in configs.items():
            bare = _open(name, config)
            with ExitStack() as unguarded:
                unguarded.callback(bare.close)
                store = guarded(bare, plan_guards(config))
                unguarded.pop_all()
            # Through the guards alone, which do not wait for ever.
            undo.callback(store.close)
            handle = TierHandle(MeasuredStore(store) if measured else store, bare=bare)
            handle.admit_by(AdmissionSettings.of(config, role))
            opened[name] = LiveTier(config, bare, store, handle)
        undo.pop_all()
    return opened


def let_go(store: PageStore) -> None:
    """Close the guards of a tier, and not the tier."""
    if isinstance(store, GuardedStore):
        store.let_go()


def arrange(config: HicacheExtConfig, tiers: Mapping[str, LiveTier]) -> Arrangement:
    """The tiers together, as ``config`` orders them."""
    use = tier_use(config)
    logger.info("hicache_ext: %s", "; ".join(use.lines()))
    return Arrangement(
        [tiers[name].handle for name in config.retrieve_locations],
        [tiers[name].handle for name in config.store_locations],
        None if use.promote_to is None else tiers[use.promote_to].handle,
        TieringSettings.of(config, use.async_tiers),
    )


def _open(name: str, config: TierConfig) -> PageStore:
    if config.required:
        return open_tier(name, config)
    shared = config.sharing().shared
    return LateStore(name, config.type, lambda: open_tier(name, config), shared=shared, first_wait=_FIRST_WAIT)

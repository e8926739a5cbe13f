"""Tiers in use: opened, with their guards around them, and a handle."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from hicache_ext.config import GuardsConfig, HicacheExtConfig, TierConfig
from hicache_ext.runtime.mounts import is_on_network
from hicache_ext.storage.contract.registry import open_tier
from hicache_ext.storage.contract.store import PageStore
from hicache_ext.storage.contract.wrapper import DelegatingStore
from hicache_ext.storage.tiering.settings import TieringSettings
from hicache_ext.storage.tiering.tier_handle import TierHandle
from hicache_ext.storage.tiering.tier_use import tier_use
from hicache_ext.storage.tiering.tiered import Arrangement

if TYPE_CHECKING:
    from hicache_ext.storage.guards.pipeline import GuardedStore
    from hicache_ext.storage.tiering.admission import AdmissionSettings

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
    written = {*config.store_locations, config.promote_to}
    used = {*config.retrieve_locations, *config.store_locations}
    return {
        name: tier if name in written else tier.not_written() for name, tier in config.tiers.items() if name in used
    }


def open_live_tiers(configs: Mapping[str, TierConfig], role: str, *, measured: bool = False) -> dict[str, LiveTier]:
    """Open all of these tiers, or none. ``measured``: for the pull rule. Raises StoreSetupError or ConfigError."""
    opened: dict[str, LiveTier] = {}
    with ExitStack() as undo:
        for name, config in configs.items():
            bare = _open(name, config)
            with ExitStack() as unguarded:
                unguarded.callback(bare.close)
                store = guard(config, bare)
                unguarded.pop_all()
            # Through the guards alone, which do not wait for ever.
            undo.callback(store.close)
            handle = TierHandle(store, bare=bare, measured=_measured(store) if measured else None)
            handle.admit_by(admission_of(config, role))
            opened[name] = LiveTier(config, bare, store, handle)
        undo.pop_all()
    return opened


def guard(config: TierConfig, bare: PageStore, before: PageStore | None = None) -> PageStore:
    """``bare`` with its guards as configured, or itself; ``before``: with those it had. Raises StoreSetupError."""
    if not _may_have_guards(config):
        return bare
    from hicache_ext.storage.guards.pipeline import guarded, plan_guards

    return guarded(bare, plan_guards(config), before)


def guards_of(store: PageStore, bare: PageStore) -> GuardedStore | None:
    """The guards that ``guard`` put around ``bare``."""
    return None if store is bare else cast("GuardedStore", store)


def let_go(store: PageStore, bare: PageStore) -> None:
    """Close the guards of a tier, and not the tier."""
    if (guards := guards_of(store, bare)) is not None:
        guards.let_go()


def _may_have_guards(config: TierConfig) -> bool:
    """False for a tier on local disks of which nothing else was asked: ``plan_guards`` would plan none for it."""
    on_network = config.remote or any(is_on_network(path) for path in config.directories())
    return on_network or config.guards != GuardsConfig() or config.timeout not in (None, math.inf)


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


# What is off is not imported: the modules of a feature are imported where it is switched on.


def _measured(store: PageStore) -> DelegatingStore:
    from hicache_ext.storage.tiering.pulling import MeasuredStore

    return MeasuredStore(store)


def admission_of(config: TierConfig, role: str) -> AdmissionSettings | None:
    """What decides which pages the tier is given; None where it is given all."""
    if config.admission == "all" and config.write_budget is None:
        return None
    from hicache_ext.storage.tiering.admission import AdmissionSettings

    return AdmissionSettings.of(config, role)


def _open(name: str, config: TierConfig) -> PageStore:
    if config.required:
        return open_tier(name, config)
    from hicache_ext.storage.guards.late_open import LateStore

    shared = config.sharing().shared
    return LateStore(name, config.type, lambda: open_tier(name, config), shared=shared, first_wait=_FIRST_WAIT)

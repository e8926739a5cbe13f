"""Opens the configured tiers with their guards, and replaces them while SGLang runs.

A reload that is refused, or whose new tiers cannot be opened, changes nothing. An accepted one takes effect between two
calls (``TieredStore.rearrange``), and work queued for tiers that stay continues. It runs on the caller's thread, never
on SGLang's. Reasons: docs/decisions/several-tiers.md.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from hicache_ext.config import HicacheExtConfig, TierConfig
from hicache_ext.config.problems import config_error, listed
from hicache_ext.errors import ConfigError, HicacheExtError, StoreError
from hicache_ext.page.transforms.header import LOSSY_CODECS
from hicache_ext.runtime.file_systems import is_on_network
from hicache_ext.storage.contract import tenants
from hicache_ext.storage.contract.abilities import Resizable, ability, layers
from hicache_ext.storage.contract.registry import open_tier
from hicache_ext.storage.contract.store import PageStore
from hicache_ext.storage.tiering.tier_handle import TierHandle
from hicache_ext.storage.tiering.tier_use import TieringSettings, tier_use
from hicache_ext.storage.tiering.tiered import Arrangement, TieredStore

if TYPE_CHECKING:
    from hicache_ext.page.transforms.sealing import Seal
    from hicache_ext.storage.contract.transforming.store import TransformedStore
    from hicache_ext.storage.tiering.admission import AdmissionSettings

logger = logging.getLogger(__name__)

_FIXED = {
    "role": "SGLang was launched for it",
    "model": "it is part of every page's identity",
    "kv_dtype": "it is part of every page's identity",
    "watch_config": "it is read at start",
}
"""Keys that a reload may not change -> why. Others (orders, tiers, limits) may change."""

_FIRST_WAIT = 10.0
"""Seconds that startup waits for a tier that is not required; opening continues in the background."""

_CAPACITY = "capacity"
"""The live key of a tier that is passed on to its store (``Resizable``)."""

_LATER = dict.fromkeys(
    ("pd", "longest_lease", "linker", "events", "tracing", "record"), ", in force from the next start on"
)
"""Keys that may change in the file and take effect at the next start."""


class ReloadableStore(TieredStore):
    """The tiers of a configuration, which a reload may replace by those of another. Threads: any."""

    def __init__(self, config: HicacheExtConfig, writers: int = 1) -> None:
        """Open the tiers; ``writers`` ranks of this server write to each. Raises StoreSetupError or ConfigError."""
        tier_use(config)  # before anything is opened: it may raise
        _put_tenants_in_force(config)
        self._config, self._writers = config, writers
        # As at the start: the identities of pages keep these codecs even after the last such tier is gone.
        self._lossy_codecs = config.lossy_codecs
        self._reloading = threading.Lock()
        self._live = open_live_tiers(used_tiers(config), config.role, writers, measured=_is_measured(config))
        with ExitStack() as undo:
            for tier in self._live.values():
                undo.callback(tier.close)
            self._begin(arrange(config, self._live))
            undo.pop_all()

    @property
    def config(self) -> HicacheExtConfig:
        """The configuration in force."""
        return self._config

    def check(self, config: HicacheExtConfig) -> None:
        """Raise ConfigError if a reload to ``config`` would be refused, as far as can be known in advance."""
        if problems := list(self._problems(config)):
            raise config_error(problems)
        tier_use(config)

    def reload(self, config: HicacheExtConfig) -> list[str]:
        """Apply ``config``; return what has changed, one line each.

        Returns when calls in flight have ended and removed tiers are closed. Raises ConfigError or StoreError, and
        then nothing has changed.
        """
        with self._reloading:
            self.check(config)
            changes = list(self._changes(config))
            if not changes:
                self._config = config
                return []
            self._put_in_force(config)
            _put_tenants_in_force(config)
            self._config = config
        for change in changes:
            logger.warning("hicache_ext: reloaded: %s", change)
        return changes

    def _put_in_force(self, config: HicacheExtConfig) -> None:
        wanted = used_tiers(config)
        before = dict(self._live)
        changed = {name: tier for name, tier in before.items() if name in wanted and tier.config != wanted[name]}
        try:
            with ExitStack() as undo:
                new = {name: tier for name, tier in wanted.items() if name not in before}
                opened = open_live_tiers(new, config.role, self._writers, measured=_is_measured(self._config))
                for tier in opened.values():
                    undo.callback(tier.close)
                seals = {name: seal for name in changed if (seal := _new_seal(name, before[name], wanted[name]))}
                for name, tier in changed.items():
                    undo.callback(_end, name, functools.partial(_resize, tier, tier.config))
                    _resize(tier, wanted[name])
                live = {name: opened.get(name) or before[name] for name in wanted}
                # Nothing after this can fail or take effect only partially.
                self.rearrange(arrange(config, live))
                undo.pop_all()
        except HicacheExtError:
            raise
        except Exception as error:
            raise StoreError(f"the new tiers cannot be used: {error!r}") from error
        self._live = live
        for name, seal in seals.items():
            # Pages sealed with a removed key are absent from here on.
            store = _transforming(before[name])
            assert store is not None
            store.put_seal(seal)
            # Drop pages prefetched with it, too: somebody with a leaked key may have forged them.
            self.drop_prefetched(before[name])
        for name, tier in changed.items():
            tier.admit_by(admission_of(wanted[name], config.role, self._writers))
            _put_limits(tier, wanted[name])
            tier.config = wanted[name]
        for name, tier in before.items():
            if name not in wanted:
                _end(name, tier.close)
        self.all_have_left()

    def _problems(self, config: HicacheExtConfig) -> Iterator[ConfigError]:
        for key, reason in _FIXED.items():
            if getattr(config, key) != getattr(self._config, key):
                yield ConfigError(f"hicache_ext.{key}", f"cannot change while the server runs: {reason}")
        directories = {directory: name for name, live in self._live.items() for directory in live.config.directories()}
        for name, tier in used_tiers(config).items():
            if tier.codec in LOSSY_CODECS and tier.codec not in self._lossy_codecs:
                problem = f"{tier.codec} cannot begin while the server runs: it is part of every page's identity"
                yield ConfigError(f"hicache_ext.tiers.{name}.codec", problem, "restart")
            if name in self._live:
                yield from _problems_of_tier(name, self._live[name], tier)
                try:
                    _new_seal(name, self._live[name], tier)
                except ConfigError as error:
                    yield error
                continue
            for directory in tier.directories():
                if directory in directories:
                    yield ConfigError(
                        f"hicache_ext.tiers.{name}.path",
                        f"is in use by tier {directories[directory]!r}; remove that one first, in a reload of its own",
                    )

    def _changes(self, config: HicacheExtConfig) -> Iterator[str]:
        wanted = used_tiers(config)
        for name in self._live:
            if name not in wanted:
                yield f"tier {name} is no longer used"
        for name, tier in wanted.items():
            if name not in self._live:
                yield f"tier {name} is used: {tier.summary()}"
            elif differing := _differing_keys(self._live[name].config, tier):
                yield f"tier {name}: new {listed(differing)}"
        for key in type(config).model_fields:
            if key != "tiers" and getattr(config, key) != getattr(self._config, key):
                yield f"new {key}{_LATER.get(key, '')}"


def _put_tenants_in_force(config: HicacheExtConfig) -> None:
    if config.tenants is not None or tenants.in_force() is not None:
        from hicache_ext.storage.contract.tenancy import put_in_force

        put_in_force(config.tenant_limits)


def _problems_of_tier(name: str, live: TierHandle, wanted: TierConfig) -> Iterator[ConfigError]:
    key = f"hicache_ext.tiers.{name}"
    remedy = "give the tier another name (the old one is then closed), or restart"
    if type(wanted) is not type(live.config):
        yield ConfigError(f"{key}.type", f"cannot change while the tier is in use; {remedy}")
        return
    for field in _differing_keys(live.config, wanted):
        if field == "timeout" and wanted.keeps_timeout:
            yield ConfigError(f"{key}.timeout", f"cannot change: the store was opened with it; {remedy}")
        elif field == _CAPACITY and field in wanted.live_keys:
            store = ability(live.bare, Resizable)
            if store is None or not store.can_resize(getattr(wanted, field)):
                yield ConfigError(f"{key}.{field}", f"cannot change in this layout while the tier is in use; {remedy}")
        elif field == "seal" and field in wanted.live_keys:
            if live.config.seal is None or wanted.seal is None or live.config.seal.mode != wanted.seal.mode:
                yield ConfigError(
                    f"{key}.seal", f"pages cannot be sealed in another way while the tier is in use; {remedy}"
                )
            elif _transforming(live) is None:
                yield ConfigError(f"{key}.seal", "cannot change before the tier could be opened")
        elif field not in wanted.live_keys:
            yield ConfigError(f"{key}.{field}", f"cannot change while the tier is in use; {remedy}")


def _transforming(live: TierHandle) -> TransformedStore | None:
    """Return the layer that seals and encodes a tier's pages; None if it has none or the tier is not open yet."""
    if live.config.seal is None and live.config.codec == "off":
        return None
    from hicache_ext.storage.contract.transforming.store import TransformedStore

    return ability(live.bare, TransformedStore)


def _new_seal(name: str, live: TierHandle, wanted: TierConfig) -> Seal | None:
    """Return the seal to apply, or None if it has not changed.

    Raises ConfigError, also for a key whose secret differs from the key in use with the same id, even if the
    configuration is unchanged: pages of both would share an id, and those of the old key would be lost unnoticed.
    """
    store, seal, key = _transforming(live), wanted.seal, f"hicache_ext.tiers.{name}.seal"
    if store is None or store.seal is None or seal is None:
        return None
    is_new = seal != live.config.seal
    try:
        found = seal.opened(key)
    except ConfigError:
        if is_new:
            raise
        # The keys cannot be read now, but they are already in use.
        return None
    in_use = {one.id: one for one in store.seal.keys}
    for number, reference in enumerate(seal.keys):
        for one in found.keys:
            if one.id == reference.id and one.id in in_use and not one.is_same(in_use[one.id]):
                problem = f"the id {one.id} has another secret than the one in use; give it another id"
                raise ConfigError(f"{key}.keys[{number}]", problem)
    return found if is_new else None


def _differing_keys(one: TierConfig, other: TierConfig) -> list[str]:
    return [key for key in type(one).model_fields if getattr(one, key) != getattr(other, key, None)]


def _end(name: str, close: Callable[[], None]) -> None:
    try:
        close()
    except Exception:
        logger.exception("hicache_ext: closing what tier %s no longer uses", name)


def _is_measured(config: HicacheExtConfig) -> bool:
    """Return whether the pull rule needs the tiers' costs. ``config``: of the start, as ``pd`` changes at a restart."""
    return config.pd.pull.mode == "adaptive"


def _resize(live: TierHandle, wanted: TierConfig) -> None:
    store = ability(live.bare, Resizable)
    if _CAPACITY in wanted.live_keys and store is not None:
        store.resize(getattr(wanted, _CAPACITY))


# -- tiers in use ------------------------------------------------------------------------------------------------------


def used_tiers(config: HicacheExtConfig) -> dict[str, TierConfig]:
    """Return the tiers that are read or written, in the order of the configuration."""
    written = {*config.store_locations, config.promote_to}
    used = {*config.retrieve_locations, *config.store_locations}
    return {
        name: tier if name in written else tier.not_written() for name, tier in config.tiers.items() if name in used
    }


def open_live_tiers(
    configs: Mapping[str, TierConfig], role: str, writers: int = 1, *, measured: bool = False
) -> dict[str, TierHandle]:
    """Open all of these tiers, or none. ``measured``: for the pull rule. Raises StoreSetupError or ConfigError."""
    opened: dict[str, TierHandle] = {}
    with ExitStack() as undo:
        for name, config in configs.items():
            bare = _open(name, config)
            with ExitStack() as unguarded:
                unguarded.callback(bare.close)
                store = guard(config, bare)
                unguarded.pop_all()
            # Close through the guards only, because they do not wait forever.
            undo.callback(store.close)
            # Modules of features that are off are not imported, here and below.
            if measured:
                from hicache_ext.storage.tiering.pulling import MeasuredStore

                store = MeasuredStore(store)
            handle = TierHandle(store, bare=bare)
            handle.admit_by(admission_of(config, role, writers))
            handle.config = config
            opened[name] = handle
        undo.pop_all()
    return opened


def guard(config: TierConfig, bare: PageStore) -> PageStore:
    """Return ``bare`` behind its guards as configured, or ``bare`` itself. Raises StoreSetupError."""
    if not _may_have_guards(config):
        return bare
    from hicache_ext.storage.guards.pipeline import GuardedStore, plan_guards

    return GuardedStore(bare, plan_guards(config))


def _put_limits(tier: TierHandle, config: TierConfig) -> None:
    """Apply the timeout of ``config``. Existing guards stay, with what they have learnt about the tier."""
    around: Any = next(layer for layer in layers(tier) if getattr(layer, "inner", None) is tier.bare)
    if not hasattr(around, "put_limits"):
        around.inner = guard(config, tier.bare)
        return
    from hicache_ext.storage.guards.pipeline import plan_guards

    around.put_limits(plan_guards(config))


def _may_have_guards(config: TierConfig) -> bool:
    """Return False for a tier on local disks without a timeout: its reads go straight into host pages."""
    on_network = config.remote or any(is_on_network(path) for path in config.directories())
    return on_network or config.timeout not in (None, math.inf)


def arrange(config: HicacheExtConfig, tiers: Mapping[str, TierHandle]) -> Arrangement:
    """Return the arrangement of ``tiers`` that ``config`` describes."""
    use = tier_use(config)
    logger.info("hicache_ext: %s", "; ".join(use.lines()))
    return Arrangement(
        [tiers[name] for name in config.retrieve_locations],
        [tiers[name] for name in config.store_locations],
        None if use.promote_to is None else tiers[use.promote_to],
        TieringSettings.of(config, use.async_tiers),
    )


def admission_of(config: TierConfig, role: str, writers: int = 1) -> AdmissionSettings | None:
    """Return the settings of a tier's admission, whose budget ``writers`` ranks share; None if all pages are admitted.
    A decode node learns nothing: it never sees who reads its pages."""
    budget, learned = config.write_budget, config.admission == "learned" and role != "decode"
    if not learned and budget is None:
        return None
    from hicache_ext.storage.tiering.admission import AdmissionSettings

    return AdmissionSettings(learned, None if budget is None else budget / writers, writers)


def _open(name: str, config: TierConfig) -> PageStore:
    if config.required:
        return open_tier(name, config)
    from hicache_ext.storage.guards.late_open import LateStore

    shared = config.sharing().shared
    return LateStore(name, config.type, lambda: open_tier(name, config), shared=shared, first_wait=_FIRST_WAIT)

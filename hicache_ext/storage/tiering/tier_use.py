"""How a configuration uses its tiers: explicit settings, and the defaults that follow from the tiers.

Several tiers are usually a near, private one and a far, shared one. By default pages found in the far tier are promoted
to the near one (``promote_to``); otherwise the far tier would be read again and again. A write waits only for the near
tier (``store_policies``); otherwise a slow pool would delay writes to the disk. On a decode node all writes are
synchronous by default: its writer has its own thread and must know what has reached the pool.
Reasons: docs/decisions/several-tiers.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hicache_ext.config import HicacheExtConfig
from hicache_ext.config.model import PROMOTE_NOTHING, SECTION, StorePolicy
from hicache_ext.config.tier import Sharing
from hicache_ext.errors import ConfigError

_CONFIGURED = "configured"


@dataclass(frozen=True, slots=True)
class TierUse:
    """Settings by tier name, each with its reason for human readers."""

    sharing: Mapping[str, Sharing]
    promote_to: str | None
    promotion_reason: str
    policies: Mapping[str, tuple[StorePolicy, str]]
    """Name of a written tier -> policy and reason."""

    @property
    def async_tiers(self) -> list[str]:
        return [name for name, (policy, _) in self.policies.items() if policy == "async"]

    def store_words(self) -> str:
        """Describe where writes go, and how."""
        return ", ".join(f"{name} ({policy}, {why})" for name, (policy, why) in self.policies.items()) or "nowhere"

    def promotion_words(self) -> str:
        return f"{self.promote_to or 'nothing'} ({self.promotion_reason})"

    def lines(self) -> list[str]:
        """Return lines for the log."""
        tiers = [f"tier {name}: {sharing}" for name, sharing in self.sharing.items()]
        return [*tiers, f"store to: {self.store_words()}", f"promote to: {self.promotion_words()}"]


def tier_use(config: HicacheExtConfig) -> TierUse:
    """Resolve the defaults for ``config`` on this node. Raises ConfigError for hints without a tier to fetch to."""
    used = [*config.retrieve_locations, *config.store_locations]
    sharing = {name: tier.sharing() for name, tier in config.tiers.items() if name in used}
    promote_to, reason = _promotion(config, sharing)
    if promote_to is None and config.role == "prefill" and config.pd.hints.enabled:
        problem = f"a prefill node brings the pages to the tier promote_to, and there is none ({reason})"
        raise ConfigError(f"{SECTION}.pd.hints.enabled", problem, "promote_to: the nearest of retrieve_locations")
    policies = {name: _policy(name, config, sharing) for name in config.store_locations}
    return TierUse(sharing, promote_to, reason, policies)


def _promotion(config: HicacheExtConfig, sharing: Mapping[str, Sharing]) -> tuple[str | None, str]:
    if config.promote_to is not None:
        return (None if config.promote_to == PROMOTE_NOTHING else config.promote_to), _CONFIGURED
    if config.role == "decode":
        return None, "default on decode nodes"
    if len(config.retrieve_locations) < 2:
        return None, "default: nothing lies further out"
    for name in config.retrieve_locations[:-1]:
        # A tier that this node only reads is filled by others.
        if not sharing[name].shared and name in config.store_locations:
            return name, "default: the nearest private tier"
    return None, "default: no private tier is read before another one, and written"


def _policy(name: str, config: HicacheExtConfig, sharing: Mapping[str, Sharing]) -> tuple[StorePolicy, str]:
    if name in config.store_policies:
        return config.store_policies[name], _CONFIGURED
    private = next((other for other in config.store_locations if not sharing[other].shared), None)
    if config.role != "decode" and sharing[name].shared and private is not None:
        return "async", f"default: shared, behind {private}"
    return "sync", "default"


PROMOTION_BUFFER = 128 << 20
"""Bytes of pages waiting to be promoted."""


@dataclass(frozen=True, slots=True)
class TieringSettings:
    """Limits of what ``TieredStore`` does in the background, per process: bytes and seconds. See docs/tiers.md."""

    async_tiers: frozenset[str] = frozenset()
    """Names of the stores that are written in the background."""
    store_buffer: int = 256 << 20
    """Bytes of payload that may wait to be written to one of them."""
    promotion_buffer: int = PROMOTION_BUFFER
    drain: float = 5.0
    """Seconds that close() goes on writing."""
    prefetch_buffer: int = 256 << 20
    """0: no prefetch."""
    prefetch_lifetime: float = 30.0
    prefetch_streams: int = 4
    """Concurrent fetches per far tier."""

    @classmethod
    def of(cls, config: HicacheExtConfig, async_tiers: Iterable[str]) -> TieringSettings:
        return cls(
            async_tiers=frozenset(async_tiers),
            store_buffer=config.background.store_buffer,
            drain=config.background.drain,
            prefetch_buffer=config.prefetch.buffer,
        )

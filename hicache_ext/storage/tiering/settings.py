"""Limits of what is done in the background, per process. See docs/tiers.md."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from hicache_ext.config import HicacheExtConfig

PROMOTION_BUFFER = 128 * 1024 * 1024
"""Bytes."""


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """``capacity`` in bytes of payload; ``drain`` in seconds: how long close() goes on writing."""

    capacity: int = 256 * 1024 * 1024
    drain: float = 5.0


@dataclass(frozen=True, slots=True)
class PrefetchSettings:
    """``buffer`` in bytes (0: no prefetch), ``lifetime`` in seconds, ``streams``: calls on far tiers at once."""

    buffer: int = 256 * 1024 * 1024
    lifetime: float = 30.0
    streams: int = 4


@dataclass(frozen=True, slots=True)
class TieringSettings:
    """What ``TieredStore`` and the queues of its tiers go by."""

    async_tiers: frozenset[str] = frozenset()
    """Names of the stores that are written in the background."""
    store_queue: QueueSettings = field(default_factory=QueueSettings)
    promotion_queue: QueueSettings = field(default_factory=lambda: QueueSettings(PROMOTION_BUFFER))
    prefetch: PrefetchSettings = field(default_factory=PrefetchSettings)

    @classmethod
    def of(cls, config: HicacheExtConfig, async_tiers: Iterable[str]) -> TieringSettings:
        background = config.background
        return cls(
            async_tiers=frozenset(async_tiers),
            store_queue=QueueSettings(background.store_buffer, background.drain),
            promotion_queue=QueueSettings(PROMOTION_BUFFER, background.drain),
            prefetch=PrefetchSettings(config.prefetch.buffer),
        )

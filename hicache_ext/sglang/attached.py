"""The backends attached in this process: hooks find them here without importing SGLang's storage modules."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from hicache_ext.pd.pool_writer import Pool
    from hicache_ext.runtime.metrics import TierMetrics
    from hicache_ext.storage.serving.hints import HintSender

    class AttachedBackend(Pool, Protocol):
        """What hooks need of the backend."""

        @property
        def flushes_with_cache(self) -> bool: ...

        def suspend(self, reason: str) -> None: ...

        def resume(self) -> None: ...

        def advance_weights_epoch(self, nonce: str) -> None: ...

        def export_also(self, metrics: TierMetrics) -> None: ...

        def writes_on_every_rank(self, pool: str) -> bool: ...

        def hint_sender(self, metrics: TierMetrics) -> HintSender | None: ...


_attached: weakref.WeakSet[AttachedBackend] = weakref.WeakSet()


def attach(backend: AttachedBackend) -> None:
    _attached.add(backend)


def detach(backend: AttachedBackend) -> None:
    _attached.discard(backend)


def attached_backends() -> list[AttachedBackend]:
    """Backends that are not closed. Any thread."""
    return list(_attached)

"""The backends attached in this process: hooks find them here without importing SGLang's storage modules."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hicache_ext.sglang.backend import HiCacheExtBackend

_attached: weakref.WeakSet[HiCacheExtBackend] = weakref.WeakSet()


def attach(backend: HiCacheExtBackend) -> None:
    _attached.add(backend)


def detach(backend: HiCacheExtBackend) -> None:
    _attached.discard(backend)


def attached_backends() -> list[HiCacheExtBackend]:
    """Those that are not closed, on any thread."""
    return list(_attached)

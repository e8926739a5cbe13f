"""Tier type -> store, imported only when a configuration names it."""

from __future__ import annotations

import importlib
from typing import Any

from hicache_ext.errors import StoreSetupError
from hicache_ext.storage.store import PageStore

_OPENERS: dict[str, tuple[str, str, str | None]] = {
    "file": ("hicache_ext.storage.file", "open_file_tier", None),
    "redis": ("hicache_ext.storage.remote.redis", "open_redis_tier", "redis"),
}
"""Module, function, and the extra of this package that brings what the module imports."""


def open_tier(name: str, tier: Any) -> PageStore:
    """The store of one configured tier. Raises StoreSetupError or ConfigError with a sentence."""
    try:
        module_name, function_name, extra = _OPENERS[tier.type]
    except KeyError:
        raise StoreSetupError(name, f"no store for type {tier.type!r}") from None
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if extra is None or (error.name or "").startswith("hicache_ext"):
            raise
        hint = f"pip install 'hicache-ext[{extra}]'"
        raise StoreSetupError(name, f"the package {error.name!r} is not installed", [hint]) from None
    store: PageStore = getattr(module, function_name)(name, tier)
    return store

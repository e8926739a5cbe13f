"""Tier type -> store, imported only when a configuration names it."""

from __future__ import annotations

import importlib
from typing import Any

from hicache_ext.errors import StoreSetupError
from hicache_ext.storage.store import PageStore

_OPENERS = {
    "file": ("hicache_ext.storage.file", "open_file_tier"),
    "object": ("hicache_ext.storage.remote.object", "open_object_tier"),
}


def open_tier(name: str, tier: Any) -> PageStore:
    """The store of one configured tier. Raises StoreSetupError or ConfigError with a sentence."""
    try:
        module_name, function_name = _OPENERS[tier.type]
    except KeyError:
        raise StoreSetupError(name, f"no store for type {tier.type!r}") from None
    opener = getattr(importlib.import_module(module_name), function_name)
    store: PageStore = opener(name, tier)
    return store

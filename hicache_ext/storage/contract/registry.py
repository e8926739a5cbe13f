"""Tier type -> store, imported only when a configuration names it."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import closing
from typing import Any

from hicache_ext.errors import StoreSetupError
from hicache_ext.storage.contract.diagnosis import Diagnosable, Finding, Level
from hicache_ext.storage.contract.store import PageStore

_OPENERS: dict[str, tuple[str, str, str | None]] = {
    "file": ("hicache_ext.storage.tiers.file", "open_file_tier", None),
    "mooncake": ("hicache_ext.storage.tiers.mooncake", "open_mooncake_tier", "mooncake"),
    "object": ("hicache_ext.storage.tiers.object", "open_object_tier", "object"),
    "redis": ("hicache_ext.storage.tiers.redis", "open_redis_tier", "redis"),
}
"""Module, function, and the extra of this package that brings what the module imports."""


_EXAMINERS: dict[str, tuple[str, str]] = {
    "file": ("hicache_ext.storage.tiers.file.diagnosis", "examine"),
    "object": ("hicache_ext.storage.tiers.object.diagnosis", "examine"),
}
"""Of types that are looked at without being opened: module and function."""


def examine_tier(name: str, tier: Any) -> Sequence[Finding]:
    """What there is to say of one configured tier, for tools: what it holds stays as it is.

    Raises StoreSetupError or ConfigError with a sentence where it cannot be opened.
    """
    if tier.type in _EXAMINERS:
        module_name, function_name = _EXAMINERS[tier.type]
        findings: Sequence[Finding] = getattr(importlib.import_module(module_name), function_name)(name, tier)
        return findings
    with closing(open_tier(name, tier)) as store:
        if isinstance(store, Diagnosable):
            return store.diagnose()
        return [Finding("diagnosis", Level.NOTE, "this type of tier has no diagnosis of its own")]


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

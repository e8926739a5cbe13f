"""Our tier beside the rivals of its engine."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

from hicache_ext.bench.pool import Contender, OurClient, Pages, PoolClient
from hicache_ext.config import tier_types
from hicache_ext.storage.contract.registry import open_tier
from hicache_ext.storage.contract.store import PageStore

_TIMEOUT = 60.0
"""Seconds a call of ours may take here: a slow machine is measured, not cut off."""


def ours(
    engine: str,
    tier_of: Callable[[Any], dict[str, Any]],
    name: str = "hicache_ext",
    open_store: Callable[[str, Any], PageStore] = open_tier,
) -> Contender:
    """Our tier; ``tier_of`` makes its configuration from what the server gave."""
    model = tier_types().get(engine)
    missing = f"missing: this version has no tier of type {engine}" if model is None else None

    def open_client(place: Any, memory: Sequence[Pages]) -> PoolClient:
        assert model is not None
        tier = model.model_validate({"type": engine, "timeout": _TIMEOUT, **tier_of(place)})
        return OurClient(open_store("bench", tier))

    return Contender(name, open_client, ours=True, missing=missing)


def package(name: str) -> str | None:
    return None if importlib.util.find_spec(name) else f"missing: the package {name}"

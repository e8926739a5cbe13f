"""The strongest rivals that can be installed, as contenders that the package's own harness (hicache_ext.bench) runs.

An engine is a context that starts its server and gives the contenders by name, and the names of those that are its own
clients, to which ratios are. It raises CommandError where the server is missing.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from hicache_ext.bench.pool import Open, OurClient
from hicache_ext.config import tier_types
from hicache_ext.storage.contract.registry import open_tier

Engine = Callable[[Path], AbstractContextManager[tuple[dict[str, Open], Iterable[str]]]]

_TIMEOUT = 60.0
"""Seconds a call of ours may take here: a slow machine is measured, not cut off."""


def ours(engine: str, tier: dict[str, Any]) -> Open:
    """Return how to open our tier of this configuration."""
    model = tier_types()[engine].model_validate({"type": engine, "timeout": _TIMEOUT, **tier})
    return lambda memory: OurClient(open_tier("bench", model))

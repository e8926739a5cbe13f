"""Slow and dead tiers inside a real server of the rig, by an environment variable.

``HICACHE_EXT_RIG_TIER_FAULT=slow:0.5`` makes every call of every tier take half a second longer, ``dead`` makes
every call fail, and ``dead:30`` makes them fail from 30 s after the tier was opened. For tests; without the variable
nothing is hooked.
"""

from __future__ import annotations

import os
import threading
from typing import Any

from hicache_ext.testing.faults import FailingStore, SlowStore

VARIABLE = "HICACHE_EXT_RIG_TIER_FAULT"
_TARGET = "hicache_ext.storage.opening.open_tier"


def register() -> None:
    """Hook the opening of tiers in this process if the variable asks for it."""
    if not os.environ.get(VARIABLE):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if not HookRegistry._hooks.get(_TARGET):
        HookRegistry.register(_TARGET, after_open, HookType.AFTER)


def after_open(store: Any, *_arguments: Any) -> Any:
    """AFTER ``open_tier``: the store with the fault around it. Raises ``ValueError`` for an unknown fault."""
    kind, _, amount = os.environ[VARIABLE].partition(":")
    if kind == "slow":
        return SlowStore(store, float(amount))
    if kind != "dead":
        raise ValueError(f"{VARIABLE}: slow:SECONDS, dead or dead:SECONDS, not {kind!r}")
    failing = FailingStore(store)
    if amount:
        failing.active = False
        timer = threading.Timer(float(amount), setattr, (failing, "active", True))
        timer.daemon = True
        timer.start()
    return failing

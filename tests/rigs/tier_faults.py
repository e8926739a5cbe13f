"""Slow and dead tiers inside a real server of the rig, by an environment variable.

``HICACHE_EXT_RIG_TIER_FAULT=slow:0.5`` makes every call of every tier take half a second longer, ``dead`` makes
every call fail. ``file:PATH`` does what the file says at the moment of each call: one of these, or nothing, so that one
server is measured over a pool that slows, dies and comes back. For tests; without the variable nothing is hooked.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hicache_ext.storage.contract.store import GetResult, PageBatch, PageStore, SetResult
from hicache_ext.storage.contract.wrapper import DelegatingStore
from tests.rigs.faults import FailingStore, SlowStore

VARIABLE = "HICACHE_EXT_RIG_TIER_FAULT"
_TARGET = "hicache_ext.storage.tiering.reload.open_tier"


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
    if kind == "file":
        return DirectedStore(store, Path(amount))
    return faulty(store, kind, amount)


def faulty(store: PageStore, kind: str, amount: str) -> PageStore:
    """``store`` with a fault around it. Raises ``ValueError`` for an unknown one."""
    if kind == "slow":
        return SlowStore(store, float(amount))
    if kind == "dead" and not amount:
        return FailingStore(store)
    raise ValueError(f"{VARIABLE}: slow:SECONDS, dead or file:PATH, not {kind!r}")


class DirectedStore(DelegatingStore):
    """Has the fault that a file names when a call begins; an absent or empty file is no fault."""

    def __init__(self, inner: PageStore, file: Path) -> None:
        super().__init__(inner)
        self._file = file

    def _now(self) -> PageStore:
        try:
            kind, _, amount = self._file.read_text().strip().partition(":")
        except FileNotFoundError:
            kind = amount = ""
        return faulty(self.inner, kind, amount) if kind else self.inner

    def get(self, batch: PageBatch) -> list[GetResult]:
        return self._now().get(batch)

    def set(self, batch: PageBatch) -> list[SetResult]:
        return self._now().set(batch)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return self._now().contains(keys)

    def count_leading(self, keys: Sequence[bytes]) -> int:
        return self._now().count_leading(keys)


def direct(file: Path, fault: str) -> None:
    """Have every ``DirectedStore`` of ``file`` do as ``fault`` says from its next call on."""
    scratch = file.with_suffix(".new")
    scratch.write_text(fault)
    scratch.replace(file)

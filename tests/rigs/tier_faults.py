"""Slow and dead tiers inside a real server of the rig, by an environment variable.

``HICACHE_EXT_RIG_TIER_FAULT=slow:0.5`` makes every call of every tier take half a second longer, ``dead`` makes
every call fail; ``wrong:KIND:LAYERS:HEADS:DIMENSION`` damages the float32 KV (page_first) of what was read, where no
check sees it (``damaged``); ``late`` gives states of recurrent layers that were written before those that are asked
for; ``adapters`` leaves adapters out of what pages are called. ``file:PATH`` does what the file says at the moment of
each call: one of the first three, or nothing, so that one server is measured over a pool that slows, dies and comes
back. For tests; without the variable nothing is hooked.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hicache_ext.page.envelope import IDENTITY_LENGTH
from hicache_ext.storage.contract.store import DelegatingStore, GetResult, PageBatch, PageStore, SetResult
from tests.rigs.faults import FailingStore, SlowStore

VARIABLE = "HICACHE_EXT_RIG_TIER_FAULT"
_TARGET = "hicache_ext.storage.tiering.reload.open_tier"


def register() -> None:
    """Hook the opening of tiers in this process if the variable asks for it."""
    if not os.environ.get(VARIABLE):
        return
    if os.environ[VARIABLE] == "adapters":
        from hicache_ext.sglang import model_weights

        setattr(model_weights, "namespaced_extra_key", lambda extra_key, adapter="": extra_key)  # noqa: B010
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if not HookRegistry._hooks.get(_TARGET):
        HookRegistry.register(_TARGET, after_open, HookType.AFTER)


def after_open(store: Any, *_arguments: Any) -> Any:
    """AFTER ``open_tier``: the store with the fault around it. Raises ``ValueError`` for an unknown fault."""
    kind, _, amount = os.environ[VARIABLE].partition(":")
    if kind == "late":
        return LateStates(store)
    if kind == "file":
        return DirectedStore(store, Path(amount))
    return faulty(store, kind, amount)


def faulty(store: PageStore, kind: str, amount: str) -> PageStore:
    """``store`` with a fault around it. Raises ``ValueError`` for an unknown one."""
    if kind == "slow":
        return SlowStore(store, float(amount))
    if kind == "dead" and not amount:
        return FailingStore(store)
    if kind == "wrong":
        fault, *shape = amount.split(":")
        return WrongStore(store, fault, tuple(map(int, shape)))
    raise ValueError(f"{VARIABLE}: slow:SECONDS, dead, wrong:KIND:SHAPE or file:PATH, not {kind!r}")


class WrongStore(DelegatingStore):
    """Damages what was read, after all checks."""

    def __init__(self, inner: PageStore, fault: str, shape: tuple[int, ...]) -> None:
        super().__init__(inner)
        self._fault, self._shape = fault, shape

    def get(self, batch: PageBatch) -> list[GetResult]:
        results = self.inner.get(batch)
        pages = [
            [np.frombuffer(segment, np.float32).reshape(-1, *self._shape) for segment in batch.buffers[position]]
            for position, result in enumerate(results)
            if result is GetResult.HIT
        ]
        for page, read in zip(pages, [[part.copy() for part in page] for page in pages][-1:] + pages, strict=False):
            for part, of_neighbour in zip(page, read, strict=True):
                part[:] = damaged(self._fault, part, of_neighbour)
        return results


class LateStates(DelegatingStore):
    """Gives the state of a boundary before the one that is asked for, after all checks."""

    def __init__(self, inner: PageStore) -> None:
        super().__init__(inner)
        self._digests: set[bytes] = set()
        self._written: dict[bytes, bytes] = {}

    def register_identity(self, digest: bytes, document: dict[str, Any]) -> None:
        super().register_identity(digest, document)
        if document["pool"]["name"] == "mamba":
            self._digests.add(digest)

    def set(self, batch: PageBatch) -> list[SetResult]:
        for key, segments in zip(batch.keys, batch.buffers, strict=True):
            if key[:IDENTITY_LENGTH] in self._digests:
                self._written.setdefault(key, b"".join(bytes(segment) for segment in segments))
        return super().set(batch)

    def get(self, batch: PageBatch) -> list[GetResult]:
        results = super().get(batch)
        states = list(self._written)
        for key, segments in zip(batch.keys, batch.buffers, strict=True):
            at = states.index(key) if key in self._written else 0
            begin = 0
            for segment in segments if at else ():
                view = memoryview(segment).cast("B")
                view[:] = self._written[states[at - 1]][begin : begin + len(view)]
                begin += len(view)
        return results


def damaged(fault: str, part: npt.NDArray[np.float32], neighbour: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Keys or values of a page ``[token, layer, head, dimension]`` with a fault, made of these and another page's."""
    wrong = part.copy()
    if fault == "head":
        wrong[:, 0, 0] = 0
    elif fault == "layers":
        wrong[:, [0, 1]] = part[:, [1, 0]]
    elif fault == "page":
        wrong[:] = neighbour
    elif fault == "unscaled":
        wrong[:] = np.rint(part / (np.abs(part).max(axis=-1, keepdims=True) / 127 + 1e-9))
    else:
        raise ValueError(f"{VARIABLE}: wrong:head, layers, page or unscaled, not {fault!r}")
    return wrong


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

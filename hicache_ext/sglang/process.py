"""The attached backends and loaded models of this SGLang process, for hooks, which must not import SGLang's storage
modules."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from hicache_ext.page.fingerprint import ModelFingerprint


@dataclass(slots=True)
class LoadedModel:
    runner: Any
    """SGLang's ModelRunner: only it knows the resolved values of some launch arguments."""
    draft: bool
    fingerprint: ModelFingerprint


loaded: list[LoadedModel] = []
"""Models in order of loading."""


def target() -> LoadedModel | None:
    """Return the target model; None outside a server, and if the hook saw no load."""
    return next((model for model in loaded if not model.draft), None)


def drafts() -> list[LoadedModel]:
    return [model for model in loaded if model.draft]


attached: weakref.WeakSet[Any] = weakref.WeakSet()


def attached_backends() -> list[Any]:
    """Return the backends that are not closed. Any thread may call."""
    return list(attached)

"""What this process of SGLang's holds, for hooks, which must not import SGLang's storage modules: the backends that are
attached, and the models that were loaded."""

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
"""In the order of loading."""


def target() -> LoadedModel | None:
    """None outside a server, and where the hook saw no load."""
    return next((model for model in loaded if not model.draft), None)


def drafts() -> list[LoadedModel]:
    return [model for model in loaded if model.draft]


attached: weakref.WeakSet[Any] = weakref.WeakSet()


def attached_backends() -> list[Any]:
    """Backends that are not closed. Any thread."""
    return list(attached)

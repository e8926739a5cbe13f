"""Keeps L3 honest across online weight updates: SGLang does not tell its storage backend that the weights changed.

Two hooks on the scheduler. After an update, the backend answers nothing and stores nothing until SGLang has flushed its
caches: until then L1 and L2 hold KV of the old weights, which must not enter L3 under the new epoch. With the flush the
backend moves on to a new weights epoch, hence to other keys.

The new epoch is equal on all ranks of one launch and different for every launch and update: it digests a launch id
(made by the first process that loads the plugin and inherited by the others), a counter, and what the request says.
"""

from __future__ import annotations

import hashlib
import logging
import os
import uuid
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

LAUNCH_ID_VARIABLE = "HICACHE_EXT_LAUNCH_ID"

UPDATE_TARGET = (
    "sglang.srt.managers.scheduler_components.weight_updater"
    ".SchedulerWeightUpdaterManager.flush_cache_after_weight_update"
)
FLUSH_TARGET = "sglang.srt.managers.scheduler.Scheduler.flush_cache"

NOT_FLUSHED = "the weights were updated and SGLang's cache is not flushed yet"

_updates = 0
_nonce: str | None = None
"""Of the last update in this process; None while the weights are those that were loaded."""
_flushed = True
"""Whether SGLang's caches hold nothing from before that update."""


def make_launch_id() -> None:
    """Called in every process at plugin load; the first one (the launcher) decides for its children."""
    os.environ.setdefault(LAUNCH_ID_VARIABLE, uuid.uuid4().hex)


def around_flush_after_update(original: Callable[..., Any], manager: Any, request: Any, *arguments: Any) -> Any:
    """AROUND hook [scheduler thread]: the weights have just changed, the cache is about to be flushed."""
    global _updates, _nonce, _flushed
    _updates += 1
    facts = (
        os.environ.get(LAUNCH_ID_VARIABLE, ""),
        str(_updates),
        str(getattr(request, "weight_version", None)),
        str(getattr(request, "model_path", None)),
    )
    _flushed = False
    _nonce = hashlib.sha256("\0".join(facts).encode()).hexdigest()[:16]
    for backend in _backends():
        backend.suspend(NOT_FLUSHED)
    return original(manager, request, *arguments)


def after_flush(result: Any, *_: Any, **__: Any) -> None:
    """AFTER hook [scheduler thread]: a successful flush ends the suspension, under the new epoch."""
    global _flushed
    if not result or _nonce is None or _flushed:
        return
    _flushed = True
    for backend in _backends():
        if backend.flushes_with_cache:
            backend.advance_weights_epoch(_nonce)
            backend.resume()
        else:
            # A decode node's offload queue is not flushed with the cache: it may still hold pages of the old weights.
            logger.warning("hicache_ext: the weights were updated; this decode node stores no KV until it is restarted")


def updated_to() -> str | None:
    """The nonce of the last update in this process: a backend that is attached later computes with those weights."""
    return _nonce


def caches_are_flushed() -> bool:
    """Whether everything in SGLang's caches was computed with the weights of now."""
    return _flushed


def register() -> None:
    """Put both hooks into SGLang's registry."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(UPDATE_TARGET, around_flush_after_update, HookType.AROUND)
    HookRegistry.register(FLUSH_TARGET, after_flush, HookType.AFTER)


def _backends() -> list[Any]:
    import sys

    # A process without a backend (tokenizer, detokenizer) must not import SGLang's storage modules for this.
    module = sys.modules.get("hicache_ext.storage.backend")
    return module.live_backends() if module is not None else []

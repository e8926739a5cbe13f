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

_NOT_FLUSHED = "the weights were updated and SGLang's cache is not flushed yet"

_updates = 0
_pending_nonce: str | None = None


def make_launch_id() -> None:
    """Called in every process at plugin load; the first one (the launcher) decides for its children."""
    os.environ.setdefault(LAUNCH_ID_VARIABLE, uuid.uuid4().hex)


def around_flush_after_update(original: Callable[..., Any], manager: Any, request: Any, *arguments: Any) -> Any:
    """AROUND hook [scheduler thread]: the weights have just changed, the cache is about to be flushed."""
    global _updates, _pending_nonce
    _updates += 1
    facts = (
        os.environ.get(LAUNCH_ID_VARIABLE, ""),
        str(_updates),
        str(getattr(request, "weight_version", None)),
        str(getattr(request, "model_path", None)),
    )
    _pending_nonce = hashlib.sha256("\0".join(facts).encode()).hexdigest()[:16]
    for backend in _backends():
        backend.suspend(_NOT_FLUSHED)
    return original(manager, request, *arguments)


def after_flush(result: Any, *_: Any, **__: Any) -> None:
    """AFTER hook [scheduler thread]: a successful flush ends the suspension, under the new epoch."""
    global _pending_nonce
    if not result or _pending_nonce is None:
        return
    nonce, _pending_nonce = _pending_nonce, None
    for backend in _backends():
        if backend.flushes_with_cache:
            backend.advance_weights_epoch(nonce)
            backend.resume()
        else:
            # A decode node's offload queue is not flushed with the cache: it may still hold pages of the old weights.
            logger.warning("hicache_ext: the weights were updated; this decode node stores no KV until it is restarted")


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

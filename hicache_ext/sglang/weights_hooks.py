"""Hooks for online weight updates, of which SGLang does not tell its storage backend.

Every call that may change weights counts as a change, before it runs and also if it fails: an update that stops
half-way leaves unknown weights. From then on the backend serves and stores nothing until SGLang has flushed its caches,
because L1 and L2 hold KV of the old weights. With the flush a new weights epoch begins, hence other keys.

An epoch is a random number drawn by the first rank of a tensor-parallel group and broadcast to the others, which SGLang
brings to the same point. No other launch or update has the same. Reasons: docs/decisions/weights-identity.md.
"""

from __future__ import annotations

import logging
import uuid
from typing import Any

from hicache_ext.sglang.attached import attached_backends

logger = logging.getLogger(__name__)

NOT_FLUSHED = "the weights were updated and SGLang's cache is not flushed yet"

_nonce: str | None = None
"""The epoch of the last update in this process; None while the weights are those that were loaded."""
_flushed = True
"""Whether SGLang's caches hold nothing from before that update."""


def before_update(manager: Any, *_: Any, **__: Any) -> None:
    """BEFORE hook [scheduler thread]: the weights are about to change."""
    global _nonce, _flushed
    _nonce = _agreed(getattr(manager, "tp_cpu_group", None))
    _flushed = False
    for backend in attached_backends():
        backend.suspend(NOT_FLUSHED)


def before_release(manager: Any, recv_req: Any, *_: Any, **__: Any) -> None:
    """BEFORE hook [scheduler thread]: memory of the weights is released, and comes back with any content."""
    tags = getattr(recv_req, "tags", None)
    if (not tags or "weights" in tags) and not _backed_up():
        before_update(manager)


def after_flush(result: Any, *_: Any, **__: Any) -> None:
    """AFTER hook [scheduler thread]: a successful flush ends the suspension, under the new epoch."""
    global _flushed
    if not result or _nonce is None or _flushed:
        return
    _flushed = True
    for backend in attached_backends():
        if backend.flushes_with_cache:
            backend.advance_weights_epoch(_nonce)
            backend.resume()
        else:
            # The flush does not empty a decode node's offload queue: it may hold pages of the old weights.
            logger.warning("hicache_ext: the weights were updated; this decode node stores no KV until it is restarted")


def updated_to() -> str | None:
    """The epoch of the last update in this process, for backends that are attached later."""
    return _nonce


def caches_are_flushed() -> bool:
    """Whether everything in SGLang's caches was computed with the present weights."""
    return _flushed


def _agreed(group: Any) -> str:
    """A random number, equal on all ranks of ``group``. Ranks that cannot agree get different ones: misses, no harm."""
    drawn = [uuid.uuid4().hex[:16]]
    try:
        import torch.distributed as ranks

        if group is not None and ranks.is_initialized() and ranks.get_world_size(group) > 1:
            ranks.broadcast_object_list(drawn, src=ranks.get_process_group_ranks(group)[0], group=group)
    except Exception as error:  # noqa: BLE001 - an update must go on
        logger.warning("hicache_ext: the ranks could not agree on a weights epoch and will not find pages: %s", error)
    return str(drawn[0])


def _backed_up() -> bool:
    """Whether SGLang keeps a backup of the weights in host memory and restores it."""
    from hicache_ext.sglang.launch_facts import resolved

    try:
        return bool(resolved("enable_weights_cpu_backup"))
    except Exception as error:  # noqa: BLE001 - not known means no
        logger.debug("whether weights are backed up is not known: %s", error)
        return False

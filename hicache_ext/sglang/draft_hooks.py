"""A hook for draft models with heads beside an MLA target, which SGLang would store from rank 0 only.

An MLA target has the same KV on all tensor-parallel ranks, so SGLang lets one rank write it, and with it all pools
beside it. The heads of an MHA draft differ from rank to rank. SGLang knows that for Mooncake, by name. Of a ``dynamic``
backend it asks ``should_backup`` on each rank for each pool, and the hook answers what is true for ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hicache_ext.sglang.attached import attached_backends


def around_should_backup(
    original: Callable[..., bool], controller: Any, transfer: Any, *later: Any, **named: Any
) -> bool:
    """AROUND hook [backup thread]: whether this rank writes its pages of a pool."""
    if original(controller, transfer, *later, **named):
        return True
    storage = getattr(controller, "storage_backend", None)
    # SGLang's fault injector stands around the backend.
    ours = {id(storage), id(getattr(storage, "_backend", None))}
    name = str(getattr(transfer.name, "value", transfer.name))
    return any(id(backend) in ours and backend.writes_on_every_rank(name) for backend in attached_backends())

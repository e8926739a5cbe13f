"""How long this node takes to compute a prefix, measured at SGLang's scheduler: two hooks around its batches.

SGLang's own figure (``input throughput`` in its log) divides by the time since the batch before, idle time included,
and is far too low on a node that waits for work. Here a batch takes from its start, or from the end of the one before
when that is later (batches overlap), to the moment its result is there.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

from hicache_ext.storage.tiering.pulling.sized_cost import SizedCost

prefill_cost = SizedCost()
"""Of this process's scheduler, in tokens."""

_started: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()
_last_result = 0.0


def around_run(original: Callable[..., Any], scheduler: Any, batch: Any, *arguments: Any, **keywords: Any) -> Any:
    """``run_batch`` [scheduler thread]."""
    # SGLang may hand a copy of the batch to its result: what both share is their list of requests.
    for request in batch.reqs[:1] if _is_prefill(batch) else ():
        _started[request] = time.perf_counter()
    return original(scheduler, batch, *arguments, **keywords)


def around_result(original: Callable[..., Any], scheduler: Any, batch: Any, *arguments: Any, **keywords: Any) -> Any:
    """``process_batch_result`` [scheduler thread]: the original waits for the result."""
    global _last_result
    answer = original(scheduler, batch, *arguments, **keywords)
    now = time.perf_counter()
    if _is_prefill(batch) and batch.reqs:
        started = _started.pop(batch.reqs[0], None)
        tokens = getattr(batch, "extend_num_tokens", None)
        if started is not None and tokens:
            prefill_cost.observe(tokens, now - max(started, _last_result))
    _last_result = now
    return answer


def _is_prefill(batch: Any) -> bool:
    mode = getattr(batch, "forward_mode", None)
    return mode is not None and bool(mode.is_extend())

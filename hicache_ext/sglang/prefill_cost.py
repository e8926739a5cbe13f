"""The time this node takes to compute a prefix, measured by two hooks around the batches of SGLang's scheduler.

SGLang's own figure (``input throughput`` in its log) includes idle time since the last batch, so it is far too low on a
node that waits for work. Here a batch lasts from its start, or from the end of the batch before if that is later
(batches overlap), until its result is there.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hicache_ext.storage.tiering.pulling import SizedCost

_cost: SizedCost | None = None

_started: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()
_last_result = 0.0


def prefill_cost() -> SizedCost:
    """The cost on this process's scheduler, in tokens; measured from the first time on that it is asked for."""
    global _cost
    if _cost is None:
        from hicache_ext.storage.tiering.pulling import SizedCost

        _cost = SizedCost()
    return _cost


def around_run(original: Callable[..., Any], scheduler: Any, batch: Any, *arguments: Any, **keywords: Any) -> Any:
    """``run_batch`` [scheduler thread]."""
    # SGLang may pass a copy of the batch with its result: both share the list of requests.
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
        if _cost is not None and started is not None and tokens:
            _cost.observe(tokens, now - max(started, _last_result))
    _last_result = now
    return answer


def _is_prefill(batch: Any) -> bool:
    mode = getattr(batch, "forward_mode", None)
    return mode is not None and bool(mode.is_extend())

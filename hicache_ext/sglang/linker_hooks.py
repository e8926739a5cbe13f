"""Requests whose stored pages are being read stay out of SGLang's sight, where the external linker is used.

SGLang asks its linker when it admits a request, and would wait for the pages on its scheduler's thread. With HiCache it
passes such requests over while they are prefetched; for a linker it has no such place, so its queue goes without them
for the moment in which it chooses a batch (linking/ahead.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def around_new_batch(original: Callable[..., Any], scheduler: Any, *arguments: Any, **named: Any) -> Any:
    """AROUND hook [scheduler thread]: SGLang chooses which waiting requests it computes next."""
    linker: Any = getattr(getattr(getattr(scheduler, "tree_cache", None), "linker", None), "cache_linker", None)
    hold = getattr(linker, "requests_to_hold", None)  # of ours alone
    if hold is None:
        return original(scheduler, *arguments, **named)
    queue = scheduler.waiting_queue
    held = hold(_in_order(scheduler, queue), scheduler.tree_cache)
    seen = [request for request in queue if request.rid not in held]
    if held and not seen and _has_nothing_to_run(scheduler):
        linker.nap()
    # SGLang adds requests whose grammar is ready, and those that it preempted. The limit of its queue is for all of it,
    # and whoever comes is looked up like the others: in the next round.
    added: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    scheduler._add_request_to_queue = lambda *request, **how: added.append((request, how))
    if held:
        scheduler.waiting_queue = seen
    try:
        return original(scheduler, *arguments, **named)
    finally:
        if held:
            scheduler.waiting_queue = _merged(queue, held, scheduler.waiting_queue)
        del scheduler._add_request_to_queue
        for request, how in added:
            scheduler._add_request_to_queue(*request, **how)


def _in_order(scheduler: Any, queue: Sequence[Any]) -> Sequence[Any]:
    """Who is read first: SGLang's priorities come before the order in which requests came."""
    if not scheduler.enable_priority_scheduling:
        return queue
    sign = 1 if scheduler.schedule_low_priority_values_first else -1
    return sorted(queue, key=lambda request: sign * request.priority)


def _has_nothing_to_run(scheduler: Any) -> bool:
    """Nor anything to answer. With DP attention the schedulers of other ranks wait for this one in every round."""
    return (
        scheduler.running_batch.is_empty()
        and scheduler.chunked_req is None
        and scheduler.last_batch is None
        and not scheduler.require_mlp_sync
    )


def _merged(before: Sequence[Any], held: set[str], left: Sequence[Any]) -> list[Any]:
    """The queue as it was, without the requests that were taken."""
    still = {id(request) for request in left}
    return [request for request in before if request.rid in held or id(request) in still]

"""Hooks on SGLang's scheduler and its storage threads: KV hints of requests, requests whose stored pages are being
read, the cost of a prefill, the traces that storage calls belong to, and which rank writes a draft's pages."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from hicache_ext.runtime.log_limit import LimitedLog
from hicache_ext.sglang.process import attached_backends
from hicache_ext.sglang.releases import comes_with, installed_release
from hicache_ext.storage.contract import tenants
from hicache_ext.storage.serving.kv_hints import OPTIONS, said_by
from hicache_ext.storage.tiering import observers

if TYPE_CHECKING:
    from hicache_ext.storage.tiering.pulling import SizedCost

logger = logging.getLogger(__name__)

# -- KV hints of requests ----------------------------------------------------------------------------------------------

_log = LimitedLog(logger, 60.0)

_unstored: weakref.WeakSet[Any] = weakref.WeakSet()
"""SGLang's requests of which nothing may be written."""
_handled: weakref.WeakSet[Any] = weakref.WeakSet()
"""SGLang's requests whose tenant and hints were handled already."""


def before_queued(scheduler: Any, req: Any, *_: Any, **__: Any) -> None:
    """BEFORE hook [scheduler thread]: a request enters a queue, perhaps not for the first time.

    A request without hints costs only this check; hints are copied for another thread.
    """
    try:
        custom = req.sampling_params.custom_params
        ours = custom.get(OPTIONS) if isinstance(custom, Mapping) else None
        has_no_hints = req.kv_hints is None and ours is None
        has_tenant = tenants.in_force() is not None and not scheduler.spec_algorithm.is_eagle()
        if (has_no_hints and not has_tenant) or req in _handled or not (backends := attached_backends()):
            return
        _handled.add(req)
        if has_tenant:
            for backend in backends:
                backend.note_tenant(ours.get("tenant") if isinstance(ours, Mapping) else None, req)
        if has_no_hints or (said := said_by(req.kv_hints, custom)) is None:
            return
        if said.no_store and not _can_stay_out_of(scheduler.tree_cache):
            said.ignored["unsupported"] += 1
        elif said.no_store:
            # Keep its KV out of SGLang's tree, from which it would be written to host memory and to storage.
            req.skip_radix_cache_insert = True
            _unstored.add(req)
        # Under EAGLE pages are hashed from pairs of tokens, which hints do not cover.
        ignore = "unsupported" if scheduler.spec_algorithm.is_eagle() else ""
        for backend in backends:
            backend.take_hints(said, req, ignore)
    except Exception as error:  # noqa: BLE001 - it would end the scheduler; its text may quote the request
        _log.log(logging.WARNING, "hints", "hicache_ext: hints of a request: %s", type(error).__name__)


def _can_stay_out_of(tree: Any) -> bool:
    """Return whether a request can stay out of the tree. With recurrent states 0.5.21 would not continue after the
    first chunk of a prompt, and no release frees the KV behind a sliding window that exists next to such states."""
    return not tree.supports_mamba() or (comes_with(installed_release(), "0.5.22") and not tree.supports_swa())


def is_unstored(request: Any) -> bool:
    """Return whether nothing of this request of SGLang's may be written [any thread]."""
    return request in _unstored


def around_unfinished(original: Callable[..., Any], req: Any, tree_cache: Any, *more: Any, **named: Any) -> Any:
    """AROUND ``maybe_cache_unfinished_req`` of 0.5.21 [scheduler thread]: a chunk of a prompt was computed. For a
    request that stays out of its tree that release would compute the first chunk again and again."""
    if named.get("chunked") and is_unstored(req):
        return tree_cache.advance_unpublished_req(req, chunked=True)
    return original(req, tree_cache, *more, **named)


def around_checkpoint(original: Callable[..., Any], req: Any, tree_cache: Any, *more: Any, **named: Any) -> Any:
    """AROUND ``checkpoint_kv_cache`` since 0.5.22 [scheduler thread]: it skips a request that stays out of the tree,
    which would keep the KV behind its sliding window until its end: a long prompt had no room for its next chunk."""
    advance = getattr(tree_cache, "advance_unpublished_req", None)
    if advance is not None and is_unstored(req) and not tree_cache.supports_mamba():
        advance(req)
    return original(req, tree_cache, *more, **named)


# -- requests whose stored pages are being read ------------------------------------------------------------------------
# With the external linker, such requests are hidden from SGLang. SGLang calls its linker when it admits a request, and
# would wait for the pages on its scheduler's thread. With HiCache it skips requests that are being prefetched; for a
# linker it has no such check, so they are taken out of its queue while it chooses a batch (linker_ahead.py).


def around_new_batch(original: Callable[..., Any], scheduler: Any, *arguments: Any, **named: Any) -> Any:
    """AROUND hook [scheduler thread]: SGLang chooses which waiting requests it computes next."""
    linker: Any = getattr(getattr(getattr(scheduler, "tree_cache", None), "linker", None), "cache_linker", None)
    hold = getattr(linker, "requests_to_hold", None)  # only our linker has it
    if hold is None:
        return original(scheduler, *arguments, **named)
    queue = scheduler.waiting_queue
    held = hold(_by_priority(scheduler, queue), scheduler.tree_cache)
    visible = [request for request in queue if request.rid not in held]
    if held and not visible and _is_idle(scheduler):
        linker.nap()
    # Meanwhile SGLang may add requests whose grammar is ready, and preempted ones. Add them afterwards: its limit
    # applies to the whole queue, and they must be looked up like the others, in the next round.
    added: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    scheduler._add_request_to_queue = lambda *request, **options: added.append((request, options))
    if held:
        scheduler.waiting_queue = visible
    try:
        return original(scheduler, *arguments, **named)
    finally:
        if held:
            scheduler.waiting_queue = _merged(queue, held, scheduler.waiting_queue)
        del scheduler._add_request_to_queue
        for request, options in added:
            scheduler._add_request_to_queue(*request, **options)


def _by_priority(scheduler: Any, queue: Sequence[Any]) -> Sequence[Any]:
    """Return the queue in the order of reading: by SGLang's priorities, then by arrival."""
    if not scheduler.enable_priority_scheduling:
        return queue
    sign = 1 if scheduler.schedule_low_priority_values_first else -1
    return sorted(queue, key=lambda request: sign * request.priority)


def _is_idle(scheduler: Any) -> bool:
    """Return whether the scheduler has nothing to run or answer. With DP attention it never counts as idle, because
    the schedulers of other ranks wait for it in every round."""
    return (
        scheduler.running_batch.is_empty()
        and scheduler.chunked_req is None
        and scheduler.last_batch is None
        and not scheduler.require_mlp_sync
    )


def _merged(before: Sequence[Any], held: set[str], left: Sequence[Any]) -> list[Any]:
    """Return the queue in its former order, without the requests that SGLang took."""
    remaining = {id(request) for request in left}
    return [request for request in before if request.rid in held or id(request) in remaining]


# -- the cost of a prefill ---------------------------------------------------------------------------------------------
# The time this node takes to compute a prefix, measured by two hooks around the batches of SGLang's scheduler.
#
# SGLang's own figure (``input throughput`` in its log) includes idle time since the last batch, so it is far too low on
# a node that waits for work. Here a batch lasts from its start, or from the end of the previous batch if that is later
# (batches overlap), until its result arrives.

_cost: SizedCost | None = None

_started: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()
_last_result = 0.0


def prefill_cost() -> SizedCost:
    """Return the cost on this process's scheduler, in tokens; measuring begins with the first call."""
    global _cost
    if _cost is None:
        from hicache_ext.storage.tiering.pulling import SizedCost

        _cost = SizedCost()
    return _cost


def around_run(original: Callable[..., Any], scheduler: Any, batch: Any, *arguments: Any, **keywords: Any) -> Any:
    """AROUND ``run_batch`` [scheduler thread]."""
    # SGLang may pass a copy of the batch with its result: both share the list of requests.
    for request in batch.reqs[:1] if _is_prefill(batch) else ():
        _started[request] = time.perf_counter()
    return original(scheduler, batch, *arguments, **keywords)


def around_result(original: Callable[..., Any], scheduler: Any, batch: Any, *arguments: Any, **keywords: Any) -> Any:
    """AROUND ``process_batch_result`` [scheduler thread]: the original waits for the result."""
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


# -- traces and recordings of requests ---------------------------------------------------------------------------------
# They put storage calls into the trace of their request, and record the lookup of each request.
#
# SGLang's storage interface knows nothing about requests, but its storage threads do: a prefetch has the id of its
# request, and with ``--enable-trace`` the request has a trace. Writes belong to no request: SGLang writes nodes of its
# tree.

_requests: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
"""SGLang's requests that may be prefetched, by id; only while something is traced or recorded."""


def before_prefetch(scheduler: Any, req: Any, *_: Any, **__: Any) -> None:
    """BEFORE hook [scheduler thread]: a request is about to be prefetched."""
    if observers.spans is not None or observers.recorder is not None:
        with suppress(AttributeError, TypeError):  # not a request: its spans get no parent
            _requests[req.rid] = req


def around_look_up(original: Callable[..., Any], controller: Any, operation: Any, *more: Any, **named: Any) -> Any:
    """AROUND hook [prefetch threads]: traces and records the lookup of one request."""
    recorder = observers.recorder
    if recorder is None:
        return around_storage(original, controller, operation, *more, **named)
    with recorder.looking_up() as found:
        answer = around_storage(original, controller, operation, *more, **named)
    # A request whose operation has an unexpected form is not recorded.
    with suppress(AttributeError, TypeError, ValueError, IndexError):
        if not getattr(operation, "assume_stored", False):
            _record(recorder, operation, len(answer[0]), found)
    return answer


def _record(recorder: Any, operation: Any, answered: int, found: dict[str, int]) -> None:
    pages, rid, before = list(operation.all_hash_values), operation.request_id, operation.last_hash
    if not isinstance(rid, str) or not all(isinstance(page, str) for page in pages):
        raise TypeError
    request = _requests.get(rid)
    if request is None or is_unstored(request):
        return  # if SGLang has dropped the request, it is unknown whether it may be recorded
    matched = getattr(request, "storage_prefetch_last_match_len", None)
    matched = matched if isinstance(matched, int) else None
    before = before if isinstance(before, str) else None
    prompt = len(request.origin_input_ids)
    recorder.ask(rid, pages, before=before, answered=answered, found=found, prompt=prompt, matched=matched)


def around_storage(original: Callable[..., Any], controller: Any, operation: Any, *more: Any, **named: Any) -> Any:
    """AROUND hook [prefetch threads]: traces the lookup, or the read, of one request."""
    spans = observers.spans
    # A lookup that belongs to no request has an operation that was never prefetched.
    rid = None if spans is None else getattr(operation, "request_id", None)
    if spans is None or not isinstance(rid, str):
        return original(controller, operation, *more, **named)
    with spans.under(spans.request(rid, _trace_of(rid))):
        return original(controller, operation, *more, **named)


def _trace_of(rid: str) -> Any | None:
    """Return the Context of the request's own span; None if SGLang does not trace it."""
    context = getattr(getattr(_requests.get(rid), "time_stats", None), "trace_ctx", None)
    # Without tracing SGLang's placeholder has every attribute, as a function: hence the comparison with True.
    return getattr(context, "root_span_context", None) if getattr(context, "tracing_enable", False) is True else None


# -- drafts ------------------------------------------------------------------------------------------------------------
# A hook for draft models with heads next to an MLA target: SGLang would store only rank 0's.
#
# An MLA target has the same KV on all tensor-parallel ranks, so SGLang lets one rank write it and all side pools. The
# heads of an MHA draft differ from rank to rank. SGLang handles that for Mooncake, by name. For a ``dynamic`` backend
# it calls ``should_backup`` on each rank for each pool, and the hook returns the right answer for our backend.


def around_should_backup(
    original: Callable[..., bool], controller: Any, transfer: Any, *later: Any, **named: Any
) -> bool:
    """AROUND hook [backup thread]: returns whether this rank writes its pages of a pool."""
    if original(controller, transfer, *later, **named):
        return True
    storage = getattr(controller, "storage_backend", None)
    # SGLang's fault injector may be wrapped around the backend.
    ours = {id(storage), id(getattr(storage, "_backend", None))}
    name = str(getattr(transfer.name, "value", transfer.name))
    return any(id(backend) in ours and backend.served.on_every_rank(name) for backend in attached_backends())

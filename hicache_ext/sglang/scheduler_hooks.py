"""Hooks on SGLang's scheduler and its storage threads: what requests say about KV, requests whose stored pages are
being read, what a prefill takes, whose traces storage calls belong to, and which rank writes a draft's pages."""

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

# -- what requests say about KV ----------------------------------------------------------------------------------------

_log = LimitedLog(logger, 60.0)

_unstored: weakref.WeakSet[Any] = weakref.WeakSet()
"""SGLang's requests of which nothing is to be written."""
_heard: weakref.WeakSet[Any] = weakref.WeakSet()
"""SGLang's requests whose tenants were looked for, and whose hints were followed."""


def before_queued(scheduler: Any, req: Any, *_: Any, **__: Any) -> None:
    """BEFORE hook [scheduler thread]: a request comes to a queue, perhaps again.

    A request that says nothing costs this look; what others say is copied, for another thread.
    """
    try:
        custom = req.sampling_params.custom_params
        ours = custom.get(OPTIONS) if isinstance(custom, Mapping) else None
        says_nothing = req.kv_hints is None and ours is None
        owned = tenants.in_force() is not None and not scheduler.spec_algorithm.is_eagle()
        if (says_nothing and not owned) or req in _heard or not (backends := attached_backends()):
            return
        _heard.add(req)
        if owned:
            for backend in backends:
                backend.note_tenant(ours.get("tenant") if isinstance(ours, Mapping) else None, req)
        if says_nothing or (said := said_by(req.kv_hints, custom)) is None:
            return
        if said.no_store and not _can_stay_out_of(scheduler.tree_cache):
            said.ignored["unsupported"] += 1
        elif said.no_store:
            # SGLang puts its KV into no tree, from which it would be written to host memory and to storage.
            req.skip_radix_cache_insert = True
            _unstored.add(req)
        # The pages of a bigram are hashed in another way.
        ignore = "unsupported" if scheduler.spec_algorithm.is_eagle() else ""
        for backend in backends:
            backend.take_hints(said, req, ignore)
    except Exception as error:  # noqa: BLE001 - it would end the scheduler; its text may be a part of the request
        _log.log(logging.WARNING, "hints", "hicache_ext: hints of a request: %s", type(error).__name__)


def _can_stay_out_of(tree: Any) -> bool:
    """Where states are recurrent, 0.5.21 would not go on behind the first part of a prompt, and no release frees what
    is behind a sliding window beside them."""
    return not tree.supports_mamba() or (comes_with(installed_release(), "0.5.22") and not tree.supports_swa())


def is_unstored(request: Any) -> bool:
    """Whether nothing of this request of SGLang's is to be written [any thread]."""
    return request in _unstored


def around_unfinished(original: Callable[..., Any], req: Any, tree_cache: Any, *more: Any, **named: Any) -> Any:
    """``maybe_cache_unfinished_req`` of 0.5.21 [scheduler thread]: a part of a prompt was computed. That release would
    compute the first part of a request that stays out of its tree again and again."""
    if named.get("chunked") and is_unstored(req):
        return tree_cache.advance_unpublished_req(req, chunked=True)
    return original(req, tree_cache, *more, **named)


def around_checkpoint(original: Callable[..., Any], req: Any, tree_cache: Any, *more: Any, **named: Any) -> Any:
    """``checkpoint_kv_cache`` from 0.5.22 on [scheduler thread]: it passes over a request that stays out of the tree,
    and would keep what is behind its sliding window until its end: a long prompt then has no room for its next part."""
    advance = getattr(tree_cache, "advance_unpublished_req", None)
    if advance is not None and is_unstored(req) and not tree_cache.supports_mamba():
        advance(req)
    return original(req, tree_cache, *more, **named)


# -- requests whose stored pages are being read ------------------------------------------------------------------------
# They stay out of SGLang's sight, where the external linker is used. SGLang asks its linker when it admits a request,
# and would wait for the pages on its scheduler's thread. With HiCache it passes such requests over while they are
# prefetched; for a linker it has no such place, so its queue goes without them for the moment in which it chooses a
# batch (linker_ahead.py).


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


# -- what a prefill takes ----------------------------------------------------------------------------------------------
# The time this node takes to compute a prefix, measured by two hooks around the batches of SGLang's scheduler.
#
# SGLang's own figure (``input throughput`` in its log) includes idle time since the last batch, so it is far too low on
# a node that waits for work. Here a batch lasts from its start, or from the end of the batch before if that is later
# (batches overlap), until its result is there.

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


# -- traces and recordings of requests ---------------------------------------------------------------------------------
# Storage calls in the trace of the request that they are for, and what each request asked for in a recording.
#
# SGLang's storage interface knows nothing of requests, but its storage threads do: a prefetch has the id of its
# request, and with ``--enable-trace`` the request has a trace. Writes are for no request: SGLang writes nodes of its
# tree.

_requests: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
"""SGLang's requests that may be prefetched, by id; only while something is traced or recorded."""


def before_prefetch(scheduler: Any, req: Any, *_: Any, **__: Any) -> None:
    """BEFORE hook [scheduler thread]: storage is about to be asked for a request."""
    if observers.spans is not None or observers.recorder is not None:
        with suppress(AttributeError, TypeError):  # something else than a request: its spans have no parent
            _requests[req.rid] = req


def around_look_up(original: Callable[..., Any], controller: Any, operation: Any, *more: Any, **named: Any) -> Any:
    """AROUND hook [prefetch threads]: the look-up of one request, which is recorded, too."""
    recorder = observers.recorder
    if recorder is None:
        return around_storage(original, controller, operation, *more, **named)
    with recorder.looking_up() as found:
        answer = around_storage(original, controller, operation, *more, **named)
    # Whatever SGLang makes of an operation: a request that cannot be read is not recorded.
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
        return  # where SGLang has dropped it meanwhile, nobody can tell whether it may be recorded
    matched = getattr(request, "storage_prefetch_last_match_len", None)
    matched = matched if isinstance(matched, int) else None
    before = before if isinstance(before, str) else None
    prompt = len(request.origin_input_ids)
    recorder.ask(rid, pages, before=before, answered=answered, found=found, prompt=prompt, matched=matched)


def around_storage(original: Callable[..., Any], controller: Any, operation: Any, *more: Any, **named: Any) -> Any:
    """AROUND hook [prefetch threads]: the look-up, or the read, of one request."""
    spans = observers.spans
    # Questions that are asked for no request have an operation that was never prefetched.
    rid = None if spans is None else getattr(operation, "request_id", None)
    if spans is None or not isinstance(rid, str):
        return original(controller, operation, *more, **named)
    with spans.under(spans.request(rid, _trace_of(rid))):
        return original(controller, operation, *more, **named)


def _trace_of(rid: str) -> Any | None:
    """The Context of the request's own span; None where SGLang does not trace it."""
    context = getattr(getattr(_requests.get(rid), "time_stats", None), "trace_ctx", None)
    # Without tracing SGLang puts something there that has every attribute, and calls it a function.
    return getattr(context, "root_span_context", None) if getattr(context, "tracing_enable", False) is True else None


# -- drafts ------------------------------------------------------------------------------------------------------------
# A hook for draft models with heads beside an MLA target, which SGLang would store from rank 0 only.
#
# An MLA target has the same KV on all tensor-parallel ranks, so SGLang lets one rank write it, and with it all pools
# beside it. The heads of an MHA draft differ from rank to rank. SGLang knows that for Mooncake, by name. Of a
# ``dynamic`` backend it asks ``should_backup`` on each rank for each pool, and the hook answers what is true for ours.


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
    return any(id(backend) in ours and backend.served.on_every_rank(name) for backend in attached_backends())

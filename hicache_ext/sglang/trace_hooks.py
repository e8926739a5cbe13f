"""Storage calls in the trace of the request that they are for, and what each request asked for in a recording.

SGLang's storage interface knows nothing of requests, but its storage threads do: a prefetch has the id of its request,
and with ``--enable-trace`` the request has a trace. Writes are for no request: SGLang writes nodes of its tree.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from hicache_ext.storage.tiering import observers

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
    matched = getattr(request, "storage_prefetch_last_match_len", None)
    prompt = len(request.origin_input_ids) if request is not None else None
    recorder.ask(
        rid,
        pages,
        before=before if isinstance(before, str) else None,
        answered=answered,
        found=found,
        prompt=prompt,
        matched=matched if isinstance(matched, int) else None,
    )


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

"""Storage calls in the trace of the request that they are for.

SGLang's storage interface knows nothing of requests, but its storage threads do: a prefetch has the id of its request,
and with ``--enable-trace`` the request has a trace. Writes are for no request: SGLang writes nodes of its tree.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from hicache_ext.storage.tiering import tracing

_requests: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
"""SGLang's requests that may be prefetched, by id; only while something is traced."""


def before_prefetch(scheduler: Any, request: Any, *_: Any, **__: Any) -> None:
    """BEFORE hook [scheduler thread]: storage is about to be asked for a request."""
    if tracing.spans is not None:
        with suppress(AttributeError, TypeError):  # something else than a request: its spans have no parent
            _requests[request.rid] = request


def around_storage(original: Callable[..., Any], controller: Any, operation: Any, *more: Any, **named: Any) -> Any:
    """AROUND hook [prefetch threads]: the look-up, or the read, of one request."""
    spans = tracing.spans
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

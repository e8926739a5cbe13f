"""An OpenTelemetry span for each call of a tier, if ``tracing`` is configured (observers.py, docs/plan.md).

A span is created when its call has ended and handed to OpenTelemetry's batch processor, whose thread sends it; spans
that don't fit into its queue are dropped. Nothing here raises into a call, and no call waits for a collector.

Its parent is the current span of the thread: sglang/scheduler_hooks.py puts storage threads into that of the request.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from hicache_ext import __version__
from hicache_ext.config.model import SGLANG, TracingConfig
from hicache_ext.errors import ConfigError
from hicache_ext.packages import missing_package
from hicache_ext.page.envelope import IDENTITY_LENGTH
from hicache_ext.runtime.threads import call_within
from hicache_ext.storage.contract.store import GetResult, PageBatch, SetResult

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_EXPORT_TIMEOUT = 5.0
_END_TIMEOUT = 2.0
"""Seconds that a server's shutdown waits for a collector to take the last spans."""
_HASH_BYTES = 4
"""Bytes of the first page's hash: enough to find it with ``hicache-ext explain``, too few to reveal a prompt."""
_MOST_OF_RID = 64
_REQUEST = "hicache.request"
_SENT = (GetResult.HIT, SetResult.STORED)
"""Results of pages whose bytes were moved."""
_MOVED = (GetResult.HIT, SetResult.STORED, SetResult.EXISTS)
_TROUBLE = {result.value for result in (GetResult.CORRUPT, GetResult.TIMEOUT, GetResult.ERROR)} | {"raised"}


class Spans:
    """Creates the spans of this process. Threads: any."""

    def __init__(self, provider: Any, *, owned: bool) -> None:
        """``provider``: a TracerProvider of OpenTelemetry. ``owned``: whether close() shuts it down."""
        from opentelemetry import context, trace

        self._provider = provider if owned else None
        self._tracer = provider.get_tracer("hicache_ext", __version__)
        self._context = context
        self._trace = trace

    def carried(self, work: Callable[[int], _T]) -> Callable[[int], _T]:
        """Wrap ``work`` for other threads, so that it runs with this thread's parent span."""
        parent = self._context.get_current()

        def with_parent(number: int) -> _T:
            with self.under(parent):
                return work(number)

        return with_parent

    @contextmanager
    def under(self, parent: Any) -> Iterator[None]:
        """Give this thread's spans the parent ``parent`` (a Context) inside the block."""
        token = self._context.attach(parent)
        try:
            yield
        finally:
            self._context.detach(token)

    def request(self, rid: str, parent: Any | None) -> Any:
        """Return the Context of a request: with its rid, and its trace if SGLang has one (``parent``)."""
        return self._context.set_value(_REQUEST, rid[:_MOST_OF_RID], parent)

    def tell(self, tier: str, operation: str, argument: Any, answer: Any, seconds: float) -> None:
        """Create the span of a call that has just ended; ``answer`` is None if it raised. Never raises."""
        try:
            facts = _facts(argument, answer)
            if (rid := self._context.get_value(_REQUEST)) is not None:
                facts["hicache.rid"] = rid
            facts.update({"hicache.tier": tier, "hicache.operation": operation})
            started = time.time_ns() - int(seconds * 1e9)
            span = self._tracer.start_span(f"{operation} {tier}", start_time=started, attributes=facts)
            if facts["hicache.outcome"] in _TROUBLE:
                span.set_status(self._trace.StatusCode.ERROR)
            span.end()
        except Exception as error:  # noqa: BLE001 - whatever a library of somebody else makes of it
            logger.debug("hicache_ext: a span was not made: %s", type(error).__name__)

    def close(self) -> None:
        """Send the remaining spans, within ``_END_TIMEOUT``."""
        if self._provider is not None:
            try:
                call_within(_END_TIMEOUT, "hicache-tracing-end", self._provider.shutdown)
            except RuntimeError as error:
                logger.debug("hicache_ext: the last spans are lost: %s", error)


def spans_of(settings: TracingConfig) -> Spans:
    """Return the spans as configured. Raises ConfigError, MissingPackageError."""
    check_packages()
    if settings.endpoint == SGLANG:
        return Spans(_provider_of_sglang(), owned=False)
    try:
        return Spans(_provider_of(settings.endpoint), owned=True)
    except ValueError as error:
        # OpenTelemetry also reads settings from the environment.
        raise ConfigError("hicache_ext.tracing", f"OpenTelemetry refuses a variable OTEL_...: {error}") from None


def check_packages() -> None:
    """Raise MissingPackageError if OpenTelemetry is not installed."""
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError:
        raise missing_package("opentelemetry", "whose SDK and OTLP exporter are not installed") from None


def _provider_of_sglang() -> Any:
    """Return the provider that SGLang has created in this process."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider

    provider = trace.get_tracer_provider()
    if not isinstance(provider, TracerProvider):
        raise ConfigError(
            "hicache_ext.tracing.endpoint",
            "is sglang, and this server was started without --enable-trace",
            "that flag with --otlp-traces-endpoint, or the address of a collector here",
        )
    return provider


def _provider_of(endpoint: str) -> Any:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    # By default it would wait for an unreachable collector when the interpreter exits; close() does not.
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_TIMEOUT)))
    return provider


def _facts(argument: Any, answer: Any) -> dict[str, Any]:
    """Return the attributes of a call's span: numbers and an outcome. ``argument``: a PageBatch or keys; ``answer``:
    None if the call raised."""
    keys: Sequence[bytes] = argument.keys if isinstance(argument, PageBatch) else argument
    facts: dict[str, Any] = {"hicache.pages": len(keys)}
    if len(keys):
        facts["hicache.first_page"] = keys[0][IDENTITY_LENGTH : IDENTITY_LENGTH + _HASH_BYTES].hex()
    if answer is None:
        return {**facts, "hicache.outcome": "raised"}
    if isinstance(argument, PageBatch):
        moved = [result in _MOVED for result in answer]
        facts["hicache.bytes"] = sum(argument.bytes_of(result, answer) for result in _SENT)
        # The result that ended the run says more than the first one.
        word = next((result.value for result, ok in zip(answer, moved, strict=True) if not ok), None)
        facts["hicache.outcome"] = word or (answer[0].value if answer else "nothing")
        return {**facts, "hicache.pages_moved": sum(moved)}
    found = answer if isinstance(answer, int) else sum(answer)
    outcome = "hit" if found == len(keys) else "part" if found else "miss"
    return {**facts, "hicache.pages_moved": found, "hicache.outcome": outcome}

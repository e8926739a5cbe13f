"""Spans: one for each call of a tier, in the trace of whoever called; and no call that waits or fails for them."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from hicache_ext.config.model import TracingConfig
from hicache_ext.errors import ConfigError, MissingPackageError
from hicache_ext.sglang import scheduler_hooks
from hicache_ext.storage.contract.store import GetResult, PageBatch, SetResult
from hicache_ext.storage.tiering import observers, tracing
from hicache_ext.storage.tiering.tier_use import TieringSettings
from hicache_ext.storage.tiering.tiered import TieredStore
from hicache_ext.storage.tiers.memory import MemoryPageStore
from hicache_ext.testing.conformance.pages import page_keys, read_pages, store_pages
from hicache_ext.testing.server import free_port
from tests.rigs.faults import RaisingStore
from tests.rigs.otlp_collector import OtlpCollector
from tests.waiting import wait_until

# Its thread goes on for a while where a collector is dead: its lines would be in the logs of the tests that come next.
logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter").setLevel(logging.CRITICAL)

KEYS = page_keys(3)
ROOT = Path(__file__).parents[2]

Finished = Callable[[], Sequence[Any]]


@pytest.fixture
def provider() -> Any:
    sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="missing: opentelemetry-sdk")
    return sdk.TracerProvider(shutdown_on_exit=False)


@pytest.fixture
def finished(provider: Any, monkeypatch: pytest.MonkeyPatch) -> Finished:
    """The spans of this test so far."""
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(observers, "spans", tracing.Spans(provider, owned=False))
    return exporter.get_finished_spans


@pytest.fixture
def tiered() -> Iterator[Callable[..., TieredStore]]:
    stores: list[TieredStore] = []

    def of(*tiers: Any, **settings: Any) -> TieredStore:
        stores.append(TieredStore(tiers, tiers, settings=TieringSettings(**settings)))
        return stores[-1]

    yield of
    for store in stores:
        store.close()


def told(spans: Sequence[Any]) -> list[tuple[Any, ...]]:
    names = ("tier", "operation", "pages", "pages_moved", "bytes", "outcome")
    return [tuple(span.attributes.get(f"hicache.{name}") for name in names) for span in spans]


def test_every_call_of_every_tier_is_one_span_with_its_pages_bytes_and_outcome(
    finished: Finished, tiered: Callable[..., TieredStore]
) -> None:
    near, far = MemoryPageStore("near"), MemoryPageStore("far")
    store_pages(far, KEYS[:2])
    store = tiered(near, far)
    store_pages(near, KEYS[:1])
    assert store.count_leading(KEYS) == 2
    assert read_pages(store, KEYS[:1])[0] == [GetResult.HIT]
    assert all(result.durable for result in store_pages(store, KEYS))
    spans = told(finished())
    assert ("near", "exists", 3, 1, None, "part") in spans
    assert ("far", "exists", 2, 1, None, "part") in spans
    assert ("near", "get", 1, 1, 1000, "hit") in spans
    assert ("near", "set", 3, 3, 2000, "exists") in spans
    assert ("far", "set", 3, 3, 1000, "exists") in spans
    assert len(spans) == 5


def test_what_ended_a_run_is_the_outcome_and_trouble_is_an_error(
    finished: Finished, tiered: Callable[..., TieredStore]
) -> None:
    from opentelemetry.trace import StatusCode

    tier = MemoryPageStore("disk")
    store = tiered(tier)
    store_pages(store, KEYS[:2])
    tier.objects[KEYS[1]] = tier.objects[KEYS[1]][:-1] + b"\0"
    read_pages(store, KEYS)
    read_pages(store, page_keys(2, prefix="absent"))
    *_, bad, absent = finished()
    assert told([bad, absent]) == [("disk", "get", 3, 1, 1000, "corrupt"), ("disk", "get", 2, 0, 0, "miss")]
    assert (bad.status.status_code, absent.status.status_code) == (StatusCode.ERROR, StatusCode.UNSET)


def test_a_call_that_raises_has_a_span_and_is_answered_as_without_one(
    finished: Finished, tiered: Callable[..., TieredStore]
) -> None:
    store = tiered(RaisingStore(MemoryPageStore("disk"), lambda: RuntimeError("a secret")))
    assert read_pages(store, KEYS)[0] == [GetResult.ERROR] * 3
    (span,) = finished()
    assert told([span]) == [("disk", "get", 3, None, None, "raised")]
    assert "secret" not in span.to_json()


def test_a_span_has_these_attributes_and_no_others(finished: Finished, tiered: Callable[..., TieredStore]) -> None:
    store = tiered(MemoryPageStore("disk"))
    store_pages(store, KEYS)
    read_pages(store, KEYS)
    store.count_leading(KEYS)
    allowed = {"tier", "operation", "pages", "pages_moved", "bytes", "outcome", "first_page"}
    for span in finished():
        assert set(span.attributes) <= {f"hicache.{name}" for name in allowed}
        assert span.attributes["hicache.first_page"] == KEYS[0][16:20].hex()
        assert 0 < span.start_time <= span.end_time


def test_spans_are_in_the_trace_of_their_caller_also_where_other_threads_do_the_work(
    finished: Finished, tiered: Callable[..., TieredStore], provider: Any
) -> None:
    store = tiered(*[MemoryPageStore(name) for name in ("a", "b", "c", "d")])
    spans = observers.spans
    assert spans is not None
    from opentelemetry import trace

    with provider.get_tracer("test").start_as_current_span("request") as request:
        with spans.under(spans.request("rid-7", trace.set_span_in_context(request))):
            store_pages(store, KEYS)
        store.count_leading(KEYS)
    store.count_leading(KEYS)
    trace_id = request.get_span_context().trace_id
    writes = [span for span in finished() if span.name.startswith("set ")]
    assert {span.name for span in writes} == {"set a", "set b", "set c", "set d"}
    assert {span.context.trace_id for span in writes} == {trace_id}
    assert {span.attributes["hicache.rid"] for span in writes} == {"rid-7"}
    within, alone = [span for span in finished() if span.name == "exists a"]
    assert within.context.trace_id == trace_id and "hicache.rid" not in within.attributes
    assert alone.parent is None


def test_a_library_that_fails_costs_the_span_and_nothing_else(
    finished: Finished, tiered: Callable[..., TieredStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no")

    store = tiered(MemoryPageStore("disk"))
    monkeypatch.setattr(observers.spans, "_tracer", type("Broken", (), {"start_span": broken})())
    assert store_pages(store, KEYS) == [SetResult.STORED] * 3
    assert finished() == ()


# -- where spans go ----------------------------------------------------------------------------------------------------


@pytest.fixture
def begun(provider: Any) -> Iterator[Callable[[str], tracing.Spans]]:
    made: list[tracing.Spans] = []

    def begin(endpoint: str) -> tracing.Spans:
        spans = observers.begin_tracing(TracingConfig(endpoint=endpoint))
        assert spans is not None
        made.append(spans)
        return spans

    yield begin
    for spans in made:
        observers.end(spans)


def test_a_collector_gets_the_spans_by_the_end_at_the_latest(
    begun: Callable[[str], tracing.Spans], tiered: Callable[..., TieredStore]
) -> None:
    with OtlpCollector() as collector:
        spans = begun(collector.endpoint)
        store_pages(tiered(MemoryPageStore("disk")), KEYS)
        observers.end(spans)
        assert observers.spans is None
        (span,) = collector.spans
    assert span.name == "set disk" and span.attributes["hicache.bytes"] == 3000


@pytest.mark.thorough
@pytest.mark.parametrize("collector", ["dead", "hung"])
def test_a_collector_that_does_not_take_them_holds_up_no_call_and_not_the_end(
    collector: str, begun: Callable[[str], tracing.Spans], tiered: Callable[..., TieredStore]
) -> None:
    with OtlpCollector(answers=False) as hung:
        endpoint = hung.endpoint if collector == "hung" else f"http://127.0.0.1:{free_port()}/v1/traces"
        spans = begun(endpoint)
        store = tiered(MemoryPageStore("disk"))
        # Beyond what the queue of the batch processor takes.
        for number in range(3000):
            assert store_pages(store, page_keys(1, prefix=f"{number}")) == [SetResult.STORED]
        if collector == "hung":
            wait_until(hung.requested.is_set)
            assert store_pages(store, KEYS) == [SetResult.STORED] * 3
        observers.end(spans)  # while the request under way has had no answer
        assert not hung._closing.is_set()


def test_the_collector_of_sglang_needs_sglang_to_trace(
    begun: Callable[[str], tracing.Spans], provider: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from opentelemetry import trace

    monkeypatch.setattr(trace, "get_tracer_provider", trace.NoOpTracerProvider)
    with pytest.raises(
        ConfigError, match=r"tracing\.endpoint: is sglang, .* without --enable-trace; allowed: that flag"
    ):
        begun("sglang")
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    spans = begun("sglang")
    closed: list[bool] = []
    monkeypatch.setattr(provider, "shutdown", lambda: closed.append(True))
    observers.end(spans)
    assert not closed, "it is SGLang's"


@pytest.mark.parametrize(
    ("name", "value"), [("OTEL_BSP_MAX_QUEUE_SIZE", "10"), ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "abc")]
)
def test_a_variable_that_opentelemetry_refuses_is_one_sentence(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"^hicache_ext\.tracing: OpenTelemetry refuses a variable OTEL_"):
        observers.begin_tracing(TracingConfig(endpoint="http://127.0.0.1:1/v1/traces"))
    assert observers.spans is None


@pytest.mark.parametrize("endpoint", ["sglang", "http://127.0.0.1:4318/v1/traces"])
def test_without_the_packages_it_is_one_sentence(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(MissingPackageError, match="pip install opentelemetry-sdk"):
        observers.begin_tracing(TracingConfig(endpoint=endpoint))
    assert observers.spans is None


def test_where_nothing_is_configured_nothing_is_imported() -> None:
    program = """
import sys
from hicache_ext.config import ExtraConfig, load_config
from hicache_ext.storage.opening import open_tiers
from hicache_ext.storage.tiering import observers, tracing
from hicache_ext.testing.conformance.pages import page_keys, store_pages
config = load_config(ExtraConfig.around({"tiers": {"m": {"type": "memory"}}}))
assert observers.begin_tracing(config.tracing) is None
store = open_tiers(config)
store_pages(store, page_keys(2))
store.close()
print([name for name in sys.modules if name.startswith("opentelemetry")])
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# -- the trace of a request --------------------------------------------------------------------------------------------


def test_a_look_up_and_a_read_are_in_the_trace_of_their_request(
    finished: Finished, tiered: Callable[..., TieredStore], provider: Any
) -> None:
    from opentelemetry import trace

    span = provider.get_tracer("sglang").start_span("Req")

    class Thing:
        """With whatever attributes."""

        def __init__(self, **facts: Any) -> None:
            self.__dict__.update(facts)

    context = Thing(tracing_enable=True, root_span_context=trace.set_span_in_context(span))
    traced = Thing(rid="traced", time_stats=Thing(trace_ctx=context))
    untraced = Thing(rid="untraced", time_stats=Thing(trace_ctx=Thing(tracing_enable=False)))
    store = tiered(MemoryPageStore("disk"))
    for request in (traced, untraced):
        scheduler_hooks.before_prefetch(None, request)

    def look_up(controller: Any, operation: Any) -> int:
        return store.count_leading(KEYS)

    for rid in ("traced", "untraced", "gone"):
        assert scheduler_hooks.around_storage(look_up, None, Thing(request_id=rid)) == 0
    assert scheduler_hooks.around_storage(look_up, None, Thing()) == 0
    for unknown in (object(), Thing(), Thing(rid=["two", "requests"])):
        scheduler_hooks.before_prefetch(None, unknown)
    mine, *others = finished()
    assert mine.parent.span_id == span.get_span_context().span_id
    assert [other.parent for other in others] == [None] * 3
    assert [span.attributes.get("hicache.rid") for span in finished()] == ["traced", "untraced", "gone", None]
    del traced, request
    assert "traced" not in scheduler_hooks._requests, "a request is kept alive"


def test_bytes_of_a_batch_are_those_that_moved() -> None:
    batch = PageBatch(KEYS, [[memoryview(bytearray(10))]] * 3)
    facts = tracing._facts(batch, [SetResult.STORED, SetResult.EXISTS, SetResult.TIMEOUT])
    assert (facts["hicache.bytes"], facts["hicache.pages_moved"], facts["hicache.outcome"]) == (10, 2, "timeout")

"""A stand-in for an OTLP/HTTP collector: it keeps the spans that it is sent."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Received:
    name: str
    trace: str
    parent: str
    span: str
    attributes: Mapping[str, Any]


class OtlpCollector:
    """``answers``: False for one that takes a request and says nothing until it is closed."""

    def __init__(self, *, answers: bool = True) -> None:
        self.spans: list[Received] = []
        self.requested = threading.Event()
        self._closing = threading.Event()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.requested.set()
                if not answers:
                    collector._closing.wait(120)
                    return
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                collector.spans += spans_in(body)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}/v1/traces"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()


def spans_in(body: bytes) -> list[Received]:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    request = ExportTraceServiceRequest.FromString(body)
    return [
        Received(
            span.name,
            span.trace_id.hex(),
            span.parent_span_id.hex(),
            span.span_id.hex(),
            {
                item.key: getattr(item.value, item.value.WhichOneof("value") or "string_value")
                for item in span.attributes
            },
        )
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]

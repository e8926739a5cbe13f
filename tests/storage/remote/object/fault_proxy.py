"""An HTTP proxy in front of an S3 server that spoils what passes through it."""

from __future__ import annotations

import http.client
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_SLOW_DOWN = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"
_PIECE = 32 << 10


def kind_of(request: BaseHTTPRequestHandler) -> str:
    """Its method; LIST for a listing, DELETE also for the deletion of many."""
    if request.command == "GET" and "list-type" in request.path:
        return "LIST"
    return "DELETE" if request.command == "POST" else request.command


class FaultProxy:
    """Forwards to 127.0.0.1:``port`` unless ``fault`` says otherwise.

    ``fault``: "" | "500" | "slow down" | "hang" | "cut" (half the body, then the connection is closed) | "half" (half
    the body, with that length) | "other" (the body of ``other``) | "empty" | "flip" (a byte of the share ``flipped`` of
    all pieces of 32 KiB of bodies, another one each time) | "same flip" (always the byte in the middle of the object) |
    "same place" (always byte 500 of the body). Faults but 500, slow down and hang touch GET of packs alone.
    "no bulk delete" answers 501 to POST, "no size" says 0 bytes to HEAD of packs. ``times`` counts down; at 0
    the fault is over.
    """

    def __init__(self, port: int) -> None:
        self.target = port
        self.fault = ""
        self.times = 1 << 30
        self.refuses: Callable[[BaseHTTPRequestHandler], int] = lambda request: 0
        """The status with which a request is refused; 0: it is forwarded."""
        self.other = b""
        self.flipped = 1.0
        self._random = random.Random(0)
        self.requests = 0
        self.released = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @contextmanager
    def serving(self) -> Iterator[FaultProxy]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield self
        finally:
            self.released.set()
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    def break_with(self, fault: str, times: int = 1 << 30) -> None:
        self.fault, self.times = fault, times

    def _take_fault(self) -> str:
        self.requests += 1
        if not self.fault or self.times <= 0:
            return ""
        self.times -= 1
        return self.fault

    def _flipped(self, fault: str, data: bytes, content_range: str | None) -> bytes:
        if fault == "flip":
            damaged = bytearray(data)
            for begin in range(0, len(data), _PIECE):
                if self._random.random() < self.flipped:
                    damaged[self._random.randrange(begin, min(begin + _PIECE, len(data)))] ^= 0x10
            return bytes(damaged)
        if fault == "same place":
            place = 500
        elif fault == "same flip":
            # "bytes 7-99/100"
            begin, whole = (0, len(data))
            if content_range is not None:
                begin = int(content_range.split()[1].split("-")[0])
                whole = int(content_range.split("/")[1])
            place = whole // 2 - begin
        else:
            return data
        if not 0 <= place < len(data):
            return data
        return data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :]

    def _handler(proxy) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                fault = proxy._take_fault()
                if fault == "hang":
                    proxy.released.wait()
                    self.close_connection = True
                    return
                if fault == "no bulk delete" and self.command == "POST":
                    self._answer(501, {}, b"<Error><Code>NotImplemented</Code></Error>", 42)
                    return
                if refused := proxy.refuses(self):
                    self._answer(refused, {}, b"<Error><Code>Refused</Code></Error>", 35)
                    return
                if fault in ("500", "slow down"):
                    status, text = (500, b"broken") if fault == "500" else (503, _SLOW_DOWN)
                    self._answer(status, {}, text, len(text))
                    return
                try:
                    upstream = http.client.HTTPConnection("127.0.0.1", proxy.target, timeout=10)
                    upstream.request(self.command, self.path, body, dict(self.headers.items()))
                    reply = upstream.getresponse()
                    data = reply.read()
                    headers = dict(reply.getheaders())
                    upstream.close()
                except OSError:
                    self.close_connection = True
                    return
                length = int(reply.headers["Content-Length"] or len(data)) if self.command == "HEAD" else len(data)
                has_pages = self.path.split("?")[0].endswith(".pack")
                if fault == "no size" and self.command == "HEAD" and has_pages:
                    length = 0
                if self.command == "GET" and has_pages and reply.status in (200, 206):
                    if fault == "cut":
                        data = data[: len(data) // 2]
                        self.close_connection = True
                    elif fault == "half":
                        data = data[: len(data) // 2]
                        length = len(data)
                    elif fault == "other":
                        data, length = proxy.other, len(proxy.other)
                    elif fault == "empty":
                        data, length = b"", 0
                    else:
                        data = proxy._flipped(fault, data, reply.headers["Content-Range"])
                self._answer(reply.status, headers, data, length)

            def _answer(self, status: int, headers: dict[str, str], data: bytes, length: int) -> None:
                self.send_response_only(status)
                for name, value in headers.items():
                    if name.lower() not in ("content-length", "connection", "transfer-encoding", "keep-alive"):
                        self.send_header(name, value)
                self.send_header("Content-Length", str(length))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _serve

            def log_message(self, *_: object) -> None:
                pass

        return Handler

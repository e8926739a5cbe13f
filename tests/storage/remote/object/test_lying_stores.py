"""A store that claims lengths and lists without end: what was asked for is taken, and no more."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from urllib.parse import parse_qs, urlsplit

import pytest

from hicache_ext.errors import StoreError
from hicache_ext.page.pack import Pack, new_id
from hicache_ext.storage.contract import pack_index
from hicache_ext.storage.contract.store import GetResult
from hicache_ext.storage.tiers.object import catalog
from hicache_ext.storage.tiers.object import store as object_store
from hicache_ext.storage.tiers.object.catalog import packed_name, packs_of
from hicache_ext.storage.tiers.object.config import ObjectTierConfig
from hicache_ext.storage.tiers.object.store import ObjectPageStore
from hicache_ext.testing.conformance.pages import IDENTITY, page_key, read_pages
from tests.rigs.small_memory import run_in_small_memory
from tests.storage.remote.object.test_object_faults import through

KEYS = [page_key(number) for number in range(4)]
PAGE_BYTES = 1024
PACK = Pack.of_keys(new_id(1_700_000_000_000), PAGE_BYTES, KEYS)
NAMES = [packed_name(IDENTITY, PACK), f"identities/{IDENTITY.hex()}.json"]
CLAIMED = 1 << 40
SENT = 3 << 30

Listing = Callable[[str, int], list[str]]
"""The names of page ``n`` of a listing with this prefix; there is always another page, unless it is empty."""


@contextmanager
def lying_store(listing: Listing) -> Iterator[int]:
    """The port of a server whose bodies are of 1 TiB, whatever was asked for."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
            self.send_response(status)
            facts = {"Content-Length": str(len(body)), "ETag": '"x"', "Last-Modified": "Wed, 21 Oct 2015 07:28:00 GMT"}
            for name, value in {**facts, **{name.replace("_", "-"): text for name, text in headers.items()}}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def do_PUT(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.answer(200)

        def do_HEAD(self) -> None:
            self.answer(200, Content_Length=str(CLAIMED))

        def do_DELETE(self) -> None:
            self.answer(204)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.answer(200, b"<DeleteResult><Deleted><Key>x</Key></Deleted></DeleteResult>")

        def do_GET(self) -> None:
            query = parse_qs(urlsplit(self.path).query)
            if "list-type" in query:
                at = int(query.get("continuation-token", ["0"])[0])
                names = listing(query["prefix"][0], at)
                facts = "<LastModified>2020-01-01T00:00:00.000Z</LastModified><Size>500</Size><ETag>x</ETag>"
                listed = "".join(f"<Contents><Key>{name}</Key>{facts}</Contents>" for name in names)
                more = f"<NextContinuationToken>{at + 1}</NextContinuationToken>" if names else ""
                whole = f"<ListBucketResult><IsTruncated>{str(bool(names)).lower()}</IsTruncated>{more}{listed}"
                self.answer(200, f"{whole}</ListBucketResult>".encode())
                return
            asked = re.fullmatch("bytes=([0-9]+)-([0-9]+)", self.headers.get("Range") or "")
            claims = {"Content_Length": str(CLAIMED)}
            if asked:
                claims["Content_Range"] = f"bytes {asked[1]}-{asked[2]}/{CLAIMED}"
            self.answer(206 if asked else 200, **claims)
            self.close_connection = True
            try:
                for _ in range(SENT >> 20):
                    self.wfile.write(bytes(1 << 20))
            except OSError:
                pass

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


READ = """
import sys
from hicache_ext.storage.contract.store import PageBatch
from hicache_ext.storage.tiers.object.store import ObjectPageStore
from hicache_ext.storage.tiers.object.config import ObjectTierConfig
from tests.storage.remote.object.test_lying_stores import KEYS, PAGE_BYTES, through
limit(1024)
tier = ObjectTierConfig(url="s3://test", timeout=30.0).not_written()
store = ObjectPageStore("objects", tier, lambda: through(int(sys.argv[1]), "test", "x"))
buffers = [[memoryview(bytearray(PAGE_BYTES - 128))] for _ in KEYS]
print([result.name for result in store.get(PageBatch(KEYS, buffers))], store.identities())
print(store.metrics.value("error", "cut"))
store.close()
"""


def test_a_body_longer_than_what_was_asked_for_is_cut_and_costs_its_pages() -> None:
    """Seen: 4 GB were taken, and with less memory the client library ended the process."""
    mine = ["x/" + name for name in NAMES]
    with lying_store(lambda prefix, at: [name for name in mine if not at and name.startswith(prefix)]) as port:
        assert run_in_small_memory(READ, port).splitlines() == [f"{['ERROR'] * len(KEYS)} {{}}", "1"]


@pytest.fixture
def names_without_end() -> Iterator[int]:
    numbers = count(1_700_000_000_000)

    def listing(prefix: str, at: int) -> list[str]:
        if not prefix.startswith(f"x/{packs_of(IDENTITY)}"):
            return []
        packs = (Pack(new_id(next(numbers)), PAGE_BYTES, bytes(6)) for _ in range(1000))
        return [f"x/{packed_name(IDENTITY, pack)}" for pack in packs]

    with lying_store(listing) as port:
        yield port


@pytest.mark.parametrize("bound", ["packs", "names"])
def test_a_listing_without_end_ends(names_without_end: int, bound: str, monkeypatch, caplog) -> None:
    """Seen: 2 GB, and more where nobody stopped it."""
    if bound == "packs":
        monkeypatch.setattr(pack_index, "MOST_BYTES", 5000 * 422)
    monkeypatch.setattr(catalog, "MOST_LISTED", 20000 if bound == "packs" else 5000)
    store = ObjectPageStore(
        "objects",
        ObjectTierConfig(url="s3://test", timeout=30.0).not_written(),
        lambda: through(names_without_end, "test", "x"),
    )
    results, _ = read_pages(store, KEYS, [PAGE_BYTES - 128])
    assert set(results) <= {GetResult.MISS}
    assert 4000 < store.details()["packed_pages"] <= 11000
    store.close()
    assert any("the store lists" in record.getMessage() for record in caplog.records)


def open_through(port: int, timeout: float = 30.0) -> ObjectPageStore:
    tier = ObjectTierConfig(url="s3://test", timeout=timeout).not_written()
    return ObjectPageStore("objects", tier, lambda: through(port, "test", "x"))


@pytest.mark.parametrize("fault", ["listed for good", "without end"])
def test_pages_that_are_listed_for_good_or_without_end_are_cleared_later(fault: str, monkeypatch, caplog) -> None:
    """Seen: one listing after the other, without a pause, until the process ended."""
    monkeypatch.setattr(object_store, "MOST_LISTED", 3000)

    def listing(prefix: str, at: int) -> list[str]:
        if prefix.startswith("x/packs"):
            if fault == "without end":
                return [f"x/packs/{IDENTITY.hex()}/not-ours-{at}-{number}" for number in range(1000)]
            return [] if at else [f"x/{NAMES[0]}"]
        return []

    with lying_store(listing) as port:
        store = open_through(port)
        store.clear([IDENTITY])
        begun = time.monotonic()
        assert store.wait_until_cleared(20) is False
        assert time.monotonic() < begun + 20
        assert "lists without end, or goes on listing" in caplog.text
        store.close()


def test_a_listing_of_identities_without_end_ends_with_its_call() -> None:
    """Seen: a thread of the store went on for good, and close() waited for it."""
    asked = []

    def listing(prefix: str, at: int) -> list[str]:
        if not prefix.startswith("x/identities"):
            return []
        asked.append(at)
        return [f"x/identities/not-ours-{at}-{number}" for number in range(1000)]

    with lying_store(listing) as port:
        store = open_through(port, timeout=1.0)
        with pytest.raises(StoreError, match="cannot be listed"):
            store.identities()
        closing = threading.Thread(target=store.close, daemon=True)
        closing.start()
        closing.join(20)
        assert asked and not closing.is_alive()

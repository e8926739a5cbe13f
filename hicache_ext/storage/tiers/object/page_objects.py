"""Pages that are objects of their own: large ones, and small ones that releases before packs stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hicache_ext.page import envelope
from hicache_ext.page.copying import scatter
from hicache_ext.page.page_object import HEADER_LENGTH, encode_object
from hicache_ext.runtime.threads import Call
from hicache_ext.storage.contract.bad_pages import BadPages, Sighting, Verdict
from hicache_ext.storage.contract.clearing import Clearing
from hicache_ext.storage.contract.store import GetResult, SetResult
from hicache_ext.storage.tiers.object.client import explain, is_md5_of
from hicache_ext.storage.tiers.object.conditional import ConditionalCreate
from hicache_ext.storage.tiers.object.names import page_key, page_name, pages_of
from hicache_ext.storage.tiers.object.requests import Requests

LIST_FROM = 1000
"""From so many keys of one identity on, presence is looked up by listing: 1,000 names a request instead of one."""
LISTED_AT_ONCE = 1000
_KEYS_PER_LISTING = 100
"""A listing ends after one request per so many keys; the rest is asked key by key."""

OF_ANOTHER_LENGTH = object()
"""Not written, because an object of another length is there."""


class PageObjects:
    """Requests about one page each. Threads: any."""

    def __init__(self, requests: Requests, create: ConditionalCreate, bad_pages: BadPages, clearing: Clearing) -> None:
        self._requests = requests
        self._create = create
        self._bad_pages = bad_pages
        self._clearing = clearing
        self._metrics = requests.metrics

    def get(self, key: bytes, segments: Sequence[memoryview], call: Call[Any]) -> GetResult | None:
        """Read a page."""
        expected = HEADER_LENGTH + sum([segment.nbytes for segment in segments])
        requests = self._requests
        try:
            reply = requests.obstore.get(requests.client, page_name(key))
            requests.reached = True
            # A body of the wrong size is not worth receiving.
            found = int(reply.meta["size"])
            body = requests.body(reply, expected) if found == expected else memoryview(b"")
        except FileNotFoundError as error:
            return GetResult.MISS if requests.is_absent(error) else GetResult.ERROR
        except Exception as error:  # noqa: BLE001 - a client library's errors end here
            return GetResult.TIMEOUT if requests.failed(error, call).reason == "timeout" else GetResult.ERROR
        reason: str | None
        if found != expected:
            # A proxy may say so as well as the store.
            seen = Sighting(found)
            reason = "truncated" if found < expected else "longer"
        elif body.nbytes != expected:
            # The store contradicts itself; the object may be good.
            self._metrics.add("error", "cut")
            return GetResult.ERROR
        else:
            # Checked where it was received: host memory never holds half a page or another one.
            reason = envelope.reason_to_refuse(body[:HEADER_LENGTH], key, [body[HEADER_LENGTH:]])
            seen = Sighting(found) if reason is None else Sighting.of(found, [body])
        if reason is not None:
            self._metrics.add("corrupt", reason)
            self._bad_pages.suspect(key, expected, seen, reason)
            return GetResult.CORRUPT
        self._bad_pages.clear([key])
        with call.memory() as mine:
            if not mine:
                return None
            scatter(body[HEADER_LENGTH:], segments)
        return GetResult.HIT

    def size(self, key: bytes, call: Call[Any]) -> int | None:
        """Bytes of the object of a page; 0 where there is none, None where that is not known."""
        try:
            return self._requests.size_of(page_name(key)) or 0
        except Exception as error:  # noqa: BLE001 - as above
            self._requests.failed(error, call)
            return None

    def look_up_in_listing(self, digest: bytes, keys: Sequence[bytes], deadline: float) -> dict[bytes, int]:
        """What a listing of an identity says of these pages: bytes of each object, 0 for one that is absent. Of all
        when it is short, of those that were met when it is long."""
        stored: dict[bytes, int] = {}
        wanted = set(keys)
        requests = self._requests

        def look_up(call: Call[Any], _: int) -> bool:
            listing = requests.obstore.list(requests.client, pages_of(digest), chunk_size=LISTED_AT_ONCE)
            for number, listed in enumerate(listing):
                if call.over or number >= len(keys) // _KEYS_PER_LISTING:
                    return False
                for entry in listed:
                    if (key := page_key(entry["path"])) in wanted:
                        stored[key] = int(entry["size"])
            return True

        def guarded(call: Call[Any], position: int) -> bool:
            try:
                return look_up(call, position)
            except Exception as error:  # noqa: BLE001 - as above
                requests.failed(error, call)
                return False

        (complete,), _ = requests.share([guarded], deadline)
        if complete is None:
            return {}
        return {key: stored.get(key, 0) for key in keys} if complete else dict(stored)

    def set(
        self, key: bytes, segments: Sequence[memoryview], call: Call[Any], verdict: Verdict | None
    ) -> SetResult | object | None:
        """Write a page. ``verdict``: of one that arrived damaged here."""
        size = HEADER_LENGTH + sum([segment.nbytes for segment in segments])
        with self._clearing.writing([key]) as writing:
            replaces = key in writing.cleared or verdict is Verdict.DENIED
            try:
                if not replaces and verdict in (Verdict.WITHHELD, Verdict.UNCLEAR):
                    return SetResult.REJECTED
                if not replaces and not self._create.supported:
                    found = self._requests.size_of(page_name(key))
                    if found == size:
                        return SetResult.EXISTS
                    if found is not None and verdict is Verdict.GOOD:
                        # A whole page of its own: whoever expects another length is wrong, or this process is.
                        return SetResult.REJECTED
                    if found is not None:
                        self._metrics.add("corrupt", "length")
                        self._bad_pages.suspect(key, size, Sighting(found), "length")
                        return OF_ANOTHER_LENGTH
                with call.memory() as mine:
                    if not mine:
                        return None
                    body = encode_object(key, segments)
                result = self._put(key, body, replaces)
                if result.durable:
                    writing.stored.add(key)
                return result
            except Exception as error:  # noqa: BLE001 - as above
                failure = self._requests.failed(error, call)
                return SetResult.TIMEOUT if failure.reason == "timeout" else SetResult.ERROR

    def _put(self, key: bytes, body: memoryview, replaces: bool) -> SetResult:
        create = self._create.supported and not replaces
        requests = self._requests
        try:
            mode = {"mode": "create"} if create else {}
            put = requests.obstore.put(requests.client, page_name(key), body, use_multipart=False, **mode)
        except Exception as error:
            if explain(error).reason != "exists":
                raise
            requests.reached = True
            return SetResult.EXISTS
        requests.reached = True
        if replaces and self._create.etags_are_md5 and not is_md5_of(body, put["e_tag"]):
            self._metrics.add("error", "not_as_sent")
            return SetResult.ERROR
        self._bad_pages.clear([key])
        return SetResult.STORED

    def remove(self, key: bytes, call: Call[Any]) -> bool:
        """Remove whatever has the page's name, whole or not; whether there was something."""
        try:
            if self._requests.size_of(page_name(key)) is None:
                return False
            self._requests.delete([page_name(key)])
        except Exception as error:  # noqa: BLE001 - as above
            self._requests.failed(error, call)
            return False
        return True

"""Reading a batch: neighbours in a pack by one request each run, all else page by page, all at once.

A reply is checked in obstore's buffer and each good page copied into host memory once, without the GIL: host memory
only gets good pages, and nothing after the call's deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hicache_ext.errors import FormatError
from hicache_ext.page import envelope
from hicache_ext.page.copying import scatter
from hicache_ext.page.pack import PACK_BYTES, SMALL, short_hash
from hicache_ext.page.page_object import HEADER_LENGTH
from hicache_ext.runtime.threads import Call
from hicache_ext.storage.contract.bad_pages import BadPages, Sighting
from hicache_ext.storage.contract.pack_index import Place, Run, runs
from hicache_ext.storage.contract.store import GetResult, PageBatch
from hicache_ext.storage.tiers.object.catalog import PackCatalog
from hicache_ext.storage.tiers.object.client import begins_behind_the_end
from hicache_ext.storage.tiers.object.names import packed_name
from hicache_ext.storage.tiers.object.page_objects import PageObjects
from hicache_ext.storage.tiers.object.requests import Piece, Requests

_SHORTEST_RANGE = 1 << 20
"""Bytes. Requests for less cost more than they save by being more."""
_MOST_ROUNDS = 4
"""A second one for pages that no known pack has, or whose pack is gone: they may be in one that came since."""


class Reading:
    """Threads: any."""

    def __init__(self, requests: Requests, catalog: PackCatalog, objects: PageObjects, bad_pages: BadPages) -> None:
        self._requests = requests
        self._catalog = catalog
        self._objects = objects
        self._bad_pages = bad_pages
        self._metrics = requests.metrics

    def read(self, batch: PageBatch, hides: Callable[[bytes], bool], deadline: float) -> list[GetResult]:
        """One result for each page, in order; those that are hidden are absent."""
        return _Read(self, batch, hides, deadline).results()

    def check(
        self, place: Place, body: memoryview, key: bytes, segments: Sequence[memoryview], call: Call[Any]
    ) -> GetResult | None:
        """The page at ``place`` is ``body``, or what arrived of it."""
        size = place.pack.page_bytes
        if body.nbytes < size:
            return self._bad(key, size, Sighting(body.nbytes), "truncated")
        reason = envelope.reason_to_refuse(body[:HEADER_LENGTH], key, [body[HEADER_LENGTH:]])
        if reason == "page_hash" and _shares_its_name(body, key):
            self._catalog.of(key[: envelope.IDENTITY_LENGTH]).index.forget_page(place)
            return GetResult.MISS
        if reason is not None:
            return self._bad(key, size, Sighting.of(size, [body]), reason)
        self._bad_pages.clear([key])
        with call.memory() as mine:
            if not mine:
                return None
            scatter(body[HEADER_LENGTH:], segments)
        return GetResult.HIT

    def _bad(self, key: bytes, size: int, seen: Sighting, reason: str) -> GetResult:
        self._metrics.add("corrupt", reason)
        self._bad_pages.suspect(key, size, seen, reason)
        return GetResult.CORRUPT


class _Read:
    """One call."""

    def __init__(self, reading: Reading, batch: PageBatch, hides: Callable[[bytes], bool], deadline: float) -> None:
        self._reading = reading
        self._batch = batch
        self._deadline = deadline
        self._results: list[GetResult | None] = [GetResult.MISS if hides(key) else None for key in batch.keys]
        self._asked: set[int] = set()
        """Pages whose own objects were asked for."""
        self._refreshed: dict[bytes, GetResult] = {}
        """What pages are that no pack has, of each identity that was listed: MISS, if that did not fail."""

    def results(self) -> list[GetResult]:
        missing = GetResult.ERROR
        for _ in range(_MOST_ROUNDS):
            pieces = self._pieces()
            if not pieces:
                break
            answers, in_time = self._reading._requests.share(pieces, self._deadline)
            for answer in answers:
                for position, result in answer or ():
                    self._results[position] = result
            if not in_time:
                missing = GetResult.TIMEOUT
                break
        return [missing if result is None else result for result in self._results]

    def _pieces(self) -> list[Piece]:
        """The requests of the next round; pages that are nowhere are a MISS."""
        reading, batch = self._reading, self._batch
        open_pages = [position for position, result in enumerate(self._results) if result is None]
        pieces: list[Piece] = []
        digests = dict.fromkeys(batch.keys[position][: envelope.IDENTITY_LENGTH] for position in open_pages)
        for digest in digests:
            known = reading._catalog.of(digest)
            mine = [position for position in open_pages if batch.keys[position].startswith(digest)]
            places = known.index.find([batch.keys[position] for position in mine])
            lacking = any(
                place is None and batch.sizes[position] + HEADER_LENGTH < SMALL
                for position, place in zip(mine, places, strict=True)
            )
            refreshing = lacking and digest not in self._refreshed
            if refreshing:
                self._refreshed[digest] = GetResult.MISS
                pieces.append(self._refreshing(digest))
                if not known.has_objects:
                    pieces.append(self._looking_for_objects(digest))
            wanted: list[Place | None] = [None] * len(batch.keys)
            for position, place in zip(mine, places, strict=True):
                if place is None:
                    large = batch.sizes[position] + HEADER_LENGTH >= SMALL
                    if position not in self._asked and (large or known.has_objects):
                        self._asked.add(position)
                        pieces.append(self._getting(position))
                    elif not refreshing:
                        self._results[position] = self._refreshed.get(digest, GetResult.MISS)
                elif place.pack.page_bytes != batch.sizes[position] + HEADER_LENGTH:
                    self._results[position] = self._of_another_length(position, place)
                else:
                    wanted[position] = place
            at_once = reading._requests.at_once
            length = sum(place.pack.page_bytes for place in wanted if place is not None)
            longest = min(PACK_BYTES, max(_SHORTEST_RANGE, length // at_once))
            pieces += [self._reading_run(digest, run) for run in runs(wanted, longest)]
        return pieces

    def _of_another_length(self, position: int, place: Place) -> GetResult:
        found, expected = place.pack.page_bytes, self._batch.sizes[position] + HEADER_LENGTH
        reason = "truncated" if found < expected else "longer"
        return self._reading._bad(self._batch.keys[position], expected, Sighting(found), reason)

    # -- requests --------------------------------------------------------------------------------------------------

    def _refreshing(self, digest: bytes) -> Piece:
        return self._guarded(digest, lambda: self._reading._catalog.refresh(digest, self._deadline))

    def _looking_for_objects(self, digest: bytes) -> Piece:
        return self._guarded(digest, lambda: self._reading._catalog.look_for_objects(digest))

    def _guarded(self, digest: bytes, request: Callable[[], object]) -> Piece:
        def make(call: Call[Any], _: int) -> None:
            try:
                request()
            except Exception as error:  # noqa: BLE001 - a client library's errors end here
                failure = self._reading._requests.failed(error, call)
                self._refreshed[digest] = GetResult.TIMEOUT if failure.reason == "timeout" else GetResult.ERROR

        return make

    def _getting(self, position: int) -> Piece:
        def get(call: Call[Any], _: int) -> list[tuple[int, GetResult | None]]:
            batch = self._batch
            result = self._reading._objects.get(batch.keys[position], batch.buffers[position], call)
            # One that is absent may be in a pack that came since.
            return [(position, None if result is GetResult.MISS else result)]

        return get

    def _reading_run(self, digest: bytes, run: Run) -> Piece:
        def read(call: Call[Any], _: int) -> list[tuple[int, GetResult | None]]:
            requests = self._reading._requests
            name = packed_name(digest, run.pack)
            try:
                reply = requests.obstore.get(requests.client, name, options={"range": (run.offset, run.end)})
                requests.reached = True
                length = int(reply.meta["size"])
                body = requests.body(reply, run.end - run.offset)
            except FileNotFoundError as error:
                if requests.is_absent(error):
                    self._reading._catalog.of(digest).index.forget(run.pack.id)
                    return []
                return [(position, GetResult.ERROR) for position in run.members]
            except Exception as error:  # noqa: BLE001 - as above
                if begins_behind_the_end(error):
                    body, length = memoryview(b""), run.offset
                else:
                    failure = requests.failed(error, call)
                    result = GetResult.TIMEOUT if failure.reason == "timeout" else GetResult.ERROR
                    return [(position, result) for position in run.members]
            if body.nbytes != max(0, min(run.end, length) - run.offset):
                # The store contradicts itself; the pages may be good.
                self._reading._metrics.add("error", "cut")
                return [(position, GetResult.ERROR) for position in run.members]
            return [
                (position, self._check(run, number, position, body, call))
                for number, position in enumerate(run.members)
            ]

        return read

    def _check(self, run: Run, number: int, position: int, body: memoryview, call: Call[Any]) -> GetResult | None:
        size = run.pack.page_bytes
        place = Place(run.pack, run.first + number)
        page = body[number * size : (number + 1) * size]
        return self._reading.check(place, page, self._batch.keys[position], self._batch.buffers[position], call)


def _shares_its_name(body: memoryview, key: bytes) -> bool:
    """Whether a page is another one with the same short hash."""
    try:
        found = envelope.decode_header(body[:HEADER_LENGTH])
    except FormatError:
        return False
    return found.key != key and short_hash(found.key) == short_hash(key)

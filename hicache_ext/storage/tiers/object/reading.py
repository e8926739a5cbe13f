"""Which pages are there, and reading them.

An index of names (catalog.py) says in which packs pages would be, and none is answered from memory alone: in one round
of requests the store is asked for what came since, and whether those packs are there still, a request per pack and not
per page. Pages that no pack has are asked for one by one where the identity has pages that are objects of their own.

Neighbours in a pack are read by one request each run, all else page by page, all at once. A reply is checked in
obstore's buffer and each good page copied into host memory once, without the GIL: host memory only gets good pages, and
nothing after the call's deadline.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hicache_ext.errors import FormatError
from hicache_ext.page import envelope
from hicache_ext.page.envelope import IDENTITY_LENGTH
from hicache_ext.page.pack import PACK_BYTES, SMALL, short_hash
from hicache_ext.page.page_object import HEADER_LENGTH, scatter
from hicache_ext.runtime.threads import Call
from hicache_ext.storage.contract.bad_pages import BadPages, Sighting
from hicache_ext.storage.contract.clearing import Clearing
from hicache_ext.storage.contract.pack_index import PackIndex, Place, Run, runs
from hicache_ext.storage.contract.store import GetResult, PageBatch, identities_of
from hicache_ext.storage.tiers.object.catalog import (
    LISTED_AT_ONCE,
    PackCatalog,
    packed_name,
    page_key,
    page_name,
    pages_of,
)
from hicache_ext.storage.tiers.object.client import Failure, Piece, Requests, begins_behind_the_end

LIST_FROM = 1000
"""From so many keys of one identity on, presence is looked up by listing: 1,000 names a request instead of one."""
_KEYS_PER_LISTING = 100
"""A listing ends after one request per so many keys; the rest is asked key by key."""
_SHORTEST_RANGE = 1 << 20
"""Bytes. Requests for less cost more than they save by being more."""
_MOST_ROUNDS = 4
"""Of requests. A second one is needed where something is gone, or has come; more where that happens again."""

Stored = Place | int
"""Where a page is: in a pack, or in an object of its own, of so many bytes."""


@dataclass(frozen=True, slots=True)
class Pages:
    """What reads, writes and removals of one store share."""

    requests: Requests
    catalog: PackCatalog
    bad: BadPages
    clearing: Clearing
    most_in_a_pack: int

    def hides(self, key: bytes) -> bool:
        return self.bad.hides(key) or self.clearing.hides(key)

    def index(self, key: bytes) -> PackIndex:
        """The packs of the identity of a page."""
        return self.catalog.of(key[:IDENTITY_LENGTH]).index

    def suspect(self, key: bytes, size: int, seen: Sighting, reason: str) -> GetResult:
        """What was seen under ``key`` is not the page of ``size`` bytes: count it, have it looked at; CORRUPT."""
        self.requests.metrics.add("corrupt", reason)
        self.bad.suspect(key, size, seen, reason)
        return GetResult.CORRUPT


# -- presence ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Found:
    """The answer of a look-up."""

    places: dict[bytes, Stored]
    failed: str = ""
    """How a request failed, "timeout" or "error": of pages that are not found nobody knows whether they are there."""


def look_up(
    pages: Pages, keys: Sequence[bytes], hides: Callable[[bytes], bool], deadline: float, *, leading: bool = False
) -> Found:
    """Where the pages are that are there, but those that are hidden. ``leading``: pages behind the first one that is
    absent do not matter."""
    wanted = [key for key in dict.fromkeys(keys) if not hides(key)]
    return _LookUp(pages, wanted, deadline, leading=leading).found() if wanted else Found({})


class _LookUp:
    """One call."""

    def __init__(self, pages: Pages, keys: Sequence[bytes], deadline: float, *, leading: bool) -> None:
        """``keys``: each once, in the order of the chain."""
        self._pages = pages
        self._requests = pages.requests
        self._catalog = pages.catalog
        self._keys = keys
        self._digests = identities_of(keys)
        self._deadline = deadline
        self._leading = leading
        self._confirmed: dict[str, int] = {}
        """Packs that were there during this call: id and bytes."""
        self._objects: dict[bytes, int] = {}
        """Bytes of objects; 0 for those that are absent."""
        self._failed = ""

    def found(self) -> Found:
        for number in range(_MOST_ROUNDS):
            pieces = self._pieces(first=number == 0)
            if not pieces:
                break
            _, in_time = self._requests.share(pieces, self._deadline)
            if not in_time:
                self._requests.count(Failure("timeout"))
                self._note_failed(GetResult.TIMEOUT)
                break
        found: dict[bytes, Stored] = {}
        for key, place in zip(self._keys, self._places(), strict=True):
            if place is not None and place.offset + place.pack.page_bytes <= self._confirmed.get(place.pack.id, 0):
                found[key] = place
            elif self._objects.get(key, 0) >= HEADER_LENGTH:
                found[key] = self._objects[key]
        return Found(found, self._failed)

    def _note_failed(self, result: GetResult) -> None:
        self._failed = result.value

    def _places(self) -> list[Place | None]:
        places: list[Place | None] = [None] * len(self._keys)
        for digest in self._digests:
            mine = [position for position, key in enumerate(self._keys) if key.startswith(digest)]
            found = self._catalog.of(digest).index.find([self._keys[position] for position in mine])
            for position, place in zip(mine, found, strict=True):
                places[position] = place
        return places

    def _pieces(self, *, first: bool) -> list[Piece]:
        """The requests of the next round."""
        places = self._places()
        pieces: list[Piece] = []
        if first:
            for digest in self._digests:
                pieces.append(self._requests.trying(partial(self._refresh, digest), self._note_failed))
                if not self._catalog.of(digest).has_objects:
                    look = partial(self._catalog.look_for_objects, digest)
                    pieces.append(self._requests.trying(look, self._note_failed))
        packs: dict[str, Piece] = {}
        missing: list[bytes] = []
        for key, place in zip(self._keys, places, strict=True):
            if place is None:
                known = self._objects.get(key)
                if known is None and self._catalog.of(key[:IDENTITY_LENGTH]).has_objects:
                    missing.append(key)
                elif self._leading and not first and (known is None or known < HEADER_LENGTH):
                    # Absent, or in no pack, and the identity has nothing else.
                    break
            elif place.pack.id not in self._confirmed and place.pack.id not in packs:
                confirm = partial(self._confirm, key[:IDENTITY_LENGTH], place)
                packs[place.pack.id] = self._requests.trying(confirm, self._note_failed)
        pieces += packs.values()
        for key in missing[:LIST_FROM] if self._leading else self._not_listed(missing):
            pieces.append(partial(self._ask, key, len(pieces)))
        return pieces

    def _not_listed(self, missing: Sequence[bytes]) -> list[bytes]:
        """Look up many pages by listing; those of which it said nothing."""
        for digest in identities_of(missing):
            mine = [key for key in missing if key.startswith(digest)]
            if len(mine) >= LIST_FROM:
                # Half of the time: some servers list slower than they answer for single names (s3rver: by far).
                half = (time.monotonic() + self._deadline) / 2
                (complete,), _ = self._requests.share([partial(self._list, digest, mine)], half)
                if complete:
                    self._objects = {**dict.fromkeys(mine, 0), **self._objects}
        return [key for key in missing if key not in self._objects]

    # -- requests --------------------------------------------------------------------------------------------------

    def _refresh(self, digest: bytes) -> None:
        self._confirmed.update(self._catalog.refresh(digest, self._deadline))

    def _confirm(self, digest: bytes, place: Place) -> None:
        size = self._requests.size_of(packed_name(digest, place.pack))
        if size is None:
            self._catalog.of(digest).index.forget(place.pack.id)
        else:
            self._confirmed[place.pack.id] = size

    def _list(self, digest: bytes, keys: Sequence[bytes], call: Call[Any]) -> bool:
        """Note the bytes of the objects that a listing meets; False for one that is too long, or fails."""
        wanted = set(keys)
        try:
            for number, listed in enumerate(self._requests.listed(pages_of(digest), chunk_size=LISTED_AT_ONCE)):
                if call.over or number >= len(keys) // _KEYS_PER_LISTING:
                    return False
                for entry in listed:
                    if (key := page_key(entry["path"])) in wanted:
                        self._objects[key] = int(entry["size"])
        except Exception as error:  # noqa: BLE001 - a client library's errors end here
            self._requests.failed(error, call, GetResult)
            return False
        return True

    def _ask(self, key: bytes, position: int, call: Call[Any]) -> None:
        size = None
        try:
            size = self._objects[key] = self._requests.size_of(page_name(key)) or 0
        except Exception as error:  # noqa: BLE001 - as above
            self._note_failed(self._requests.failed(error, call, GetResult))
        if self._leading and not size:
            # Handed out in order: no more than one round of requests behind the gap.
            call.stop(position)


# -- reading -----------------------------------------------------------------------------------------------------------


def read(pages: Pages, batch: PageBatch, deadline: float) -> list[GetResult]:
    """One result for each page, in order; those that were cleared are absent."""
    return _Read(pages, batch, deadline).results()


class _Read:
    """One call."""

    def __init__(self, pages: Pages, batch: PageBatch, deadline: float) -> None:
        self._pages = pages
        self._requests = pages.requests
        self._batch = batch
        self._deadline = deadline
        hides = pages.clearing.hides
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
            answers, in_time = self._requests.share(pieces, self._deadline)
            for answer in answers:
                # What is no list says of a look whether it ended well.
                for position, result in answer if isinstance(answer, list) else ():
                    self._results[position] = result
            if not in_time:
                missing = GetResult.TIMEOUT
                break
        return [missing if result is None else result for result in self._results]

    def _pieces(self) -> list[Piece]:
        """The requests of the next round; pages that are nowhere are a MISS."""
        batch, catalog = self._batch, self._pages.catalog
        sizes = [HEADER_LENGTH + size for size in batch.sizes]
        open_pages = [position for position, result in enumerate(self._results) if result is None]
        pieces: list[Piece] = []
        for digest in dict.fromkeys(batch.keys[position][:IDENTITY_LENGTH] for position in open_pages):
            known = catalog.of(digest)
            mine = [position for position in open_pages if batch.keys[position].startswith(digest)]
            places = known.index.find([batch.keys[position] for position in mine])
            lacking = any(place is None and sizes[at] < SMALL for at, place in zip(mine, places, strict=True))
            refreshing = lacking and digest not in self._refreshed
            if refreshing:
                self._refreshed[digest] = GetResult.MISS
                note = partial(self._refreshed.__setitem__, digest)
                pieces.append(self._requests.trying(partial(catalog.refresh, digest, self._deadline), note))
                if not known.has_objects:
                    pieces.append(self._requests.trying(partial(catalog.look_for_objects, digest), note))
            wanted: list[Place | None] = [None] * len(batch.keys)
            for at, place in zip(mine, places, strict=True):
                if place is None:
                    if at not in self._asked and (sizes[at] >= SMALL or known.has_objects):
                        self._asked.add(at)
                        pieces.append(partial(self._get, at))
                    elif not refreshing:
                        self._results[at] = self._refreshed.get(digest, GetResult.MISS)
                elif place.pack.page_bytes != sizes[at]:
                    reason = "truncated" if place.pack.page_bytes < sizes[at] else "longer"
                    seen = Sighting(place.pack.page_bytes)
                    self._results[at] = self._pages.suspect(batch.keys[at], sizes[at], seen, reason)
                else:
                    wanted[at] = place
            length = sum(place.pack.page_bytes for place in wanted if place is not None)
            longest = min(PACK_BYTES, max(_SHORTEST_RANGE, length // self._requests.at_once))
            pieces += [partial(self._read_run, digest, run) for run in runs(wanted, longest)]
        return pieces

    # -- requests --------------------------------------------------------------------------------------------------

    def _get(self, position: int, call: Call[Any]) -> list[tuple[int, GetResult | None]]:
        """Read a page that is an object of its own. One that is absent may be in a pack that came since."""
        key, segments = self._batch.keys[position], self._batch.buffers[position]
        result = self._get_object(key, segments, HEADER_LENGTH + self._batch.sizes[position], call)
        return [(position, None if result is GetResult.MISS else result)]

    def _get_object(
        self, key: bytes, segments: Sequence[memoryview], expected: int, call: Call[Any]
    ) -> GetResult | None:
        requests = self._requests
        try:
            reply = requests.obstore.get(requests.client, page_name(key))
            requests.reached = True
            # A body of the wrong size is not worth receiving.
            found = int(reply.meta["size"])
            body = requests.body(reply, expected) if found == expected else memoryview(b"")
        except FileNotFoundError as error:
            return GetResult.MISS if requests.is_absent(error) else GetResult.ERROR
        except Exception as error:  # noqa: BLE001 - as above
            result: GetResult = requests.failed(error, call, GetResult)
            return result
        if found != expected:
            # A proxy may say so as well as the store.
            return self._pages.suspect(key, expected, Sighting(found), "truncated" if found < expected else "longer")
        if body.nbytes != expected:
            # The store contradicts itself; the object may be good.
            requests.metrics.add("error", "cut")
            return GetResult.ERROR
        return self._checked(body, key, segments, None, call)

    def _read_run(self, digest: bytes, run: Run, call: Call[Any]) -> list[tuple[int, GetResult | None]]:
        requests = self._requests
        name = packed_name(digest, run.pack)
        try:
            reply = requests.obstore.get(requests.client, name, options={"range": (run.offset, run.end)})
            requests.reached = True
            length = int(reply.meta["size"])
            body = requests.body(reply, run.end - run.offset)
        except FileNotFoundError as error:
            if requests.is_absent(error):
                self._pages.catalog.of(digest).index.forget(run.pack.id)
                return []
            return [(position, GetResult.ERROR) for position in run.members]
        except Exception as error:  # noqa: BLE001 - as above
            if not begins_behind_the_end(error):
                result = requests.failed(error, call, GetResult)
                return [(position, result) for position in run.members]
            body, length = memoryview(b""), run.offset
        if body.nbytes != max(0, min(run.end, length) - run.offset):
            # The store contradicts itself; the pages may be good.
            requests.metrics.add("error", "cut")
            return [(position, GetResult.ERROR) for position in run.members]
        size, results = run.pack.page_bytes, []
        for number, position in enumerate(run.members):
            page, key = body[number * size : (number + 1) * size], self._batch.keys[position]
            result = (
                self._pages.suspect(key, size, Sighting(page.nbytes), "truncated")
                if page.nbytes < size
                else self._checked(page, key, self._batch.buffers[position], Place(run.pack, run.first + number), call)
            )
            results.append((position, result))
        return results

    def _checked(
        self, body: memoryview, key: bytes, segments: Sequence[memoryview], place: Place | None, call: Call[Any]
    ) -> GetResult | None:
        """Copy a page that arrived, from its ``place`` in a pack or from an object of its own, if it is the right one.

        Checked where it was received: host memory never holds half a page or another one."""
        reason = envelope.reason_to_refuse(body[:HEADER_LENGTH], key, [body[HEADER_LENGTH:]])
        if reason == "page_hash" and place is not None and _shares_its_name(body, key):
            self._pages.index(key).forget_page(place)
            return GetResult.MISS
        if reason is not None:
            return self._pages.suspect(key, body.nbytes, Sighting.of(body.nbytes, [body]), reason)
        self._pages.bad.clear([key])
        with call.memory() as mine:
            if not mine:
                return None
            scatter(body[HEADER_LENGTH:], segments)
        return GetResult.HIT


def _shares_its_name(body: memoryview, key: bytes) -> bool:
    """Whether a page is another one with the same short hash."""
    try:
        found = envelope.decode_header(body[:HEADER_LENGTH])
    except FormatError:
        return False
    return found.key != key and short_hash(found.key) == short_hash(key)

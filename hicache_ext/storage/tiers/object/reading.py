"""Which pages are there, and reading them.

An index of names (catalog.py) says in which packs pages would be, and none is answered from memory alone: in one round
of requests the store is asked for what came since, and whether those packs are there still, a request per pack and not
per page.

Neighbours in a pack are read by one request each run, all runs at once. A reply is checked in obstore's buffer and each
good page copied into host memory once, without the GIL: host memory only gets good pages, and nothing after the call's
deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hicache_ext.errors import FormatError
from hicache_ext.page import envelope
from hicache_ext.page.envelope import IDENTITY_LENGTH
from hicache_ext.page.pack import PACK_BYTES, short_hash
from hicache_ext.page.page_object import HEADER_LENGTH, scatter
from hicache_ext.runtime.threads import Call
from hicache_ext.storage.contract.bad_pages import BadPages, Sighting
from hicache_ext.storage.contract.clearing import Clearing
from hicache_ext.storage.contract.pack_index import Place, Run, runs
from hicache_ext.storage.contract.store import GetResult, PageBatch, identities_of
from hicache_ext.storage.tiers.object.catalog import PackCatalog, packed_name
from hicache_ext.storage.tiers.object.client import Failure, Piece, Requests, begins_behind_the_end

_SHORTEST_RANGE = 1 << 20
"""Bytes. Requests for less cost more than they save by being more."""
_MOST_ROUNDS = 4
"""Of requests. A second one is needed where something is gone, or has come; more where that happens again."""


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

    def suspect(self, key: bytes, size: int, seen: Sighting, reason: str) -> GetResult:
        """What was seen under ``key`` is not the page of ``size`` bytes: count it, have it looked at; CORRUPT."""
        self.requests.metrics.add("corrupt", reason)
        self.bad.suspect(key, size, seen, reason)
        return GetResult.CORRUPT


# -- presence ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Found:
    """The answer of a look-up."""

    places: dict[bytes, Place]
    failed: str = ""
    """How a request failed, "timeout" or "error": of pages that are not found nobody knows whether they are there."""


def look_up(
    pages: Pages, keys: Sequence[bytes], hides: Callable[[bytes], bool], deadline: float, *, leading: bool = False
) -> Found:
    """Where the pages are that are there, but those that are hidden. ``leading``: pages behind the first one that is
    absent do not matter."""
    requests, catalog = pages.requests, pages.catalog
    wanted = [key for key in dict.fromkeys(keys) if not hides(key)]
    digests = identities_of(wanted)
    confirmed: dict[str, int] = {}
    """Packs that were there during this call: id and bytes."""
    failed = ""

    def note(result: GetResult) -> None:
        nonlocal failed
        failed = result.value

    def refresh(digest: bytes) -> None:
        confirmed.update(catalog.refresh(digest, deadline))

    def confirm(digest: bytes, place: Place) -> None:
        size = requests.size_of(packed_name(digest, place.pack))
        if size is None:
            catalog.of(digest).index.forget(place.pack.id)
        else:
            confirmed[place.pack.id] = size

    for number in range(_MOST_ROUNDS):
        pieces: dict[object, Piece] = {}
        if number == 0:
            pieces.update((digest, requests.trying(partial(refresh, digest), note)) for digest in digests)
        for key, place in zip(wanted, catalog.find(wanted), strict=True):
            if place is None:
                if leading and number > 0:
                    break
            elif place.pack.id not in confirmed and place.pack.id not in pieces:
                pieces[place.pack.id] = requests.trying(partial(confirm, key[:IDENTITY_LENGTH], place), note)
        if not pieces:
            break
        if not requests.share(list(pieces.values()), deadline)[1]:
            requests.count(Failure("timeout"))
            note(GetResult.TIMEOUT)
            break
    found = {
        key: place
        for key, place in zip(wanted, catalog.find(wanted), strict=True)
        if place is not None and place.offset + place.pack.page_bytes <= confirmed.get(place.pack.id, 0)
    }
    return Found(found, failed)


# -- reading -----------------------------------------------------------------------------------------------------------


def read(pages: Pages, batch: PageBatch, deadline: float) -> list[GetResult]:
    """One result for each page, in order; those that were cleared are absent."""
    requests, catalog, hides = pages.requests, pages.catalog, pages.clearing.hides
    results: list[GetResult | None] = [GetResult.MISS if hides(key) else None for key in batch.keys]
    listed: dict[bytes, GetResult] = {}
    """What pages are that no pack has, of each identity that was listed: MISS, if that did not fail."""
    missing = GetResult.ERROR
    for _ in range(_MOST_ROUNDS):
        left = [position for position, result in enumerate(results) if result is None]
        wanted: list[Place | None] = [None] * len(batch)
        lacking: set[bytes] = set()
        pieces: list[Piece] = []
        for position, place in zip(left, catalog.find([batch.keys[position] for position in left]), strict=True):
            key, size = batch.keys[position], HEADER_LENGTH + batch.sizes[position]
            if place is None:
                results[position] = listed.get(key[:IDENTITY_LENGTH])
                if results[position] is None:
                    lacking.add(key[:IDENTITY_LENGTH])
            elif place.pack.page_bytes != size:
                pieces.append(partial(_refuse_length, pages, key, size, position, place))
            else:
                wanted[position] = place
        listed |= dict.fromkeys(lacking, GetResult.MISS)
        pieces += [
            requests.trying(partial(catalog.refresh, digest, deadline), partial(listed.__setitem__, digest))
            for digest in lacking
        ]
        length = sum(place.pack.page_bytes for place in wanted if place is not None)
        longest = min(PACK_BYTES, max(_SHORTEST_RANGE, length // requests.at_once))
        pieces += [partial(_read_run, pages, batch, run) for run in runs(wanted, longest)]
        if not pieces:
            break
        answers, in_time = requests.share(pieces, deadline)
        for answer in answers:
            # What is no list says of a look whether it ended well.
            for position, result in answer if isinstance(answer, list) else ():
                results[position] = result
        if not in_time:
            missing = GetResult.TIMEOUT
            break
    return [missing if result is None else result for result in results]


def _refuse_length(
    pages: Pages, key: bytes, size: int, position: int, place: Place, call: Call[Any]
) -> list[tuple[int, GetResult]]:
    """A name says another length than ``size``. Nothing is said where the pack is gone: its page may be elsewhere."""
    digest, found = key[:IDENTITY_LENGTH], place.pack.page_bytes
    try:
        if pages.requests.size_of(packed_name(digest, place.pack)) is None:
            pages.catalog.of(digest).index.forget(place.pack.id)
            return []
    except Exception as error:  # noqa: BLE001 - a client library's errors end here
        return [(position, pages.requests.failed(error, call, GetResult))]
    reason = "truncated" if found < size else "longer"
    return [(position, pages.suspect(key, size, Sighting(found), reason))]


def _read_run(pages: Pages, batch: PageBatch, run: Run, call: Call[Any]) -> list[tuple[int, GetResult | None]]:
    """Read neighbours. Nothing is said of pages whose pack is gone: they may be in one that came since."""
    requests = pages.requests
    digest = batch.keys[run.members[0]][:IDENTITY_LENGTH]
    try:
        options = {"range": (run.offset, run.end)}
        reply = requests.obstore.get(requests.client, packed_name(digest, run.pack), options=options)
        requests.reached = True
        length = int(reply.meta["size"])
        body = requests.body(reply, run.end - run.offset)
    except FileNotFoundError as error:
        if requests.is_absent(error):
            pages.catalog.of(digest).index.forget(run.pack.id)
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
        page, key = body[number * size : (number + 1) * size], batch.keys[position]
        place = Place(run.pack, run.first + number)
        result = (
            pages.suspect(key, size, Sighting(page.nbytes), "truncated")
            if page.nbytes < size
            else _checked(pages, page, key, batch.buffers[position], place, call)
        )
        results.append((position, result))
    return results


def _checked(
    pages: Pages, body: memoryview, key: bytes, segments: Sequence[memoryview], place: Place, call: Call[Any]
) -> GetResult | None:
    """Copy a page that arrived from its ``place`` if it is the right one.

    Checked where it was received: host memory never holds half a page or another one."""
    reason = envelope.reason_to_refuse(body[:HEADER_LENGTH], key, [body[HEADER_LENGTH:]])
    if reason == "page_hash" and shares_its_name(body, key):
        pages.catalog.of(key[:IDENTITY_LENGTH]).index.forget_page(place)
        return GetResult.MISS
    if reason is not None:
        return pages.suspect(key, body.nbytes, Sighting.of(body.nbytes, [body]), reason)
    pages.bad.clear([key])
    with call.memory() as mine:
        if not mine:
            return None
        scatter(body[HEADER_LENGTH:], segments)
    return GetResult.HIT


def shares_its_name(body: memoryview, key: bytes) -> bool:
    """Whether a page is another one of the identity with the same short hash."""
    try:
        found = envelope.decode_header(body[:HEADER_LENGTH])
    except FormatError:
        return False
    return found.identity == key[:IDENTITY_LENGTH] and found.key != key and short_hash(found.key) == short_hash(key)

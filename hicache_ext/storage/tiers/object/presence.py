"""Which pages are there: a request per pack, not per page, and none is answered from memory alone.

An index of names (catalog.py) says where pages would be. In one round of requests the store is asked for what came
since, and whether those packs are there still. Pages that no pack has are asked for one by one where the identity has
pages that are objects of their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from hicache_ext.page.envelope import IDENTITY_LENGTH
from hicache_ext.page.page_object import HEADER_LENGTH
from hicache_ext.runtime.threads import Call
from hicache_ext.storage.contract.pack_index import Place
from hicache_ext.storage.tiers.object.catalog import PackCatalog
from hicache_ext.storage.tiers.object.names import packed_name
from hicache_ext.storage.tiers.object.page_objects import LIST_FROM, PageObjects
from hicache_ext.storage.tiers.object.requests import Piece, Requests

_MOST_ROUNDS = 4
"""Of requests. A second one is needed where something is gone, or has come; more where that happens again."""

Stored = Place | int
"""Where a page is: in a pack, or in an object of its own, of so many bytes."""


@dataclass(slots=True)
class _LookUp:
    """What one call knows so far."""

    keys: list[bytes]
    """Each once, in the order of the chain."""
    leading: bool
    confirmed: dict[str, int] = field(default_factory=dict)
    """Packs that were there during this call: id and bytes."""
    objects: dict[bytes, int] = field(default_factory=dict)
    """Bytes of objects; 0 for those that are absent."""


class Presence:
    """Threads: any."""

    def __init__(self, requests: Requests, catalog: PackCatalog, objects: PageObjects) -> None:
        self._requests = requests
        self._catalog = catalog
        self._objects = objects

    def look_up(
        self, keys: Sequence[bytes], hides: Callable[[bytes], bool], deadline: float, *, leading: bool = False
    ) -> dict[bytes, Stored]:
        """Where the pages are that are there, but those that are hidden. What is not known counts as absent, and as an
        error. ``leading``: pages behind the first one that is absent do not matter."""
        state = _LookUp([key for key in dict.fromkeys(keys) if not hides(key)], leading)
        if not state.keys:
            return {}
        for number in range(_MOST_ROUNDS):
            pieces = self._pieces(state, deadline, first=number == 0)
            if not pieces:
                break
            _, in_time = self._requests.share(pieces, deadline)
            if not in_time:
                self._requests.metrics.add("error", "timeout")
                break
        places = self._places(state.keys)
        found: dict[bytes, Stored] = {}
        for key, place in zip(state.keys, places, strict=True):
            if place is not None and place.offset + place.pack.page_bytes <= state.confirmed.get(place.pack.id, 0):
                found[key] = place
            elif state.objects.get(key, 0) >= HEADER_LENGTH:
                found[key] = state.objects[key]
        return found

    def _places(self, keys: Sequence[bytes]) -> list[Place | None]:
        places: list[Place | None] = [None] * len(keys)
        for digest in _digests(keys):
            mine = [position for position, key in enumerate(keys) if key.startswith(digest)]
            found = self._catalog.of(digest).index.find([keys[position] for position in mine])
            for position, place in zip(mine, found, strict=True):
                places[position] = place
        return places

    def _pieces(self, state: _LookUp, deadline: float, *, first: bool) -> list[Piece]:
        """The requests of the next round."""
        digests = _digests(state.keys)
        places = self._places(state.keys)
        pieces: list[Piece] = []
        if first:
            pieces += [self._refreshing(digest, state.confirmed, deadline) for digest in digests]
            pieces += [self._looking_for_objects(d) for d in digests if not self._catalog.of(d).has_objects]
        packs: dict[str, Piece] = {}
        missing: list[bytes] = []
        for key, place in zip(state.keys, places, strict=True):
            if place is None:
                known = state.objects.get(key)
                if known is None and self._catalog.of(key[:IDENTITY_LENGTH]).has_objects:
                    missing.append(key)
                elif state.leading and known is not None and known < HEADER_LENGTH and not first:
                    break
                elif state.leading and known is None and not first:
                    # In no pack, and the identity has nothing else.
                    break
            elif place.pack.id not in state.confirmed and place.pack.id not in packs:
                packs[place.pack.id] = self._confirming(key[:IDENTITY_LENGTH], place, state.confirmed)
        pieces += packs.values()
        missing = missing[:LIST_FROM] if state.leading else self._listed(state, missing, deadline)
        return pieces + [self._asking(key, state.objects, stops=state.leading) for key in missing]

    def _listed(self, state: _LookUp, missing: Sequence[bytes], deadline: float) -> list[bytes]:
        """Look up many pages by listing; those of which it said nothing."""
        for digest in _digests(missing):
            mine = [key for key in missing if key.startswith(digest)]
            if len(mine) >= LIST_FROM:
                # Half of the time: some servers list slower than they answer for single names (s3rver: by far).
                half = (time.monotonic() + deadline) / 2
                state.objects.update(self._objects.look_up_in_listing(digest, mine, half))
        return [key for key in missing if key not in state.objects]

    # -- requests --------------------------------------------------------------------------------------------------

    def _refreshing(self, digest: bytes, confirmed: dict[str, int], deadline: float) -> Piece:
        def refresh(call: Call[Any], _: int) -> None:
            confirmed.update(self._catalog.refresh(digest, deadline))

        return self._guarded(refresh)

    def _looking_for_objects(self, digest: bytes) -> Piece:
        return self._guarded(lambda call, _: self._catalog.look_for_objects(digest))

    def _confirming(self, digest: bytes, place: Place, confirmed: dict[str, int]) -> Piece:
        def confirm(call: Call[Any], _: int) -> None:
            size = self._requests.size_of(packed_name(digest, place.pack))
            if size is None:
                self._catalog.of(digest).index.forget(place.pack.id)
            else:
                confirmed[place.pack.id] = size

        return self._guarded(confirm)

    def _asking(self, key: bytes, objects: dict[bytes, int], *, stops: bool) -> Piece:
        def ask(call: Call[Any], position: int) -> None:
            size = self._objects.size(key, call)
            if size is not None:
                objects[key] = size
            if stops and not size:
                # Handed out in order: no more than one round of requests behind the gap.
                call.stop(position)

        return ask

    def _guarded(self, request: Callable[[Call[Any], int], None]) -> Piece:
        def make(call: Call[Any], position: int) -> None:
            try:
                request(call, position)
            except Exception as error:  # noqa: BLE001 - a client library's errors end here
                self._requests.failed(error, call)

        return make


def _digests(keys: Collection[bytes]) -> list[bytes]:
    return list(dict.fromkeys([key[:IDENTITY_LENGTH] for key in keys]))

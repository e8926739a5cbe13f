"""Writing a batch: small pages in packs, large ones as objects of their own."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from hicache_ext.page.envelope import IDENTITY_LENGTH
from hicache_ext.page.pack import MOST_PAGES, SMALL, Pack, gather_pages, portions, seal_pack
from hicache_ext.page.page_object import HEADER_LENGTH
from hicache_ext.runtime.threads import Call
from hicache_ext.storage.contract.bad_pages import BadPages, Sighting, Verdict
from hicache_ext.storage.contract.clearing import Clearing
from hicache_ext.storage.contract.store import PageBatch, SetResult
from hicache_ext.storage.tiers.object.catalog import PackCatalog
from hicache_ext.storage.tiers.object.client import is_md5_of
from hicache_ext.storage.tiers.object.conditional import ConditionalCreate
from hicache_ext.storage.tiers.object.names import LONGEST_NAME, packed_name
from hicache_ext.storage.tiers.object.page_objects import OF_ANOTHER_LENGTH, PageObjects
from hicache_ext.storage.tiers.object.presence import Presence, Stored
from hicache_ext.storage.tiers.object.requests import Piece, Requests

_PACK_BYTES = 2 << 20
"""About so many of a pack: eight requests at once move 16 MiB in less time than four of twice the size."""


class Writing:
    """Threads: any."""

    def __init__(
        self,
        requests: Requests,
        catalog: PackCatalog,
        objects: PageObjects,
        presence: Presence,
        create: ConditionalCreate,
        bad_pages: BadPages,
        clearing: Clearing,
        prefix: str,
    ) -> None:
        """``prefix``: what stands before every name."""
        self._requests = requests
        self._catalog = catalog
        self._objects = objects
        self._presence = presence
        self._create = create
        self._bad_pages = bad_pages
        self._clearing = clearing
        longest = packed_name(bytes(16), Pack("0" * 11 + "-" + "0" * 10, SMALL - 1, bytes(6 * MOST_PAGES)))
        room = LONGEST_NAME - len(prefix.encode()) - 1 - len(longest)
        self._most_pages = MOST_PAGES if room >= 0 else max(1, MOST_PAGES + room // 9)

    def write(self, batch: PageBatch, deadline: float) -> list[SetResult]:
        """One result for each page, in order."""
        # On the caller's thread: those of the requests are for everybody. Half of the time is left for writing.
        verdicts = self._bad_pages.settle(batch.keys, (time.monotonic() + deadline) / 2)
        results = self._write_pages(batch, range(len(batch)), verdicts, deadline)
        wrong = [position for position, result in enumerate(results) if result is OF_ANOTHER_LENGTH]
        if wrong:
            verdicts = self._bad_pages.settle([batch.keys[position] for position in wrong], deadline)
            again = self._write_pages(batch, wrong, verdicts, deadline)
            for position, result in zip(wrong, again, strict=True):
                results[position] = SetResult.REJECTED if result is OF_ANOTHER_LENGTH else result
        self._requests.metrics.add("rejected", "suspect", results.count(SetResult.REJECTED))
        return results

    def _write_pages(
        self, batch: PageBatch, positions: Sequence[int], verdicts: Mapping[bytes, Verdict], deadline: float
    ) -> list[Any]:
        first: dict[bytes, int] = {}
        for position in positions:
            first.setdefault(batch.keys[position], position)
        small = [position for position in first.values() if batch.sizes[position] + HEADER_LENGTH < SMALL]
        results: dict[int, Any] = {}
        found = self._presence.look_up([batch.keys[p] for p in small], self._clearing.hides, deadline)
        new: list[int] = []
        for position in small:
            key = batch.keys[position]
            result = self._answer(key, batch.sizes[position] + HEADER_LENGTH, found.get(key), verdicts.get(key))
            if result is None:
                new.append(position)
            else:
                results[position] = result
        pieces: list[Piece] = []
        written: list[list[int]] = []
        for portion in self._portions(batch, new):
            after = max((place.pack.id for p in portion if (place := self._known(batch.keys[p]))), default=None)
            denied = any(verdicts.get(batch.keys[p]) is Verdict.DENIED for p in portion)
            pieces.append(self._writing_pack(batch, portion, after, denied, deadline))
            written.append(portion)
        for position in first.values():
            if batch.sizes[position] + HEADER_LENGTH >= SMALL:
                pieces.append(self._writing_object(batch, position, verdicts.get(batch.keys[position])))
                written.append([position])
        answers, in_time = self._requests.share(pieces, deadline)
        missing = SetResult.ERROR if in_time else SetResult.TIMEOUT
        for portion, answer in zip(written, answers, strict=True):
            results.update((position, missing if answer is None else answer) for position in portion)
        return [self._for_each(batch, position, first, results) for position in positions]

    @staticmethod
    def _for_each(batch: PageBatch, position: int, first: Mapping[bytes, int], results: Mapping[int, Any]) -> Any:
        """The result of a page; one that comes twice in a batch was there the second time."""
        earlier = first[batch.keys[position]]
        result = results[earlier]
        return SetResult.EXISTS if earlier != position and result is SetResult.STORED else result

    def _answer(self, key: bytes, size: int, found: Stored | None, verdict: Verdict | None) -> Any:
        """What a small page is without being written; None where it is to be written."""
        if verdict is Verdict.DENIED:
            return None
        if verdict in (Verdict.WITHHELD, Verdict.UNCLEAR):
            return SetResult.REJECTED
        if found is None:
            return None
        length = found if isinstance(found, int) else found.pack.page_bytes
        if length == size:
            return SetResult.EXISTS
        if verdict is Verdict.GOOD:
            # A whole page of its own: whoever expects another length is wrong, or this process is.
            return SetResult.REJECTED
        self._requests.metrics.add("corrupt", "length")
        self._bad_pages.suspect(key, size, Sighting(length), "length")
        return OF_ANOTHER_LENGTH

    def _known(self, key: bytes) -> Any:
        return self._catalog.of(key[:IDENTITY_LENGTH]).index.find([key])[0]

    def _portions(self, batch: PageBatch, positions: Sequence[int]) -> list[list[int]]:
        identities: dict[bytes, list[int]] = {}
        for position in positions:
            identities.setdefault(batch.keys[position][:IDENTITY_LENGTH], []).append(position)
        return [
            [mine[number] for number in portion]
            for mine in identities.values()
            for portion in portions([batch.sizes[p] + HEADER_LENGTH for p in mine], self._most_pages, _PACK_BYTES)
        ]

    # -- requests --------------------------------------------------------------------------------------------------

    def _writing_object(self, batch: PageBatch, position: int, verdict: Verdict | None) -> Piece:
        return lambda call, _: self._objects.set(batch.keys[position], batch.buffers[position], call, verdict)

    def _writing_pack(
        self, batch: PageBatch, positions: Sequence[int], after: str | None, denied: bool, deadline: float
    ) -> Piece:
        """``after``: the id of a pack whose pages these are to replace. ``denied``: one of them arrived damaged here
        while the store said that it has others."""
        keys = [batch.keys[position] for position in positions]

        def write(call: Call[Any], _: int) -> SetResult | None:
            digest = keys[0][:IDENTITY_LENGTH]
            size = HEADER_LENGTH + batch.sizes[positions[0]]
            pack = Pack.of_keys(self._catalog.new_id(after), size, keys)
            try:
                with self._clearing.writing([*keys, mark_of(digest, pack.id)], deadline) as writing:
                    with call.memory() as mine:
                        if not mine:
                            return None
                        body = gather_pages([batch.buffers[position] for position in positions])
                    # The checksums are of the copy: should a page change meanwhile, its copy can be trusted.
                    result = self._put(digest, pack, seal_pack(body, keys), denied)
                    if result.durable:
                        writing.stored.update(keys, [mark_of(digest, pack.id)])
                        self._bad_pages.clear(keys)
                    return result
            except TimeoutError:
                return SetResult.TIMEOUT
            except Exception as error:  # noqa: BLE001 - a client library's errors end here
                failure = self._requests.failed(error, call)
                return SetResult.TIMEOUT if failure.reason == "timeout" else SetResult.ERROR

        return write

    def _put(self, digest: bytes, pack: Pack, body: memoryview, denied: bool) -> SetResult:
        requests = self._requests
        put = requests.obstore.put(requests.client, packed_name(digest, pack), body, use_multipart=False)
        requests.reached = True
        if denied and self._create.etags_are_md5 and not is_md5_of(body, put["e_tag"]):
            requests.metrics.add("error", "not_as_sent")
            return SetResult.ERROR
        self._catalog.of(digest).index.add(pack)
        return SetResult.STORED


def mark_of(digest: bytes, pack_id: str) -> bytes:
    """What stands for a pack where pages are cleared: a key that no page has."""
    return digest + pack_id.encode().ljust(32, b"\0")

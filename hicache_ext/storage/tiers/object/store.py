"""The object tier: pages in objects of S3-compatible stores, Google Cloud Storage, Azure, or a directory.

Pages that are written together share an object, a pack (page/pack.py). Many requests run concurrently on the store's
threads. The reasons are in docs/decisions/object-stores.md.

An index of names (catalog.py) tells which packs should contain a page, but no lookup is answered from memory alone: one
round of requests lists new objects and verifies that those packs still exist, with one request per pack, not per page.

Adjacent pages of a pack form a run, which one request reads; all runs are read concurrently. A reply is checked in its
receive buffer, and each good page is copied once into host memory, without the GIL: host memory never receives bad
pages, nor anything after the call's deadline.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial, reduce
from operator import or_
from typing import Any

from hicache_ext.errors import (
    ClearLaterError,
    FormatError,
    NotReadError,
    StoreError,
    StoreSetupError,
    UnansweredError,
)
from hicache_ext.page import envelope
from hicache_ext.page.envelope import IDENTITY_LENGTH
from hicache_ext.page.pack import (
    LARGEST_PAGE,
    MOST_PAGES,
    PACK_BYTES,
    SMALL,
    Pack,
    gather_pages,
    portions,
    seal_pack,
    short_hash,
)
from hicache_ext.page.page_object import HEADER_LENGTH, scatter
from hicache_ext.runtime.call_deadline import tell_connection_lost
from hicache_ext.runtime.threads import Call
from hicache_ext.storage.contract.abilities import LARGEST_DOCUMENT, LARGEST_SUM, document_in
from hicache_ext.storage.contract.bad_pages import PoolStore, Stored, Verdict
from hicache_ext.storage.contract.base import leading_in_portions
from hicache_ext.storage.contract.clearing import Cleared
from hicache_ext.storage.contract.diagnosis import Finding, Level
from hicache_ext.storage.contract.pack_index import Place, Run, runs
from hicache_ext.storage.contract.store import GetResult, PageBatch, SetResult, identities_of
from hicache_ext.storage.tiers.object.catalog import (
    IDENTITIES,
    LISTED_AT_ONCE,
    LONGEST_NAME,
    MOST_LISTED,
    PACKS,
    PackCatalog,
    digest_of_identity,
    identity_name,
    packed,
    packed_name,
    packs_of,
)
from hicache_ext.storage.tiers.object.client import (
    Failure,
    Piece,
    Requests,
    begins_behind_the_end,
    explain,
    is_md5_of,
)
from hicache_ext.storage.tiers.object.config import ObjectTierConfig
from hicache_ext.storage.tiers.object.examination import read_object, whole_pack

logger = logging.getLogger(__name__)

DEFAULT_CONCURRENCY = 32

_ADMIN_TIMEOUT = 1.0
"""Maximum seconds for calls on SGLang's scheduler thread (clear, register_identity)."""
_STORE_FAILURES = frozenset({"connection", "timeout", "no_bucket", "http_5xx", "slow_down"})
"""Failures that do not concern a single object."""
_REQUESTS_AT_START = 8
"""Maximum sequential requests at startup; each may take the tier's timeout."""
_FIRST_LOOK = 1000
"""Pages of a chain that are looked up first."""
_SHORTEST_RANGE = 1 << 20
"""Minimum bytes per request; splitting a read further costs more than the parallelism saves."""
_MOST_ROUNDS = 4
"""Maximum rounds of requests. A second one is needed if packs vanished or appeared, more if that happens again."""
_PACK_BYTES = 2 << 20
"""Approximate bytes of a pack: eight concurrent requests move 16 MiB faster than four of twice the size."""
_CLOSE_TIMEOUT = 30.0
"""Seconds for the deletion of cleared pages at close(), while the store answers."""


class ObjectPageStore(PoolStore):
    """PageStore over an obstore client whose root is this tier's prefix. Threads: any."""

    type_name = "object"

    def __init__(self, name: str, tier: ObjectTierConfig, connect: Callable[[], Any]) -> None:
        """``connect`` creates a client; pages that arrived damaged are read again through a new one. Raises
        StoreSetupError if the store cannot be used."""
        super().__init__(name)
        self._tier = tier
        self._connect = connect
        self.shared = tier.sharing().shared
        self._requests = Requests(
            name,
            connect,
            lambda failure: self.count_errors({failure.reason: 1}, words=str(failure)),
            at_once=tier.concurrency or DEFAULT_CONCURRENCY,
            timeout=tier.longest_call,
        )
        self._catalog = PackCatalog(self._requests, lists_from=tier.scheme in ("s3", "gs"))
        self._most_in_a_pack = _most_in_a_pack(tier.prefix)
        try:
            self._check_store()
        except BaseException:
            self._requests.threads.close()
            raise

    def _check_store(self) -> None:
        """Perform each step of serving once: otherwise a missing permission would only show as absent pages."""
        requests = self._requests
        look = requests.look_into_listings if self._tier.only_read else requests.find_out
        if failure := requests.within(look, _REQUESTS_AT_START * requests.timeout):
            problem = f"{self._tier.url}: {failure}, asked to {requests.doing}"
            remedies = ["check url, endpoint, region and credentials", "required: false starts without it"]
            raise StoreSetupError(self.name, problem, remedies)

    def details(self) -> dict[str, Any]:
        return {
            "url": self._tier.url,
            "concurrency": self._requests.at_once,
            "timeout": self._requests.timeout,
            "packed_pages": self._catalog.page_count(),
        }

    def gauges(self) -> dict[str, float]:
        # There is no persistent connection to check: the last reply tells whether the store is up.
        return {"tier_up": float(self._requests.reached)}

    def diagnose(self) -> Sequence[Finding]:
        from hicache_ext.storage.tiers.object.examination import diagnose

        try:
            again = ObjectPageStore(self.name, self._tier, self._connect)
        except StoreSetupError as error:
            return [Finding("reachable", Level.ERROR, error.reason, "check url, endpoint, region and credentials")]
        with closing(again):
            return diagnose(self, again, self._tier, again._requests)

    def _register(self, digest: bytes, document: dict[str, Any]) -> None:
        self._catalog.expect(digest)
        name, text = identity_name(digest), json.dumps(document, sort_keys=True, indent=1).encode()

        def record() -> None:
            if self._requests.size_of(name) is None:
                self._requests.put(name, text)

        if failure := self._requests.within(record, min(_ADMIN_TIMEOUT, self._requests.timeout)):
            raise StoreError(str(failure))

    def identities(self) -> dict[bytes, dict[str, Any]]:
        documents: dict[bytes, dict[str, Any]] = {}

        def look() -> None:
            room, deadline = LARGEST_SUM, time.monotonic() + self._requests.timeout
            for listed in self._requests.listed(IDENTITIES):
                for entry in listed:
                    if time.monotonic() > deadline:
                        # The caller no longer waits, and a faulty store may list endlessly.
                        raise TimeoutError
                    digest, length = digest_of_identity(entry["path"]), entry["size"]
                    if digest is None or not 0 < length <= LARGEST_DOCUMENT:
                        continue
                    if (room := room - length) < 0:
                        return
                    try:
                        stored = self._requests.part(entry["path"], 0, length)
                    except Exception as error:
                        # One unreadable document, deleted or foreign, must not hide the others.
                        if explain(error).reason in _STORE_FAILURES:
                            raise
                        continue
                    document = document_in(bytes(stored))
                    if document is not None:
                        documents[digest] = document

        with self._calls:
            failure = self._requests.within(look)
        if failure:
            raise StoreError(f"tier {self.name!r}: the identities that it has cannot be listed ({failure})")
        return documents

    def _hides(self, key: bytes) -> bool:
        return self._bad_pages.hides(key) or self._clearing.hides(key)

    def _suspect(self, key: bytes, size: int, reason: str) -> GetResult:
        """Count a copy under ``key`` that is not the page of ``size`` bytes, have it examined, and return CORRUPT."""
        self.metrics.add("corrupt", reason)
        self._bad_pages.suspect(key, size, reason)
        return GetResult.CORRUPT

    # -- presence --------------------------------------------------------------------------------------------------

    def _has(self, keys: Sequence[bytes]) -> list[bool]:
        return self._present(keys, self._requests.deadline())

    def _lead(self, keys: Sequence[bytes]) -> int:
        """Count the leading pages that are present. Looks up the first pages first, since most chains end early."""
        has = partial(self._present, deadline=self._requests.deadline(), leading=True)
        return leading_in_portions(keys, has, _FIRST_LOOK, len(keys))

    def _present(self, keys: Sequence[bytes], deadline: float, *, leading: bool = False) -> list[bool]:
        """Return which pages are present. Raises UnansweredError if a request failed and pages were not found."""
        found, failed = self._look_up(keys, self._hides, deadline, leading=leading)
        present = [key in found for key in keys]
        if failed and not all(present):
            raise UnansweredError(present, present.count(False), len(present))
        return present

    def _look_up(
        self, keys: Sequence[bytes], hides: Callable[[bytes], bool], deadline: float, *, leading: bool = False
    ) -> tuple[dict[bytes, Place], str]:
        """Return the places of the pages that are present and not hidden, and how a request failed: "timeout", "error"
        or "". After a failure the presence of pages that were not found is unknown. With ``leading``, pages after the
        first absent one do not matter."""
        requests, catalog = self._requests, self._catalog
        wanted = [key for key in dict.fromkeys(keys) if not hides(key)]
        digests = identities_of(wanted)
        confirmed: dict[str, int] = {}
        """Packs that existed during this call: id -> bytes."""
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
        return found, failed

    # -- reading ---------------------------------------------------------------------------------------------------

    def _read(self, batch: PageBatch) -> list[GetResult]:
        deadline = self._requests.deadline()
        requests, catalog, hides = self._requests, self._catalog, self._clearing.hides
        results: list[GetResult | None] = [GetResult.MISS if hides(key) else None for key in batch.keys]
        listed: dict[bytes, GetResult] = {}
        """Result for pages that are in no pack, per listed identity: MISS, or how the listing failed."""
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
                    pieces.append(partial(self._refuse_length, key, size, position, place))
                else:
                    wanted[position] = place
            listed |= dict.fromkeys(lacking, GetResult.MISS)
            pieces += [
                requests.trying(partial(catalog.refresh, digest, deadline), partial(listed.__setitem__, digest))
                for digest in lacking
            ]
            length = sum(place.pack.page_bytes for place in wanted if place is not None)
            longest = min(PACK_BYTES, max(_SHORTEST_RANGE, length // requests.at_once))
            pieces += [partial(self._read_run, batch, run) for run in runs(wanted, longest)]
            if not pieces:
                break
            answers, in_time = requests.share(pieces, deadline)
            for answer in answers:
                # Results of listings are booleans, not lists.
                for position, result in answer if isinstance(answer, list) else ():
                    results[position] = result
            if not in_time:
                missing = GetResult.TIMEOUT
                break
        return [missing if result is None else result for result in results]

    def _refuse_length(
        self, key: bytes, size: int, position: int, place: Place, call: Call[Any]
    ) -> list[tuple[int, GetResult]]:
        """Return CORRUPT for a page whose pack's name implies another length than ``size``; return no result if the
        pack is gone, since the page may be elsewhere."""
        digest, found = key[:IDENTITY_LENGTH], place.pack.page_bytes
        try:
            if self._requests.size_of(packed_name(digest, place.pack)) is None:
                self._catalog.of(digest).index.forget(place.pack.id)
                return []
        except Exception as error:  # noqa: BLE001 - a client library's errors end here
            return [(position, self._requests.failed(error, call, GetResult))]
        reason = "truncated" if found < size else "longer"
        return [(position, self._suspect(key, size, reason))]

    def _read_run(self, batch: PageBatch, run: Run, call: Call[Any]) -> list[tuple[int, GetResult | None]]:
        """Read a run of pages. Returns no results if the pack is gone: the pages may be in a newer pack."""
        requests = self._requests
        digest = batch.keys[run.members[0]][:IDENTITY_LENGTH]
        try:
            options = {"range": (run.offset, run.end)}
            reply = requests.obstore.get(requests.client, packed_name(digest, run.pack), options=options)
            requests.reached = True
            length = int(reply.meta["size"])
            body = requests.body(reply, run.end - run.offset)
        except Exception as error:  # noqa: BLE001 - as above
            if requests.explained(error).reason == "absent":
                self._catalog.of(digest).index.forget(run.pack.id)
                return []
            if not begins_behind_the_end(error):
                result = requests.failed(error, call, GetResult)
                return [(position, result) for position in run.members]
            body, length = memoryview(b""), run.offset
        if body.nbytes != max(0, min(run.end, length) - run.offset):
            # The store contradicts itself; the pages may be good.
            self.metrics.add("error", "cut")
            return [(position, GetResult.ERROR) for position in run.members]
        size, results = run.pack.page_bytes, []
        for number, position in enumerate(run.members):
            page, key = body[number * size : (number + 1) * size], batch.keys[position]
            place = Place(run.pack, run.first + number)
            result = (
                self._suspect(key, size, "truncated")
                if page.nbytes < size
                else self._copy_page(page, key, batch.buffers[position], place, call)
            )
            results.append((position, result))
        return results

    def _copy_page(
        self, body: memoryview, key: bytes, segments: Sequence[memoryview], place: Place, call: Call[Any]
    ) -> GetResult | None:
        """Check a page that arrived from ``place`` and copy it into ``segments`` if it is the right one.

        The check runs on the receive buffer, so that host memory never holds a partial or wrong page."""
        reason = envelope.reason_to_refuse(body[:HEADER_LENGTH], key, [body[HEADER_LENGTH:]])
        if reason == "page_hash" and _shares_its_name(body, key):
            self._catalog.of(key[:IDENTITY_LENGTH]).index.forget_pages(place.pack.id, place.mask)
            return GetResult.MISS
        if reason is not None:
            return self._suspect(key, body.nbytes, reason)
        self._bad_pages.clear([key])
        with call.memory() as mine:
            if not mine:
                return None
            scatter(body[HEADER_LENGTH:], segments)
        return GetResult.HIT

    # -- writing ---------------------------------------------------------------------------------------------------

    def _write(self, batch: PageBatch) -> list[SetResult]:
        deadline = self._requests.deadline()
        first: dict[bytes, int] = {}
        for position, key in enumerate(batch.keys):
            first.setdefault(key, position)
        results: dict[int, SetResult] = {}
        bad = [key for key in first if self._bad_pages.hides(key)]
        found, failed = self._look_up(list(first), self._clearing.hides, deadline)
        sizes = {key: HEADER_LENGTH + batch.sizes[position] for key, position in first.items()}
        for key, there in found.items():
            if there.pack.page_bytes != sizes[key]:
                self._suspect(key, sizes[key], "length")
        # Runs on the caller's thread: all calls share the request threads. Half of the time is left for writing.
        verdicts = self._bad_pages.settle(batch.keys, (time.monotonic() + deadline) / 2)
        if bad:
            # They may have been removed since and have no verdict any more; the earlier listing still shows them.
            again, failed_again = self._look_up(bad, self._clearing.hides, deadline)
            found = {key: place for key, place in found.items() if key not in bad} | again
            failed = failed or failed_again
        new: dict[bytes, list[int]] = {}
        for key, position in first.items():
            place, verdict = found.get(key), verdicts.get(key)
            is_denied = verdict is Verdict.DENIED
            is_writable = is_denied or (verdict is not None and verdict.free)
            if verdict in (Verdict.WITHHELD, Verdict.UNCLEAR) or (sizes[key] > LARGEST_PAGE and not is_denied):
                results[position] = SetResult.REJECTED
            elif place is not None and not is_writable:
                # An intact page of another length: either this process or the other writer expects the wrong size.
                is_same_size = place.pack.page_bytes == sizes[key]
                results[position] = SetResult.EXISTS if is_same_size else SetResult.REJECTED
            elif failed and place is None and not is_writable:
                # The page may exist: if listings fail, every server would add one more copy of it.
                results[position] = SetResult(failed)
            else:
                new.setdefault(key[:IDENTITY_LENGTH], []).append(position)
        packs = [
            [mine[number] for number in portion]
            for mine in new.values()
            for portion in portions([HEADER_LENGTH + batch.sizes[p] for p in mine], self._most_in_a_pack, _PACK_BYTES)
        ]
        pieces: list[Piece] = [partial(self._write_pack, batch, pack, verdicts, deadline) for pack in packs]
        answers, in_time = self._requests.share(pieces, deadline)
        missing = SetResult.ERROR if in_time else SetResult.TIMEOUT
        for pack, answer in zip(packs, answers, strict=True):
            results.update((position, missing if answer is None else answer) for position in pack)
        if not self._requests.reached:
            tell_connection_lost()
        # A key that occurs twice in a batch exists at its second occurrence.
        answers = [
            SetResult.EXISTS
            if first[key] != position and results[first[key]] is SetResult.STORED
            else results[first[key]]
            for position, key in enumerate(batch.keys)
        ]
        self.metrics.add("rejected", "suspect", answers.count(SetResult.REJECTED))
        return answers

    def _write_pack(
        self,
        batch: PageBatch,
        positions: Sequence[int],
        verdicts: Mapping[bytes, Verdict],
        deadline: float,
        call: Call[Any],
    ) -> SetResult | None:
        """Write pages of one identity and one size as a pack."""
        keys = [batch.keys[position] for position in positions]
        digest, requests = keys[0][:IDENTITY_LENGTH], self._requests
        # The new id must be greater than the id of any pack whose pages these replace.
        after = max((place.pack.id for place in self._catalog.find(keys) if place is not None), default=None)
        pack = Pack.of_keys(self._catalog.new_id(after), HEADER_LENGTH + batch.sizes[positions[0]], keys)
        mark = _mark_of(digest, pack.id)
        try:
            with self._clearing.writing([*keys, mark], deadline) as writing:
                with call.memory() as mine:
                    if not mine:
                        return None
                    body = gather_pages([batch.buffers[position] for position in positions])
                # The checksums cover the copy, which stays valid even if a page changes meanwhile.
                body = seal_pack(body, keys)
                put = requests.put(packed_name(digest, pack), body)
                # A page arrived damaged here, although the store's ETag says that its stored bytes differ.
                denied = any(verdicts.get(key) is Verdict.DENIED for key in keys)
                if denied and requests.etags_are_md5 and not is_md5_of(body, put["e_tag"]):
                    self.metrics.add("error", "not_as_sent")
                    return SetResult.ERROR
                self._catalog.of(digest).index.add(pack)
                writing.stored.update(keys, [mark])
                self._bad_pages.clear(keys)
                return SetResult.STORED
        except TimeoutError:
            return SetResult.TIMEOUT
        except Exception as error:  # noqa: BLE001 - a client library's errors end here
            result: SetResult = requests.failed(error, call, SetResult)
            return result

    # -- removal ---------------------------------------------------------------------------------------------------

    def _remove(self, keys: Sequence[bytes]) -> int:
        """Remove every copy of these pages for all readers."""
        deadline = self._requests.deadline()
        self._bad_pages.clear(keys)
        keys = [key for key in keys if not self._clearing.hides(key)]
        requests, catalog = self._requests, self._catalog
        looks = [requests.trying(partial(catalog.refresh, digest, deadline)) for digest in identities_of(keys)]
        requests.share(looks, deadline)
        places = [(key, place) for key in keys for place in catalog.of(key[:IDENTITY_LENGTH]).index.find_all(key)]
        are_pages, _ = requests.share([partial(self._is_page, key, place) for key, place in places], deadline)
        of_packs: dict[tuple[bytes, Pack], dict[bytes, int]] = {}
        for (key, place), is_page in zip(places, are_pages, strict=True):
            if is_page:
                masks = of_packs.setdefault((key[:IDENTITY_LENGTH], place.pack), {})
                masks[key] = masks.get(key, 0) | place.mask
        burials = [
            requests.trying(partial(catalog.bury, digest, pack, reduce(or_, masks.values())))
            for (digest, pack), masks in of_packs.items()
        ]
        answers, _ = requests.share(burials, deadline)
        return len({key for masks, done in zip(of_packs.values(), answers, strict=True) if done for key in masks})

    def _is_page(self, key: bytes, place: Place, call: Call[Any]) -> bool:
        """Return whether a place holds this page, intact or not, rather than another one with the same short hash."""
        requests = self._requests
        name = packed_name(key[:IDENTITY_LENGTH], place.pack)
        try:
            return not _shares_its_name(requests.part(name, place.offset, place.offset + HEADER_LENGTH), key)
        except Exception as error:  # noqa: BLE001 - as above
            if begins_behind_the_end(error):
                return True
            if requests.explained(error).reason == "absent":
                self._catalog.of(key[:IDENTITY_LENGTH]).index.forget(place.pack.id)
            else:
                requests.failed(error, call, SetResult)
            return False

    # -- bad pages (examination.py) --------------------------------------------------------------------------------

    def read_again(self, key: bytes, most: int) -> Stored | None:
        """Read a page again for ``BadPages``. Like ``remove_bad``, uses a new client with its own connections."""
        (place,) = self._catalog.find([key])
        if place is None or self._clearing.hides(key):
            return None
        name = packed_name(key[:IDENTITY_LENGTH], place.pack)
        try:
            found = read_object(self._requests, self._connect(), name, place.offset, min(place.pack.page_bytes, most))
        except NotReadError:
            raise
        except Exception as error:  # noqa: BLE001 - a client library's errors end here
            if (reason := explain(error).reason) != "absent":
                raise NotReadError(reason) from None
            self._catalog.of(key[:IDENTITY_LENGTH]).index.forget(place.pack.id)
            return None
        return Stored(min(found.length, place.pack.page_bytes), found.data, (found.version, place))

    def remove_bad(self, key: bytes, bad: Stored) -> Verdict | None:
        version, place = bad.version
        requests, name = self._requests, packed_name(key[:IDENTITY_LENGTH], place.pack)
        try:
            client = self._connect()
            is_compared = requests.etags_are_md5 and bad.length == len(bad.data)
            if is_compared and not is_md5_of(whole_pack(requests, client, name, place, bad), version):
                return Verdict.DENIED
            if self._clearing.hides(key) or requests.obstore.head(client, name).get("e_tag") != version:
                return None
            self._catalog.bury(key[:IDENTITY_LENGTH], place.pack, place.mask)
        except NotReadError:
            raise
        except Exception as error:  # noqa: BLE001 - as above
            if (reason := explain(error).reason) != "absent":
                raise NotReadError(reason) from None
            return None
        return Verdict.REMOVED

    def _clear(self, digests: Sequence[bytes] | None) -> int:
        """Clear through ``Clearing``, since a store cannot rename a prefix. An identity whose pages are not found
        within a second is cleared but not counted."""
        return self._clearing.clear(digests, self._sweep, min(_ADMIN_TIMEOUT, self._requests.timeout))

    def _sweep(self, cleared: Cleared) -> None:
        """Delete until a complete listing shows only pages stored after the clear. Raises ClearLaterError."""
        digests = None if cleared.digests is None else sorted(cleared.digests)
        prefixes = [PACKS] if digests is None else [packs_of(digest) for digest in digests]
        try:
            for prefix in prefixes:
                if not any(self._is_swept(prefix, cleared) for _ in range(_MOST_ROUNDS)):
                    raise ClearLaterError("the store lists without end, or goes on listing what was deleted")
        except ClearLaterError:
            raise
        except Exception as error:  # noqa: BLE001 - as above
            failure = self._requests.explained(error)
            self._requests.count(failure)
            raise ClearLaterError(str(failure)) from None
        # A listing in progress may have seen objects that are deleted now; discard its results.
        self._catalog.reset(digests)

    def _is_swept(self, prefix: str, cleared: Cleared) -> bool:
        """Delete cleared objects in a listing; return whether it was complete and contained none."""
        names_listed, deleted = 0, 0
        for listed in self._requests.listed(prefix, chunk_size=LISTED_AT_ONCE):
            if cleared.closing:
                return True
            marks: dict[str, tuple[bytes, int]] = {}
            for entry in listed:
                # Ignore foreign objects.
                if (found := packed(entry["path"])) is not None:
                    digest, item = found
                    pack_id, count = (item.id, item.count) if isinstance(item, Pack) else (item.pack, 0)
                    marks[entry["path"]] = _mark_of(digest, pack_id), count
            with cleared.old_pages(mark for mark, _ in marks.values()) as old:
                names = [name for name, (mark, _) in marks.items() if mark in old]
                if names:
                    self._requests.delete(names)
            self.metrics.add("cleared", "", sum(marks[name][1] for name in names))
            deleted += len(names)
            if (names_listed := names_listed + len(listed)) >= MOST_LISTED:
                return False
        return not deleted

    def _close(self) -> None:
        """Wait for requests in progress, which end by their own timeouts, and for the deletion of cleared pages."""
        self._bad_pages.close()
        self._catalog.close()
        self._clearing.close(_CLOSE_TIMEOUT)
        self._requests.threads.close()


def _shares_its_name(body: memoryview, key: bytes) -> bool:
    """Return whether a page is a different one of the same identity with the same short hash."""
    try:
        found = envelope.decode_header(body[:HEADER_LENGTH])
    except FormatError:
        return False
    return found.identity == key[:IDENTITY_LENGTH] and found.key != key and short_hash(found.key) == short_hash(key)


def _most_in_a_pack(prefix: str) -> int:
    """Return how many pages fit into the name of a pack after ``prefix``."""
    longest = packed_name(bytes(16), Pack("0" * 11 + "-" + "0" * 10, SMALL - 1, bytes(6 * MOST_PAGES)))
    room = LONGEST_NAME - len(prefix.encode()) - 1 - len(longest)
    return MOST_PAGES if room >= 0 else max(1, MOST_PAGES + room // 9)


def _mark_of(digest: bytes, pack_id: str) -> bytes:
    """Return the key that represents a pack in ``Clearing``; no page has it."""
    return digest + pack_id.encode().ljust(32, b"\0")

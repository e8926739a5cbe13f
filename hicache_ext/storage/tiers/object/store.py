"""The object tier: pages as objects of S3-compatible stores, Google Cloud Storage, Azure, or a directory.

A page is one object, header and payload. Many requests run at once on threads of the store. A read checks the reply in
obstore's buffer and copies it into host memory once, without the GIL: host memory only gets good pages, and nothing
after the call's deadline. A write copies the page once into a buffer of the request, which may outlive its call.
Reasons: docs/decisions/object-stores.md.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hicache_ext.errors import ClearLaterError, StoreError, StoreSetupError
from hicache_ext.page import envelope
from hicache_ext.page.copying import scatter
from hicache_ext.page.page_object import HEADER_LENGTH, encode_object
from hicache_ext.runtime.call_deadline import call_deadline
from hicache_ext.runtime.threads import Call, ThreadPool
from hicache_ext.storage.contract.bad_pages import BadPages, Sighting, Verdict
from hicache_ext.storage.contract.base import TierStore, leading
from hicache_ext.storage.contract.clearing import Cleared, Clearing
from hicache_ext.storage.contract.diagnosis import Finding
from hicache_ext.storage.contract.store import GetResult, PageBatch, SetResult
from hicache_ext.storage.tiers.object.client import Failure, delete_objects, explain
from hicache_ext.storage.tiers.object.conditional import ConditionalCreate
from hicache_ext.storage.tiers.object.config import ObjectTierConfig
from hicache_ext.storage.tiers.object.examination import ObjectMedium, is_md5_of
from hicache_ext.storage.tiers.object.names import (
    IDENTITIES,
    PAGES,
    digest_of_identity,
    identity_name,
    page_key,
    page_name,
    pages_of,
)

logger = logging.getLogger(__name__)

DEFAULT_CONCURRENCY = 32

_ADMIN_TIMEOUT = 1.0
"""Seconds for calls on SGLang's scheduler thread (clear, register_identity)."""
_CLOSE_TIMEOUT = 30.0
"""Seconds for the deletion of cleared pages at close(), while the store answers."""
_LIST_FROM = 1000
"""From so many keys of one identity on, presence is looked up by listing: 1,000 names a request instead of one."""
_LISTED_AT_ONCE = 1000
_NO_ANSWER = frozenset({"connection", "timeout", "denied", "no_bucket"})
"""Failures after which no other request can work."""
_KEYS_PER_LISTING = 100
"""A listing ends after one request per so many keys; the rest is asked key by key."""


_OF_ANOTHER_LENGTH = object()
"""Not written, because an object of another length is there."""


class ObjectPageStore(TierStore):
    """PageStore over an obstore client whose root is this tier's prefix. Threads: any."""

    type_name = "object"

    def __init__(self, name: str, tier: ObjectTierConfig, connect: Callable[[], Any]) -> None:
        """``connect`` makes a client; pages that arrived damaged are looked at again through another one.

        Raises StoreSetupError when the store cannot be used; with ``required`` false only when threads are lacking: a
        store that cannot be reached then is asked again by each call.
        """
        client = connect()
        import obstore

        self._obstore: Any = obstore
        super().__init__(name)
        self._client = client
        self._url = tier.url
        self.shared = tier.sharing().shared
        self._timeout = tier.longest_call
        self._concurrency = tier.concurrency or DEFAULT_CONCURRENCY
        self._clearing = Clearing(name)
        self._create = ConditionalCreate(obstore, client)
        self._reached = False
        """Whether the last request that ended was answered by the store."""
        medium = ObjectMedium(obstore, connect, self._clearing.hides, lambda: self._create.etags_are_md5)
        self._bad_pages = BadPages(name, self.metrics, medium)
        try:
            self._threads = ThreadPool(f"hicache-{name}", self._concurrency)
        except RuntimeError as error:
            raise StoreSetupError(name, f"no threads for {self._concurrency} requests at once ({error})") from error
        try:
            self._look_at_the_store(tier.required)
        except BaseException:
            self._threads.close()
            raise

    def _look_at_the_store(self, required: bool) -> None:
        done, failure = self.within(self._create.find_out)
        if done and failure is None:
            return
        failure = failure or Failure("timeout")
        if failure.reason == "denied" and self.within(self._list_nothing) == (True, None):
            logger.warning("tier %s: %s may be read and not written with these credentials", self.name, self._url)
            return
        if required:
            remedies = ["check url, endpoint, region and credentials", "required: false starts without it"]
            raise StoreSetupError(self.name, f"{self._url}: {failure}", remedies)
        logger.warning("tier %s: %s: %s; going on, and asking again (required: false)", self.name, self._url, failure)

    def _list_nothing(self) -> None:
        for _ in self._obstore.list(self._client, "identities", chunk_size=1):
            return

    def within(self, request: Callable[[], Any], timeout: float | None = None) -> tuple[bool, Failure | None]:
        """Make a request on a thread of the store: whether it ended in time, and what went wrong if it did."""
        failures: list[Failure] = []

        def make(_: int, call: Call[bool]) -> bool:
            try:
                request()
            except Exception as error:  # noqa: BLE001 - a client library's errors end here
                failures.append(self._explained(error))
            else:
                self._reached = True
            return True

        _, done = self._threads.share(1, make, self._timeout if timeout is None else timeout)
        if not done:
            self._reached = False
        return done, failures[0] if done and failures else None

    @property
    def client(self) -> Any:
        """The obstore client, for diagnosis and tools."""
        return self._client

    def details(self) -> dict[str, Any]:
        return {
            "url": self._url,
            "concurrency": self._concurrency,
            "timeout": self._timeout,
            "conditional_create": self._create.supported,
        }

    def gauges(self) -> dict[str, float]:
        # There is no connection to ask: the store is up as far as its last answer tells.
        return {"tier_up": float(self._reached)}

    def diagnose(self) -> Sequence[Finding]:
        from hicache_ext.storage.tiers.object.diagnosis import diagnose

        return diagnose(self, self._obstore)

    def _register(self, digest: bytes, document: dict[str, Any]) -> None:
        name, text = identity_name(digest), json.dumps(document, sort_keys=True, indent=1).encode()

        def record() -> None:
            try:
                self._obstore.head(self._client, name)
            except FileNotFoundError:
                self._obstore.put(self._client, name, text, use_multipart=False)

        done, failure = self.within(record, min(_ADMIN_TIMEOUT, self._timeout))
        if not done or failure:
            raise StoreError(str(failure or Failure("timeout")))

    def identities(self) -> dict[bytes, dict[str, Any]]:
        documents: dict[bytes, dict[str, Any]] = {}

        def look() -> None:
            for listed in self._obstore.list(self._client, IDENTITIES):
                for entry in listed:
                    digest = digest_of_identity(entry["path"])
                    if digest is not None:
                        documents[digest] = json.loads(bytes(self._obstore.get(self._client, entry["path"]).bytes()))

        with self._calls:
            done, failure = self.within(look)
        if not done or failure:
            reason = failure or Failure("timeout")
            raise StoreError(f"tier {self.name!r}: the identities that it has cannot be listed ({reason})")
        return documents

    # -- reading ---------------------------------------------------------------------------------------------------

    def _read(self, batch: PageBatch) -> list[GetResult]:
        answers, in_time = self._threads.share(
            len(batch), lambda i, call: self._get_page(batch.keys[i], batch.buffers[i], call), self._time_left()
        )
        missing = GetResult.ERROR if in_time else GetResult.TIMEOUT
        return [missing if answer is None else answer for answer in answers]

    def _get_page(self, key: bytes, segments: Sequence[memoryview], call: Call[GetResult]) -> GetResult | None:
        if self._clearing.hides(key):
            return GetResult.MISS
        payload_length = sum([segment.nbytes for segment in segments])
        expected = HEADER_LENGTH + payload_length
        try:
            reply = self._obstore.get(self._client, page_name(key))
            self._reached = True
            # A body of the wrong size is not worth receiving.
            found = int(reply.meta["size"])
            body = memoryview(reply.bytes()) if found == expected else memoryview(b"")
        except FileNotFoundError as error:
            return GetResult.MISS if self._is_absent(error) else GetResult.ERROR
        except Exception as error:  # noqa: BLE001 - a client library's errors end here
            return GetResult.TIMEOUT if self._failed(error, call).reason == "timeout" else GetResult.ERROR
        reason: str | None
        if found != expected:
            # A proxy may say so as well as the store.
            seen = Sighting(found)
            reason = "truncated" if found < expected else "longer"
        elif body.nbytes != expected:
            # The store contradicts itself; the object may be good.
            self.metrics.add("error", "cut")
            return GetResult.ERROR
        else:
            # Checked where it was received: host memory never holds half a page or another one.
            reason = envelope.reason_to_refuse(body[:HEADER_LENGTH], key, [body[HEADER_LENGTH:]])
            seen = Sighting(found) if reason is None else Sighting.of(found, [body])
        if reason is not None:
            self.metrics.add("corrupt", reason)
            self._bad_pages.suspect(key, expected, seen, reason)
            return GetResult.CORRUPT
        self._bad_pages.clear([key])
        with call.memory() as mine:
            if not mine:
                return None
            scatter(body[HEADER_LENGTH:], segments)
        return GetResult.HIT

    def _explained(self, error: BaseException) -> Failure:
        """Why a request failed; what that says of the store is noted."""
        failure = explain(error)
        self._reached = failure.reason not in _NO_ANSWER
        return failure

    def _is_absent(self, error: BaseException) -> bool:
        failure = self._explained(error)
        if failure.reason != "absent":
            self.metrics.add("error", failure.reason)
        return failure.reason == "absent"

    def _failed(self, error: BaseException, call: Call[Any]) -> Failure:
        """Count a failed request; where no server can be reached the call ends: its other requests would fail too."""
        failure = self._explained(error)
        self.metrics.add("error", failure.reason)
        logger.debug("tier %s: %s", self.name, failure)
        if failure.reason in ("connection", "denied"):
            call.stop()
        return failure

    # -- presence --------------------------------------------------------------------------------------------------

    def _has(self, keys: Sequence[bytes]) -> list[bool]:
        return self._present_of(keys, call_deadline(self._timeout))

    def _present_of(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        known: dict[bytes, bool] = {}
        for digest, count in Counter(key[: envelope.IDENTITY_LENGTH] for key in keys).items():
            if count >= _LIST_FROM:
                # Half of the time: some servers list slower than they answer for single names (s3rver: by far).
                half = (time.monotonic() + deadline) / 2
                self._look_up_in_listing(digest, [k for k in keys if k.startswith(digest)], known, half)
        unknown = [key for key in dict.fromkeys(keys) if key not in known]
        answers, in_time = self._threads.share(
            len(unknown), lambda i, call: self._present(unknown[i], call), deadline - time.monotonic()
        )
        if not in_time:
            self.metrics.add("error", "timeout")
        # What was not answered counts as absent: a miss, never a wrong promise.
        known.update(zip(unknown, (answer is True for answer in answers), strict=True))
        return [known[key] for key in keys]

    def _look_up_in_listing(
        self, digest: bytes, keys: Sequence[bytes], known: dict[bytes, bool], deadline: float
    ) -> None:
        """Fill ``known`` from a listing of the identity: every key when it is short, what was met when it is long."""
        stored: set[bytes] = set()

        def look_up(_: int, call: Call[bool]) -> bool:
            listing = self._obstore.list(self._client, pages_of(digest), chunk_size=_LISTED_AT_ONCE)
            for number, listed in enumerate(listing):
                if call.over or number >= len(keys) // _KEYS_PER_LISTING:
                    return False
                stored.update(key for entry in listed if (key := page_key(entry["path"])) is not None)
            return True

        def guarded(position: int, call: Call[bool]) -> bool:
            try:
                return look_up(position, call)
            except Exception as error:  # noqa: BLE001 - a client library's errors end here
                self._failed(error, call)
                return False

        (complete,), _ = self._threads.share(1, guarded, deadline - time.monotonic())
        if complete:
            known.update((key, key in stored and self._may_be_served(key)) for key in keys)
        elif complete is False:
            known.update((key, self._may_be_served(key)) for key in keys if key in stored)

    def _lead(self, keys: Sequence[bytes]) -> int:
        deadline = call_deadline(self._timeout)
        first = keys[:_LIST_FROM]
        # Handed out in order and stopped at the first gap: no more than one round of requests behind it.
        answers, in_time = self._threads.share(
            len(first), lambda i, call: self._present_in_run(first[i], i, call), self._time_left()
        )
        if not in_time:
            self.metrics.add("error", "timeout")
        found = leading(answers)
        if found == len(first) < len(keys):
            found += leading(self._present_of(keys[found:], deadline))
        return found

    def _present_in_run(self, key: bytes, position: int, call: Call[bool]) -> bool:
        present = self._present(key, call)
        if not present:
            call.stop(position)
        return present

    def _present(self, key: bytes, call: Call[bool]) -> bool:
        if not self._may_be_served(key):
            return False
        try:
            size = int(self._obstore.head(self._client, page_name(key))["size"])
            self._reached = True
            return size >= HEADER_LENGTH
        except FileNotFoundError as error:
            self._is_absent(error)
        except Exception as error:  # noqa: BLE001 - a client library's errors end here
            self._failed(error, call)
        return False

    def _may_be_served(self, key: bytes) -> bool:
        return not self._bad_pages.hides(key) and not self._clearing.hides(key)

    # -- writing ---------------------------------------------------------------------------------------------------

    def _write(self, batch: PageBatch) -> list[SetResult]:
        deadline = call_deadline(self._timeout)
        self._create.find_out_again(self.within, self._timeout / 4)
        # On the caller's thread: those of the requests are for everybody. Half of the time is left for writing.
        verdicts = self._bad_pages.settle(batch.keys, (time.monotonic() + deadline) / 2)
        results = self._write_pages(batch, range(len(batch)), verdicts, deadline)
        wrong = [position for position, result in enumerate(results) if result is _OF_ANOTHER_LENGTH]
        if wrong:
            verdicts = self._bad_pages.settle([batch.keys[position] for position in wrong], deadline)
            again = self._write_pages(batch, wrong, verdicts, deadline)
            for position, result in zip(wrong, again, strict=True):
                results[position] = SetResult.REJECTED if result is _OF_ANOTHER_LENGTH else result
        self.metrics.add("rejected", "suspect", results.count(SetResult.REJECTED))
        return results

    def _write_pages(
        self, batch: PageBatch, positions: Sequence[int], verdicts: Mapping[bytes, Verdict], deadline: float
    ) -> list[Any]:
        answers, in_time = self._threads.share(
            len(positions),
            lambda i, call: self._set_page(
                batch.keys[positions[i]], batch.buffers[positions[i]], call, verdicts.get(batch.keys[positions[i]])
            ),
            deadline - time.monotonic(),
        )
        missing = SetResult.ERROR if in_time else SetResult.TIMEOUT
        return [missing if answer is None else answer for answer in answers]

    def _set_page(
        self, key: bytes, segments: Sequence[memoryview], call: Call[Any], verdict: Verdict | None
    ) -> SetResult | object | None:
        """``verdict``: of a page that arrived damaged here."""
        size = HEADER_LENGTH + sum([segment.nbytes for segment in segments])
        with self._clearing.writing([key]) as writing:
            replaces = key in writing.cleared or verdict is Verdict.DENIED
            try:
                if not replaces and verdict in (Verdict.WITHHELD, Verdict.UNCLEAR):
                    return SetResult.REJECTED
                if not replaces and not self._create.supported:
                    found = self._stored_size(key)
                    if found == size:
                        return SetResult.EXISTS
                    if found is not None and verdict is Verdict.GOOD:
                        # A whole page of its own: whoever expects another length is wrong, or this process is.
                        return SetResult.REJECTED
                    if found is not None:
                        self.metrics.add("corrupt", "length")
                        self._bad_pages.suspect(key, size, Sighting(found), "length")
                        return _OF_ANOTHER_LENGTH
                with call.memory() as mine:
                    if not mine:
                        return None
                    body = encode_object(key, segments)
                result = self._put(key, body, replaces)
                if result.durable:
                    writing.stored.add(key)
                return result
            except Exception as error:  # noqa: BLE001 - a client library's errors end here
                failure = self._failed(error, call)
                return SetResult.TIMEOUT if failure.reason == "timeout" else SetResult.ERROR

    def _stored_size(self, key: bytes) -> int | None:
        try:
            return int(self._obstore.head(self._client, page_name(key))["size"])
        except FileNotFoundError as error:
            if explain(error).reason != "absent":
                raise
            return None

    def _put(self, key: bytes, body: memoryview, replaces: bool) -> SetResult:
        create = self._create.supported and not replaces
        try:
            mode = {"mode": "create"} if create else {}
            put = self._obstore.put(self._client, page_name(key), body, use_multipart=False, **mode)
        except Exception as error:
            if explain(error).reason != "exists":
                raise
            self._reached = True
            return SetResult.EXISTS
        self._reached = True
        if replaces and self._create.etags_are_md5 and not is_md5_of(body, put["e_tag"]):
            self.metrics.add("error", "not_as_sent")
            return SetResult.ERROR
        self._bad_pages.clear([key])
        return SetResult.STORED

    # -- removal ---------------------------------------------------------------------------------------------------

    def _remove(self, keys: Sequence[bytes]) -> int:
        answers, _ = self._threads.share(len(keys), lambda i, call: self._remove_page(keys[i], call), self._time_left())
        return sum(answer is True for answer in answers)

    def _remove_page(self, key: bytes, call: Call[bool]) -> bool:
        self._bad_pages.clear([key])
        if self._clearing.hides(key):
            return False
        try:
            # Whatever has the page's name, whole or not.
            if self._stored_size(key) is None:
                return False
            delete_objects(self._obstore, self._client, [page_name(key)])
        except Exception as error:  # noqa: BLE001 - a client library's errors end here
            self._failed(error, call)
            return False
        return True

    def _clear(self, digests: Sequence[bytes] | None) -> int:
        """A store has no rename of a prefix: see ``Clearing``. An identity whose pages are not met within a second is
        cleared and not counted."""
        return self._clearing.clear(digests, self._sweep, min(_ADMIN_TIMEOUT, self._timeout))

    def _sweep(self, cleared: Cleared) -> None:
        """Delete until a whole listing shows nothing but pages stored since."""
        prefixes = [PAGES] if cleared.digests is None else [pages_of(digest) for digest in sorted(cleared.digests)]
        try:
            for prefix in prefixes:
                while self._delete_listed(prefix, cleared):
                    pass
        except Exception as error:  # noqa: BLE001 - a client library's errors end here
            failure = self._explained(error)
            self.metrics.add("error", failure.reason)
            raise ClearLaterError(str(failure)) from None

    def _delete_listed(self, prefix: str, cleared: Cleared) -> int:
        """How many pages there were to delete."""
        deleted = 0
        for listed in self._obstore.list(self._client, prefix, chunk_size=_LISTED_AT_ONCE):
            if cleared.closing:
                return 0
            with cleared.old_pages(key for entry in listed if (key := page_key(entry["path"])) is not None) as old:
                if old:
                    delete_objects(self._obstore, self._client, [page_name(key) for key in old])
            self.metrics.add("cleared", "", len(old))
            deleted += len(old)
        return deleted

    def _time_left(self) -> float:
        return call_deadline(self._timeout) - time.monotonic()

    def wait_until_cleared(self, timeout: float) -> bool:
        """Wait for the deletion of what was cleared; for tools and tests."""
        return self._clearing.wait(timeout)

    def wait_until_examined(self, timeout: float) -> bool:
        """Wait until the pages that arrived damaged have been looked at again; for tools and tests."""
        return self._bad_pages.wait(timeout)

    def _close(self) -> None:
        """Waits for requests under way, which end by their own timeouts, and for the deletion of cleared pages."""
        self._bad_pages.close()
        self._clearing.close(_CLOSE_TIMEOUT)
        self._threads.close()

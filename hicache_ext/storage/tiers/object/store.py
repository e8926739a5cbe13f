"""The object tier: pages in objects of S3-compatible stores, Google Cloud Storage, Azure, or a directory.

Pages that are written together share an object, a pack (page/pack.py). Many requests run at once on threads of the
store. Here is what a tier answers, and what holds the rest together: presence and reading are in
reading.py, writing and removal in writing.py.
Reasons: docs/decisions/object-stores.md.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

from hicache_ext.errors import StoreError, StoreSetupError, UnansweredError
from hicache_ext.runtime.call_deadline import tell_connection_lost
from hicache_ext.storage.contract.abilities import LARGEST_DOCUMENT, LARGEST_SUM, document_in
from hicache_ext.storage.contract.bad_pages import BadPages
from hicache_ext.storage.contract.base import TierStore, leading_in_portions
from hicache_ext.storage.contract.clearing import Clearing
from hicache_ext.storage.contract.diagnosis import Finding, Level
from hicache_ext.storage.contract.store import GetResult, PageBatch, SetResult
from hicache_ext.storage.tiers.object.catalog import IDENTITIES, PackCatalog, digest_of_identity, identity_name
from hicache_ext.storage.tiers.object.client import Failure, Requests, explain
from hicache_ext.storage.tiers.object.config import ObjectTierConfig
from hicache_ext.storage.tiers.object.examination import ObjectMedium
from hicache_ext.storage.tiers.object.reading import Pages, look_up, read
from hicache_ext.storage.tiers.object.writing import most_in_a_pack, remove, sweep, write

logger = logging.getLogger(__name__)

DEFAULT_CONCURRENCY = 32

_ADMIN_TIMEOUT = 1.0
"""Seconds for calls on SGLang's scheduler thread (clear, register_identity)."""
_PASSING = frozenset({"connection", "timeout", "no_bucket", "http_5xx", "slow_down"})
"""Failures that are not of one object."""
_REQUESTS_AT_START = 8
"""At most, one after the other; each may take the tier's timeout."""
_FIRST_LOOK = 1000
"""Pages of a chain that are looked up first."""
_CLOSE_TIMEOUT = 30.0
"""Seconds for the deletion of cleared pages at close(), while the store answers."""


class ObjectPageStore(TierStore):
    """PageStore over an obstore client whose root is this tier's prefix. Threads: any."""

    type_name = "object"

    def __init__(
        self,
        name: str,
        tier: ObjectTierConfig,
        connect: Callable[[], Any],
        connect_to_delete: Callable[[], Any] | None = None,
    ) -> None:
        """``connect`` makes a client; pages that arrived damaged are looked at again through another one.
        ``connect_to_delete`` makes one for a server that cannot delete many objects by one request.

        Raises StoreSetupError when the store cannot be used.
        """
        super().__init__(name)
        self._tier = tier
        self._connect = connect
        self.shared = tier.sharing().shared
        self._clearing = Clearing(name)
        self._requests = Requests(
            name,
            connect,
            self.metrics,
            lambda failure: self.count_errors({failure.reason: 1}, words=str(failure)),
            connect_to_delete,
            at_once=tier.concurrency or DEFAULT_CONCURRENCY,
            timeout=tier.longest_call,
        )
        self._catalog = PackCatalog(self._requests, lists_from=tier.scheme in ("s3", "gs"))
        medium = ObjectMedium(self._requests, connect, self._clearing.hides, self._catalog)
        self._bad_pages = BadPages(name, self.metrics, medium)
        room = most_in_a_pack(tier.prefix)
        self._pages = Pages(self._requests, self._catalog, self._bad_pages, self._clearing, room)
        try:
            self._look_at_the_store()
        except BaseException:
            self._requests.threads.close()
            raise

    def _look_at_the_store(self) -> None:
        """Do once what serving does: a permission that is missing would show in no other way than by absent pages."""
        requests = self._requests
        look = requests.look_into_listings if self._tier.only_read else requests.find_out
        done, failure = requests.within(look, _REQUESTS_AT_START * requests.timeout)
        if not done or failure:
            problem = f"{self._tier.url}: {failure or Failure('timeout')}, asked to {requests.doing}"
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
        # There is no connection to ask: the store is up as far as its last answer tells.
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
            try:
                self._requests.obstore.head(self._requests.client, name)
            except FileNotFoundError:
                self._requests.put(name, text)

        done, failure = self._requests.within(record, min(_ADMIN_TIMEOUT, self._requests.timeout))
        if not done or failure:
            raise StoreError(str(failure or Failure("timeout")))

    def identities(self) -> dict[bytes, dict[str, Any]]:
        documents: dict[bytes, dict[str, Any]] = {}

        def look() -> None:
            room = LARGEST_SUM
            for listed in self._requests.listed(IDENTITIES):
                for entry in listed:
                    digest, length = digest_of_identity(entry["path"]), entry["size"]
                    if digest is None or not 0 < length <= LARGEST_DOCUMENT:
                        continue
                    if (room := room - length) < 0:
                        return
                    try:
                        stored = self._requests.part(entry["path"], 0, length)
                    except Exception as error:
                        # One that cannot be read, gone or somebody else's, does not hide the others.
                        if explain(error).reason in _PASSING:
                            raise
                        continue
                    document = document_in(bytes(stored))
                    if document is not None:
                        documents[digest] = document

        with self._calls:
            done, failure = self._requests.within(look)
        if not done or failure:
            reason = failure or Failure("timeout")
            raise StoreError(f"tier {self.name!r}: the identities that it has cannot be listed ({reason})")
        return documents

    # -- calls -----------------------------------------------------------------------------------------------------

    def _read(self, batch: PageBatch) -> list[GetResult]:
        return read(self._pages, batch, self._requests.deadline())

    def _has(self, keys: Sequence[bytes]) -> list[bool]:
        return self._present(keys, self._requests.deadline())

    def _lead(self, keys: Sequence[bytes]) -> int:
        """Chains mostly end early: the first pages first."""
        has = partial(self._present, deadline=self._requests.deadline(), leading=True)
        return leading_in_portions(keys, has, _FIRST_LOOK, len(keys))

    def _present(self, keys: Sequence[bytes], deadline: float, *, leading: bool = False) -> list[bool]:
        """Raises UnansweredError where a request failed: nobody knows of the pages that were not found."""
        found = look_up(self._pages, keys, self._pages.hides, deadline, leading=leading)
        present = [key in found.places for key in keys]
        if found.failed and not all(present):
            raise UnansweredError(present, present.count(False), len(present))
        return present

    def _write(self, batch: PageBatch) -> list[SetResult]:
        deadline = self._requests.deadline()
        results = write(self._pages, batch, deadline)
        if not self._requests.reached:
            tell_connection_lost()
        return results

    # -- removal ---------------------------------------------------------------------------------------------------

    def _remove(self, keys: Sequence[bytes]) -> int:
        deadline = self._requests.deadline()
        self._bad_pages.clear(keys)
        return remove(self._pages, [key for key in keys if not self._clearing.hides(key)], deadline)

    def _remove_copies(self, copies: Mapping[bytes, bytes]) -> int:
        return self._bad_pages.remove_copies(copies)

    def _clear(self, digests: Sequence[bytes] | None) -> int:
        """A store has no rename of a prefix: see ``Clearing``. An identity whose pages are not met within a second is
        cleared and not counted."""
        seconds = min(_ADMIN_TIMEOUT, self._requests.timeout)
        return self._clearing.clear(digests, partial(sweep, self._pages), seconds)

    def wait_until_cleared(self, timeout: float) -> bool:
        """Wait for the deletion of what was cleared; for tools and tests."""
        return self._clearing.wait(timeout)

    def wait_until_examined(self, timeout: float) -> bool:
        """Wait until the pages that arrived damaged have been looked at again; for tools and tests."""
        return self._bad_pages.wait(timeout)

    def _close(self) -> None:
        """Waits for requests under way, which end by their own timeouts, and for the deletion of cleared pages."""
        self._bad_pages.close()
        self._catalog.close()
        self._clearing.close(_CLOSE_TIMEOUT)
        self._requests.threads.close()

"""The object tier: pages in objects of S3-compatible stores, Google Cloud Storage, Azure, or a directory.

Small pages that are written together are one object (page/pack.py), large ones an object each. Many requests run at
once on threads of the store. Reading, writing, presence and removal have their files; here is what holds them together.
Reasons: docs/decisions/object-stores.md.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hicache_ext.errors import StoreError, StoreSetupError
from hicache_ext.storage.contract.bad_pages import BadPages
from hicache_ext.storage.contract.base import TierStore, leading
from hicache_ext.storage.contract.clearing import Clearing
from hicache_ext.storage.contract.diagnosis import Finding
from hicache_ext.storage.contract.identity_documents import LARGEST_DOCUMENT, LARGEST_SUM, document_in
from hicache_ext.storage.contract.store import GetResult, PageBatch, SetResult
from hicache_ext.storage.tiers.object.catalog import PackCatalog
from hicache_ext.storage.tiers.object.client import Failure, explain
from hicache_ext.storage.tiers.object.conditional import ConditionalCreate
from hicache_ext.storage.tiers.object.config import ObjectTierConfig
from hicache_ext.storage.tiers.object.examination import ObjectMedium
from hicache_ext.storage.tiers.object.names import (
    IDENTITIES,
    digest_of_identity,
    identity_name,
)
from hicache_ext.storage.tiers.object.page_objects import LIST_FROM, PageObjects
from hicache_ext.storage.tiers.object.presence import Presence
from hicache_ext.storage.tiers.object.reading import Reading
from hicache_ext.storage.tiers.object.removing import Removing
from hicache_ext.storage.tiers.object.requests import Requests
from hicache_ext.storage.tiers.object.writing import Writing

logger = logging.getLogger(__name__)

DEFAULT_CONCURRENCY = 32

_ADMIN_TIMEOUT = 1.0
"""Seconds for calls on SGLang's scheduler thread (clear, register_identity)."""
_PASSING = frozenset({"connection", "timeout", "no_bucket", "http_5xx", "slow_down"})
"""Failures that are not of one object."""
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

        Raises StoreSetupError when the store cannot be used; with ``required`` false only when threads are lacking: a
        store that cannot be reached then is asked again by each call.
        """
        client = connect()
        import obstore

        super().__init__(name)
        self._url = tier.url
        self.shared = tier.sharing().shared
        self._clearing = Clearing(name)
        at_once = tier.concurrency or DEFAULT_CONCURRENCY
        self._requests = Requests(
            *(name, obstore, client, self.metrics, connect_to_delete), at_once=at_once, timeout=tier.longest_call
        )
        self._create = ConditionalCreate(self._requests)
        self._catalog = PackCatalog(self._requests, lists_from=tier.scheme in ("s3", "gs"))
        medium = ObjectMedium(
            self._requests, connect, self._clearing.hides, lambda: self._create.etags_are_md5, self._catalog
        )
        self._bad_pages = BadPages(name, self.metrics, medium)
        self._objects = PageObjects(self._requests, self._create, self._bad_pages, self._clearing)
        self._presence = Presence(self._requests, self._catalog, self._objects)
        self._reading = Reading(self._requests, self._catalog, self._objects, self._bad_pages)
        self._removing = Removing(self._requests, self._catalog, self._objects)
        self._writing = Writing(
            self._requests,
            self._catalog,
            self._objects,
            self._presence,
            self._create,
            self._bad_pages,
            self._clearing,
            tier.prefix,
        )
        try:
            self._look_at_the_store(tier.required)
        except BaseException:
            self._requests.threads.close()
            raise

    def _look_at_the_store(self, required: bool) -> None:
        done, failure = self.within(self._find_out)
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
        for _ in self._requests.obstore.list(self._requests.client, "identities", chunk_size=1):
            return

    def within(self, request: Callable[[], Any], timeout: float | None = None) -> tuple[bool, Failure | None]:
        """Make a request on a thread of the store: whether it ended in time, and what went wrong if it did."""
        return self._requests.within(request, timeout)

    def _find_out(self) -> None:
        self._create.find_out()
        self._catalog.clock_ahead = self._create.clock_ahead

    @property
    def client(self) -> Any:
        """The obstore client, for diagnosis and tools."""
        return self._requests.client

    def delete(self, name: str) -> None:
        """Delete an object, for diagnosis. Raises what obstore raises."""
        self._requests.delete([name])

    def details(self) -> dict[str, Any]:
        return {
            "url": self._url,
            "concurrency": self._requests.at_once,
            "timeout": self._requests.timeout,
            "conditional_create": self._create.supported,
            "packed_pages": self._catalog.page_count(),
        }

    def gauges(self) -> dict[str, float]:
        # There is no connection to ask: the store is up as far as its last answer tells.
        return {"tier_up": float(self._requests.reached)}

    def diagnose(self) -> Sequence[Finding]:
        from hicache_ext.storage.tiers.object.diagnosis import diagnose

        return diagnose(self, self._requests.obstore)

    def _register(self, digest: bytes, document: dict[str, Any]) -> None:
        self._catalog.expect(digest)
        name, text = identity_name(digest), json.dumps(document, sort_keys=True, indent=1).encode()

        def record() -> None:
            try:
                self._requests.obstore.head(self._requests.client, name)
            except FileNotFoundError:
                self._requests.obstore.put(self._requests.client, name, text, use_multipart=False)

        done, failure = self.within(record, min(_ADMIN_TIMEOUT, self._requests.timeout))
        if not done or failure:
            raise StoreError(str(failure or Failure("timeout")))

    def identities(self) -> dict[bytes, dict[str, Any]]:
        documents: dict[bytes, dict[str, Any]] = {}
        obstore, client = self._requests.obstore, self._requests.client

        def look() -> None:
            room = LARGEST_SUM
            for listed in obstore.list(client, IDENTITIES):
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
            done, failure = self.within(look)
        if not done or failure:
            reason = failure or Failure("timeout")
            raise StoreError(f"tier {self.name!r}: the identities that it has cannot be listed ({reason})")
        return documents

    # -- calls -----------------------------------------------------------------------------------------------------

    def _read(self, batch: PageBatch) -> list[GetResult]:
        return self._reading.read(batch, self._clearing.hides, self._requests.deadline())

    def _has(self, keys: Sequence[bytes]) -> list[bool]:
        found = self._presence.look_up(keys, self._is_hidden, self._requests.deadline())
        return [key in found for key in keys]

    def _lead(self, keys: Sequence[bytes]) -> int:
        """Chains mostly end early: the first pages first."""
        deadline = self._requests.deadline()
        first, rest = keys[:LIST_FROM], keys[LIST_FROM:]
        found = self._presence.look_up(first, self._is_hidden, deadline, leading=True)
        run = leading([key in found for key in first])
        if run < len(first) or not rest:
            return run
        found = self._presence.look_up(rest, self._is_hidden, deadline)
        return run + leading([key in found for key in rest])

    def _is_hidden(self, key: bytes) -> bool:
        return self._bad_pages.hides(key) or self._clearing.hides(key)

    def _write(self, batch: PageBatch) -> list[SetResult]:
        deadline = self._requests.deadline()
        self._create.find_out_again(self.within, self._requests.timeout / 4)
        return self._writing.write(batch, deadline)

    # -- removal ---------------------------------------------------------------------------------------------------

    def _remove(self, keys: Sequence[bytes]) -> int:
        deadline = self._requests.deadline()
        self._bad_pages.clear(keys)
        return self._removing.remove([key for key in keys if not self._clearing.hides(key)], deadline)

    def _remove_copies(self, copies: Mapping[bytes, bytes]) -> int:
        return self._bad_pages.remove_copies(copies)

    def _clear(self, digests: Sequence[bytes] | None) -> int:
        """A store has no rename of a prefix: see ``Clearing``. An identity whose pages are not met within a second is
        cleared and not counted."""
        return self._clearing.clear(digests, self._removing.sweep, min(_ADMIN_TIMEOUT, self._requests.timeout))

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

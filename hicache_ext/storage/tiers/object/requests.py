"""Requests to one object store: on threads of the tier's own, within a deadline, their failures counted by reason."""

from __future__ import annotations

import logging
import mmap
import time
from collections.abc import Callable, Sequence
from typing import Any

from hicache_ext.errors import StoreSetupError
from hicache_ext.runtime.call_deadline import call_deadline
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.runtime.threads import Call, Result, ThreadPool
from hicache_ext.storage.tiers.object.client import Failure, delete_objects, explain, lacks_deletion_of_many

logger = logging.getLogger(__name__)

_NO_ANSWER = frozenset({"connection", "timeout", "denied", "no_bucket"})
"""Failures after which no other request can work."""

_STREAMED = 1 << 18
"""Bytes of a piece of an answer."""

Piece = Callable[[Call[Any], int], Any]
"""A request of a call. It is given its position, so that it can stop those behind it."""


class Requests:
    """Threads: any."""

    def __init__(
        self,
        name: str,
        obstore: Any,
        client: Any,
        metrics: TierMetrics,
        connect_to_delete: Callable[[], Any] | None = None,
        *,
        at_once: int,
        timeout: float,
    ) -> None:
        """``connect_to_delete``: makes a client for a server that cannot delete many objects by one request.

        Raises StoreSetupError when threads are lacking.
        """
        self.name = name
        self.obstore = obstore
        self.client = client
        self.metrics = metrics
        self._connect_to_delete = connect_to_delete
        self._deleting = client
        self.at_once = at_once
        self.timeout = timeout
        self.reached = False
        """Whether the last request that ended was answered by the store."""
        try:
            self.threads = ThreadPool(f"hicache-{name}", at_once)
        except RuntimeError as error:
            raise StoreSetupError(name, f"no threads for {at_once} requests at once ({error})") from error

    def deadline(self) -> float:
        """Of the current call, by time.monotonic()."""
        return call_deadline(self.timeout)

    def share(self, pieces: Sequence[Piece], deadline: float) -> tuple[list[Any], bool]:
        """All pieces, as many at once as there are threads; what they answered, and whether all have ended in time."""
        return self.threads.share(
            len(pieces), lambda position, call: pieces[position](call, position), deadline - time.monotonic()
        )

    def within(self, request: Callable[[], Any], timeout: float | None = None) -> tuple[bool, Failure | None]:
        """Make a request on a thread of the store: whether it ended in time, and what went wrong if it did."""
        failures: list[Failure] = []

        def make(_: int, call: Call[bool]) -> bool:
            try:
                request()
            except Exception as error:  # noqa: BLE001 - a client library's errors end here
                failures.append(self.explained(error))
            else:
                self.reached = True
            return True

        _, done = self.threads.share(1, make, self.timeout if timeout is None else timeout)
        if not done:
            self.reached = False
        return done, failures[0] if done and failures else None

    def explained(self, error: BaseException) -> Failure:
        """Why a request failed; what that says of the store is noted."""
        failure = explain(error)
        self.reached = failure.reason not in _NO_ANSWER
        return failure

    def is_absent(self, error: BaseException) -> bool:
        """Whether a FileNotFoundError is about the object; it is counted where it is not."""
        failure = self.explained(error)
        if failure.reason != "absent":
            self.metrics.add("error", failure.reason)
        return failure.reason == "absent"

    def failed(self, error: BaseException, call: Call[Result]) -> Failure:
        """Count a failed request; where no server can be reached the call ends: its other requests would fail too."""
        failure = self.explained(error)
        self.metrics.add("error", failure.reason)
        logger.debug("tier %s: %s", self.name, failure)
        if failure.reason in ("connection", "denied"):
            call.stop()
        return failure

    def body(self, reply: Any, most: int) -> memoryview:
        """What a request is answered with. Cut where more than ``most`` bytes come: the length that a server claims is
        not to be believed, and obstore ends the process where it has no memory for it."""
        if isinstance(self.client, self.obstore.store.LocalStore):
            return memoryview(reply.bytes())
        whole, filled = memoryview(mmap.mmap(-1, most + 1)), 0
        # In pieces: each is put together while nobody else runs Python.
        for piece in reply.stream(min_chunk_size=_STREAMED):
            part = memoryview(piece)[: most + 1 - filled]
            whole[filled : filled + len(part)] = part
            filled += len(part)
            if filled > most:
                break
        return whole[:filled]

    def part(self, name: str, begin: int, end: int) -> memoryview:
        """Bytes of an object. Raises what obstore raises."""
        return self.body(self.obstore.get(self.client, name, options={"range": (begin, end)}), end - begin)

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects; missing ones are no error. Raises what obstore raises."""
        try:
            delete_objects(self.obstore, self._deleting, names)
        except Exception as error:
            if self._connect_to_delete is None or not lacks_deletion_of_many(error):
                raise
            logger.info("tier %s: the store cannot delete many objects by one request: one by one", self.name)
            self._deleting, self._connect_to_delete = self._connect_to_delete(), None
            delete_objects(self.obstore, self._deleting, names)

    def size_of(self, name: str) -> int | None:
        """Bytes of an object; None where there is none. Raises what obstore raises."""
        try:
            size = int(self.obstore.head(self.client, name)["size"])
        except FileNotFoundError as error:
            if explain(error).reason != "absent":
                raise
            size = None
        self.reached = True
        return size

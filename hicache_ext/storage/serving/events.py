"""Publishes changes of the tiers over ZeroMQ, in the frames of SGLang's own KV event publisher.

Every ``interval`` the contents of the tiers are compared with what was published, and the difference is sent. So we
need no queue, it doesn't matter who changed the tiers, and the next look makes up for failures of this one.
Reasons: docs/decisions/metrics-and-events.md.

PUB: ``(topic, number, batch)``; batches have consecutive numbers, 8 bytes, big-endian. After ``HEARTBEAT`` seconds
without a batch an empty one is sent, so that a subscriber that lost the last batch notices.
ROUTER: a request ``(b"", number)`` is answered with ``(b"", topic, number, batch)`` for each batch from that number on,
and then ``(b"", b"", END, b"")``. If some of these are no longer kept, or if the number is not one of this
publisher's, the answer is the whole state instead: cleared, then all that is stored, under the numbers of the last
batches. A publisher begins with a number higher than all earlier ones, so that a restart is a gap, too.

Blocks are named as in SGLang's KV events (``PageLister``); a *medium* is one of SGLang's words for where a block is.

Threads: everything runs on its own thread, except the constructor and ``close``.
"""

from __future__ import annotations

import enum
import errno
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hicache_ext.config.model import EventsConfig
from hicache_ext.errors import ConfigError
from hicache_ext.packages import missing_package
from hicache_ext.runtime.background import BackgroundLoop
from hicache_ext.runtime.log_limit import LimitedLog
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.storage.contract.abilities import PageLister, ability
from hicache_ext.storage.contract.store import PageStore

logger = logging.getLogger(__name__)

Words = npt.NDArray[np.int64]
Blocks = Mapping[str, Words]
"""Medium -> its unique blocks, in ascending order."""

LONGEST_EVENT = 2048
"""Blocks in one event."""
NO_BLOCKS: Words = np.empty(0, np.int64)


class Kind(enum.Enum):
    STORED = "stored"
    REMOVED = "removed"
    CLEARED = "cleared"
    """Forget everything this stream has reported; has neither medium nor blocks."""


class Change(NamedTuple):
    kind: Kind
    medium: str = ""
    blocks: Words = NO_BLOCKS


def blocks_in(tiers: Sequence[PageStore], identities: Sequence[bytes], *, private: str, shared: str) -> Blocks:
    """Return the blocks in the tiers that can list them (``PageLister``): pages with all parts (one identity each).
    ``private``, ``shared``: the medium of tiers that only this machine has, and of those that others see.

    For one thread at a time. Raises OSError or StoreError."""
    found: dict[str, list[Words]] = {}
    for tier in tiers if identities else ():
        lister = ability(tier, PageLister)
        if lister is not None:
            blocks = _each_once(lister.block_hashes(identities[0]))
            for identity in identities[1:]:
                blocks = blocks[_are_among(blocks, _each_once(lister.block_hashes(identity)))]
            found.setdefault(shared if tier.describe().shared else private, []).append(blocks)
    return {medium: of[0] if len(of) == 1 else _each_once(np.concatenate(of)) for medium, of in found.items()}


def changes_between(before: Blocks, now: Blocks) -> Iterator[Change]:
    """Yield the changes that take a subscriber from the state ``before`` to ``now``."""
    for medium in dict.fromkeys((*before, *now)):
        old, new = before.get(medium, NO_BLOCKS), now.get(medium, NO_BLOCKS)
        if not np.array_equal(old, new):
            yield from _events(Kind.REMOVED, medium, old[~_are_among(old, new)])
            yield from _events(Kind.STORED, medium, new[~_are_among(new, old)])


def _events(kind: Kind, medium: str, blocks: Words) -> Iterator[Change]:
    for begin in range(0, len(blocks), LONGEST_EVENT):
        yield Change(kind, medium, blocks[begin : begin + LONGEST_EVENT])


# numpy's own unique, intersect1d and the like hold the GIL throughout: a second for a few million blocks.


def _each_once(blocks: Words) -> Words:
    """Return the unique blocks in ascending order."""
    ascending = np.sort(blocks)
    first = np.ones(len(ascending), np.bool_)
    np.not_equal(ascending[1:], ascending[:-1], out=first[1:])
    once: Words = ascending if first.all() else ascending[first]
    return once


def _are_among(blocks: Words, others: Words) -> npt.NDArray[np.bool_]:
    """Return a mask of the ``blocks`` that are among ``others``; both ascending."""
    if not len(others):
        return np.zeros(len(blocks), np.bool_)
    at = np.searchsorted(others, blocks)
    np.minimum(at, len(others) - 1, out=at)
    same: npt.NDArray[np.bool_] = others[at] == blocks
    return same


if TYPE_CHECKING:
    import zmq

HEARTBEAT = 5.0
END = (-1).to_bytes(8, "big", signed=True)
KEPT = 1024
"""Limit of batches kept for replay, and of batches queued for one slow subscriber; more are dropped."""
_KEPT_BYTES = 32 << 20
_MOST_BATCHES = KEPT // 2
"""Limit of batches for one look or one answer with the state; fewer than a subscriber's queue holds."""
_REPLAY_INTERVAL = 0.1
"""Seconds between two looks for requests."""
_REPLAYS_AT_ONCE = 8
_LOOK_SHARE = 50
"""Pause after a look, as a multiple of its duration: in large tiers looks take at most 2 % of one processor."""
_BIND_WAIT = 2.0
"""Seconds to wait for a port in use: ZeroMQ releases one some time after its socket was closed."""
_LINGER = 500
"""Milliseconds that ZeroMQ goes on sending the last batches after close()."""
_CLOSE_TIMEOUT = 1.0

Encode = Callable[[Sequence[Change]], bytes]
"""Encodes a batch for subscribers."""
Look = Callable[[], Blocks]
"""Returns the current contents of the tiers. May raise anything; it is then called again at the next look."""

LOOK_INTERVAL = 1.0
"""Minimum of seconds from the end of a look to the next one."""

COUNTED = {
    "block": [kind.value for kind in (Kind.STORED, Kind.REMOVED)],
    "batch": ["sent", "failed"],
    "look": ["done", "failed"],
    "replay": ["history", "state", "refused"],
}


class EventPublisher:
    """See the module docstring. Counted in ``metrics``: ``COUNTED``; levels: ``blocks`` by medium."""

    def __init__(self, config: EventsConfig, rank: int, look: Look, encode: Encode) -> None:
        """Bind both endpoints, ports ``rank`` higher than configured. Raises ConfigError, MissingPackageError."""
        try:
            import zmq
        except ImportError:
            raise missing_package("zmq") from None
        self._zmq = zmq
        self._topic = config.topic.encode()
        self._look = look
        self._encode = encode
        self.metrics = TierMetrics("events", prefix="events_")
        self.metrics.declare(COUNTED)
        self._log = LimitedLog(logger)
        self._published: Blocks = {}
        self._number = time.time_ns()
        """Number of the next batch."""
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._next_look = self._last_sent = 0.0
        self._begun = False
        endpoint, replay = (_of_rank(address, rank) for address in (config.endpoint, config.replay_endpoint))
        self._publish = self._bound(zmq.PUB, endpoint, "endpoint")
        try:
            self._replay = self._bound(zmq.ROUTER, replay, "replay_endpoint")
        except ConfigError:
            self._publish.close(0)
            raise
        self._loop = BackgroundLoop("hicache-ext-events", self._step)
        self._loop.wake()
        logger.info("hicache_ext: KV events at %s, replay at %s", endpoint, replay)

    def close(self) -> None:
        """Publish that nothing is stored any more, and end. Does not wait for subscribers. Idempotent."""
        # A thread that hangs in a look keeps its sockets.
        if self._loop.stop(_CLOSE_TIMEOUT) and not self._publish.closed:
            self._tell({})
            self._publish.close(_LINGER)
            self._replay.close(_LINGER)

    # -- the thread ------------------------------------------------------------------------------------------------

    def _step(self) -> float:
        now = time.monotonic()
        if now >= self._next_look:
            self._look_and_tell()
            ended = time.monotonic()
            self._next_look = ended + max(LOOK_INTERVAL, _LOOK_SHARE * (ended - now))
        if time.monotonic() - self._last_sent >= HEARTBEAT:
            self._send(())
        self._answer_requests()
        return min(_REPLAY_INTERVAL, max(0.0, self._next_look - time.monotonic()))

    def _look_and_tell(self) -> None:
        try:
            found = self._look()
        except Exception as error:  # noqa: BLE001 - whatever the tiers raise, the next look may do better
            self.metrics.add("look", "failed")
            self._log.log(logging.WARNING, "look", "hicache_ext: no KV events now: %r; tried again", error)
            return
        self.metrics.add("look", "done")
        self._tell(found)

    def _tell(self, found: Blocks) -> None:
        """Send the difference from what was published. What cannot be sent is sent by the next call."""
        if not self._begun:
            # Subscribers must forget the state of an earlier publisher.
            self._begun = self._send((Change(Kind.CLEARED),))
        changes = list(changes_between(self._published, found))
        if self._begun and all(self._send(some) for some in _batches(changes)):
            for medium in (*self._published, *found):
                self.metrics.set_level("blocks", medium, float(len(found.get(medium, ()))))
            self._published = found

    def _send(self, changes: Sequence[Change]) -> bool:
        """Send a batch; return whether that worked. Never waits: ZeroMQ drops what a subscriber does not take."""
        try:
            batch = self._encode(changes)
            frames = (self._topic, _number(self._number), batch)
            self._publish.send_multipart(frames, self._zmq.DONTWAIT)
        except Exception as error:  # noqa: BLE001 - of an encoder or of ZeroMQ
            self.metrics.add("batch", "failed")
            self._log.log(logging.WARNING, "batch", "hicache_ext: KV events could not be sent: %r; tried again", error)
            return False
        self._keep(batch)
        self._number += 1
        self._last_sent = time.monotonic()
        self.metrics.add("batch", "sent")
        for change in changes:
            if len(change.blocks):
                self.metrics.add("block", change.kind.value, len(change.blocks))
        return True

    def _keep(self, batch: bytes) -> None:
        self._kept.append((self._number, batch))
        self._kept_bytes += len(batch)
        while len(self._kept) > KEPT or self._kept_bytes > _KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])

    def _answer_requests(self) -> None:
        for _ in range(_REPLAYS_AT_ONCE):
            if not self._replay.poll(0):
                return
            try:
                self._answer_request(self._replay.recv_multipart(self._zmq.DONTWAIT))
            except Exception as error:  # noqa: BLE001 - of ZeroMQ or of an encoder; who asked asks again
                self.metrics.add("replay", "refused")
                self._log.log(logging.WARNING, "replay", "hicache_ext: a request for KV events failed: %r", error)

    def _answer_request(self, frames: Sequence[bytes]) -> None:
        if len(frames) != 3 or len(frames[2]) != 8:
            self.metrics.add("replay", "refused")
            return
        client, _, first = frames
        for number, batch in self._since(int.from_bytes(first, "big")):
            self._answer(client, self._topic, _number(number), batch)
        self._answer(client, b"", END, b"")

    def _since(self, first: int) -> list[tuple[int, bytes]]:
        """Return all batches from number ``first`` on, or the state if some of them are no longer kept."""
        if self._kept and self._kept[0][0] <= first <= self._number:
            self.metrics.add("replay", "history")
            return [(number, batch) for number, batch in self._kept if number >= first]
        self.metrics.add("replay", "state")
        state = _batches([Change(Kind.CLEARED), *changes_between({}, self._published)])
        return [(self._number - len(state) + at, self._encode(some)) for at, some in enumerate(state)]

    def _answer(self, client: bytes, topic: bytes, number: bytes, batch: bytes) -> None:
        self._replay.send_multipart((client, b"", topic, number, batch), self._zmq.DONTWAIT)

    # -- sockets ---------------------------------------------------------------------------------------------------

    def _bound(self, kind: int, endpoint: str, key: str) -> zmq.Socket[Any]:
        socket: zmq.Socket[Any] = self._zmq.Context.instance().socket(kind)
        # An answer to a request may contain all kept batches and the end marker.
        socket.set_hwm(KEPT if kind == self._zmq.PUB else 2 * KEPT)
        socket.setsockopt(self._zmq.IPV6, "[" in endpoint)
        deadline = time.monotonic() + _BIND_WAIT
        while True:
            try:
                socket.bind(endpoint)
                return socket
            except self._zmq.ZMQError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() >= deadline:
                    socket.close(0)
                    problem = f"{endpoint} cannot be bound: {os.strerror(error.errno or 0)}"
                    allowed = "an address of this machine, a free port"
                    raise ConfigError(f"hicache_ext.events.{key}", problem, allowed) from None
            time.sleep(0.05)


def _batches(changes: Sequence[Change]) -> list[Sequence[Change]]:
    size = max(1, -(-len(changes) // _MOST_BATCHES))
    return [changes[begin : begin + size] for begin in range(0, len(changes), size)]


def _of_rank(endpoint: str, rank: int) -> str:
    """Return the endpoint of a rank. As in SGLang, each data parallel replica has the next port."""
    address, _, port = endpoint.rpartition(":")
    return f"{address}:{int(port) + rank}"


def _number(number: int) -> bytes:
    return number.to_bytes(8, "big")

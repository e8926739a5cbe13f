"""The Mooncake client library: its import, its setup, and the meaning of its return codes.

The library crashes the process on a call before ``setup`` or after ``close``, and its calls cannot be interrupted. So
only ``Attachment`` holds a client, and the library itself bounds calls by environment variables that are set before its
first import. A variable set by the user is kept.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hicache_ext.errors import StoreClosedError, StoreSetupError
from hicache_ext.page import envelope
from hicache_ext.page.memory import address_of
from hicache_ext.runtime.background import Backoff
from hicache_ext.runtime.breaker import Breaker
from hicache_ext.runtime.call_gate import CallGate
from hicache_ext.runtime.log_limit import LimitedLog
from hicache_ext.runtime.threads import ThreadPool, call_within
from hicache_ext.storage.tiers.mooncake.config import MooncakeTierConfig

logger = logging.getLogger(__name__)

OK = 0
NO_SPACE = -200
INVALID_ARGUMENT = -600
"""On a read: the object is larger than the buffers."""
NOT_READY = -703
NOT_FOUND = -704
EXISTS = -705
LEASED = -706
LEASE_EXPIRED = -707
TRANSFER_FAILED = -800
"""The holder is dead or frozen; on a read also: the object is smaller than the buffers."""
MASTER_LOST = (-900, -901)
"""No connection to the master; no answer from it in time."""

REASONS = {
    NO_SPACE: "full",
    INVALID_ARGUMENT: "invalid_argument",
    NOT_READY: "not_ready",
    NOT_FOUND: "not_found",
    LEASED: "leased",
    LEASE_EXPIRED: "lease_expired",
    TRANSFER_FAILED: "transfer",
    -900: "master_unreachable",
    -901: "master_timeout",
}

_LIBRARY_BUFFER = 16 << 20
"""Bytes of a buffer that the library requires but none of our calls uses."""
_SETUP_SECONDS = 10.0
_SETUP_SECONDS_PER_BYTE = 1.0 / (1 << 30)
"""Setup allocates a contributed segment and, with RDMA, pins it: a second per GiB."""


def reason_of(code: int) -> str:
    """Return the metric label for a return code."""
    return REASONS.get(code, f"code_{-code}")


def environment(timeout: float) -> dict[str, str]:
    """Return the library's variables that limit calls to about ``timeout`` seconds. See docs/mooncake.md."""
    return {
        "MC_LOG_LEVEL": "ERROR",
        # Without these two a frozen master holds every call for 30 s, and setup tries for 90 s.
        "MC_RPC_TIMEOUT_MS": str(max(1, math.ceil(timeout * 1000))),
        "MC_STORE_CLIENT_SETUP_RETRIES": "1",
        "MC_RPC_CONNECT_TIMEOUT_MS": str(max(1, math.ceil(min(timeout, 1.0) * 1000))),
        # Per transfer from a frozen holder. Whole seconds; one second fails healthy transfers on a busy machine.
        "MC_TCP_STATUS_TIMEOUT_SEC": "2",
        "MC_TCP_PROGRESS_TIMEOUT_SEC": "2",
    }


# -- attachment --------------------------------------------------------------------------------------------------------
#
# Only the attachment holds the Mooncake client: no call reaches the library before setup, after close, or without a
# master. States: *attached* (calls go through), *away* (calls are refused immediately; the master is probed in the
# background), *closed*. A late call blocks others until it is known what it waits for: a hung master would hang them
# all.


Answer = TypeVar("Answer")

_ATTEMPTS = Backoff(0.25, 5.0)
"""Seconds between two attempts to reconnect."""
_PROBE_SECONDS = 1.0
_PROBE_KEY = "hicache_ext/probe"
_MOST_LATE = 8
"""Number of late calls at which new calls are refused. Each keeps memory of the tier: 32 MiB or a page."""
_NICENESS = 5
"""The library busy-waits for transfers and would keep the transferring thread off its CPU. A higher value is worse:
threads with niceness 10 or 19 held the GIL for up to 45 or 220 ms (docs/decisions/mooncake.md)."""


class Attachment:
    """Owns the client. Threads: any."""

    def __init__(self, name: str, tier: MooncakeTierConfig) -> None:
        """Set up the client. Raises StoreSetupError if the library is missing or the pool cannot be reached."""
        self.name = name
        self.tier = tier
        self.log = LimitedLog(logger)
        """Log shared by all parts of the tier."""
        self._lock = threading.Lock()
        self._calls = CallGate(name)
        self._client = self.open_client()
        self._master = Breaker(f"hicache-{name}-return", self._try_to_return, _ATTEMPTS)
        self._unexplained: set[Callable[[], object]] = set()
        """Late calls for which it is not yet known what they wait for."""
        self._threads = ThreadPool(f"hicache-{name}-call", niceness=_NICENESS)
        self._registered: list[int] = []
        """Addresses of registered memory regions."""

    @contextlib.contextmanager
    def client(self) -> Iterator[Any]:
        """Yield the client for one call of the store, or None while it is away. Raises StoreClosedError."""
        with self._calls:
            yield self._client if self._open_to_calls else None

    @contextlib.contextmanager
    def inquiring(self) -> Iterator[Any]:
        """Yield the client for finding out what late calls wait for; None only while there is no master."""
        with self._calls:
            yield self._client if self._master.up else None

    @property
    def late(self) -> int:
        """The number of calls that their callers abandoned; they only touch memory of the store."""
        return self._threads.left_behind

    @property
    def _open_to_calls(self) -> bool:
        return not self._unexplained and self.late < _MOST_LATE and self._master.up

    @property
    def attached(self) -> bool:
        return not self._master.closing and self._open_to_calls

    def report(self, code: int) -> None:
        """Process the return ``code`` of a call: if the master is lost, the pool is away until it answers again."""
        if code in MASTER_LOST:
            self._leave(f"the master does not answer ({code})")

    def call_bounded(
        self,
        call: Callable[[], Answer],
        deadline: float,
        scratch: Scratch | None = None,
        *,
        explain: Callable[[], bool] | None = None,
        learn: Callable[[Answer], object] = lambda answer: None,
    ) -> Answer | None:
        """Return the result of ``call``, which may only use the client and memory of the tier; None at ``deadline``.

        The call cannot be stopped: if late, it goes on without its caller, and other calls are refused until it ends or
        ``explain``, on a separate thread, finds out what it waits for. It keeps the ``scratch`` memory that it uses and
        gives it back when it ends; then ``learn`` is called with its result.
        """
        answers: list[Answer] = []
        started = time.monotonic()
        if started >= deadline:
            return None

        def run() -> Answer:
            answers.append(call())
            return answers[0]

        def end_late() -> None:
            try:
                if scratch is not None:
                    scratch.give_back()
                for answer in answers:
                    for code in answer if isinstance(answer, list) else [answer]:
                        if isinstance(code, int):
                            self.report(code)
                    learn(answer)
            finally:
                self._unexplained.discard(run)

        try:
            under_way = self._threads.start(run, end_late)
        except RuntimeError as error:
            self.log.log(logging.WARNING, "threads", "hicache_ext: tier %s: %s", self.name, error)
            return None
        if under_way.ended_within(deadline - time.monotonic()):
            return under_way.result()
        if scratch is not None:
            scratch.left_behind = True
        self._unexplained.add(run)
        if under_way.ended:
            # It may have ended before the line above; then nothing else would discard it.
            self._unexplained.discard(run)
        seconds = time.monotonic() - started
        self.log.log(logging.WARNING, "late", "hicache_ext: tier %s: no answer in %.1f s", self.name, seconds)
        if explain is not None:
            # If no thread can be started, the call is discarded when it ends.
            with contextlib.suppress(RuntimeError):
                self._threads.start(lambda: self._unexplained.discard(run) if explain() else None)
        return None

    def master_answers(self) -> bool:
        """Return whether the master answers: if so, a late transfer is waiting for a holder."""
        try:
            with self.inquiring() as client:
                return client is not None and client.is_exist(_PROBE_KEY) not in MASTER_LOST
        except StoreClosedError:
            return False

    # -- registered memory -----------------------------------------------------------------------------------------

    def register(self, region: memoryview) -> None:
        """Register memory with the library, which refuses memory it already knows. Raises StoreSetupError."""
        with self._calls, self._lock:
            address = address_of(region)
            if (result := self._client.register_buffer(address, region.nbytes)) != OK:
                problem = f"{region.nbytes} bytes of memory could not be registered (code {result})"
                raise StoreSetupError(self.name, problem)
            self._registered.append(address)

    # -- away and back ---------------------------------------------------------------------------------------------

    def _leave(self, reason: str) -> None:
        if not self._master.closing and self._master.trip(reason):
            self.log.log(logging.WARNING, "master", "hicache_ext: tier %s: %s", self.name, reason)

    def _try_to_return(self) -> bool:
        """Return whether the master answers; an open port is not enough, since a frozen master has one, too."""
        if not self.port_answers(_PROBE_SECONDS) or self._client.is_exist(_PROBE_KEY) in MASTER_LOST:
            return False
        self.log.log(logging.INFO, "back", "hicache_ext: tier %s: the master answers again", self.name)
        return True

    def close(self) -> None:
        """Wait for calls in progress, release memory, and close the client. Idempotent.

        Bounded by the tier's timeout: if a call has not ended by then, the client stays open, since closing it would
        crash the process.
        """
        deadline = time.monotonic() + self.tier.longest_call
        with self._lock:
            if self._master.closing:
                return
            self._master.close(0)
        ended = self._calls.shut_within(max(0.0, deadline - time.monotonic()))
        # The breaker's thread may be inside a probe.
        ended = self._master.close(max(0.0, deadline - time.monotonic())) and ended
        ended = not self._threads.close(max(0.0, deadline - time.monotonic())) and ended
        if not ended:
            logger.warning("hicache_ext: tier %s: a call has not ended; its client stays open", self.name)
        else:
            for address in self._registered:
                self._client.unregister_buffer(address)
            self._client.close()

    # -- the library -----------------------------------------------------------------------------------------------

    def open_client(self) -> Any:
        """Return a client that is set up. Bounded in time; raises StoreSetupError.

        The port is probed first, because the library's own attempts take seconds. Setup runs on a separate thread. A
        late setup is abandoned, and closes the client if it still succeeds.
        """
        tier = self.tier
        for variable, value in environment(tier.longest_call).items():
            os.environ.setdefault(variable, value)
        from mooncake import store as library

        self._library = library
        if not self.port_answers(tier.longest_call):
            problem = f"no Mooncake master answers at {tier.master}"
            raise StoreSetupError(self.name, problem, ["start it, or set required: false"])
        client = library.MooncakeDistributedStore()
        codes: list[int] = []

        def set_up() -> None:
            codes.append(
                client.setup(
                    tier.local_hostname,
                    tier.metadata_server,
                    tier.segment_size,
                    _LIBRARY_BUFFER,
                    tier.protocol,
                    tier.device_names(),
                    tier.master,
                    tenant_id=tier.tenant,
                )
            )

        def end_late() -> None:
            if codes == [OK]:
                client.close()

        seconds = tier.longest_call + _SETUP_SECONDS + tier.segment_size * _SETUP_SECONDS_PER_BYTE
        call = call_within(seconds, f"hicache-{self.name}-setup", set_up, end_late)
        if call is None:
            raise StoreSetupError(self.name, f"setup with the master at {tier.master} took over {seconds:.0f} s")
        if codes != [OK]:
            problem = f"setup with the master at {tier.master} failed ({call.error or f'code {codes[0]}'})"
            raise StoreSetupError(self.name, problem, ["check the master, local_hostname, protocol and devices"])
        return client

    def port_answers(self, seconds: float) -> bool:
        """Return whether the port of the master or of an etcd accepts connections, as even a frozen master's does."""
        addresses = self.tier.master_addresses()
        for address in addresses:
            host, _, port = address.rpartition(":")
            with contextlib.suppress(OSError):
                socket.create_connection((host.strip("[]"), int(port)), timeout=seconds / len(addresses)).close()
                return True
        return False

    def replicate_config(self) -> Any:
        """Return the library's configuration of how the objects of a put are replicated and pinned."""
        config = self._library.ReplicateConfig()
        config.replica_num = self.tier.replica_num
        config.with_hard_pin = self.tier.hard_pin
        return config


# -- memory of the tier ------------------------------------------------------------------------------------------------
#
# A library call cannot be stopped, so it never gets host memory: the calling thread copies pages to and from scratch
# memory, and a late call is abandoned along with its scratch memory. There an object is contiguous and cut into pieces
# of the best size, since every buffer is a separate transfer. Over TCP this gain makes up for most of the cost of the
# copy (docs/decisions/mooncake.md).


HEADER_LENGTH = envelope.FIELDS_LENGTH
PIECES = 128
"""Maximum pieces in one library call, or one page. With a frozen holder the call waits for one piece after another and
keeps its memory all the while."""
PIECE_BYTES = 352 * 1024
"""Maximum bytes of a piece. Over TCP each piece is a transfer, four at a time, and costs a round trip; with larger
pieces the sockets' buffers outgrow the CPU's caches."""
_ALIGNMENT = 4096
COPY_THREADS = 2
"""Threads that copy a portion's pages between host and scratch memory, during which the network is idle."""
ALONE_BYTES = 256 * 1024
"""Smaller pages than this are copied by a single thread: two would contend for the GIL at every page."""
SCRATCH_BYTES = 32 * 1024 * 1024
"""Scratch memory of one call; more for a larger page."""


@dataclass(slots=True)
class Scratch:
    """Scratch memory for one call of the store."""

    pool: ScratchPool
    memory: memoryview
    left_behind: bool = False
    """Whether an abandoned library call still uses it and gives it back at its end (``Attachment.call_bounded``)."""

    def give_back(self) -> None:
        with self.pool.lock:
            self.pool.free.append(self.memory)


class ScratchPool:
    """Lends scratch memory to calls: one region per concurrent call. Threads: any."""

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment
        self.lock = threading.Lock()
        self.free: list[memoryview] = []

    @contextlib.contextmanager
    def lent(self, largest_page: int) -> Iterator[Scratch]:
        """Lend memory for objects with payloads of up to ``largest_page`` bytes."""
        scratch = Scratch(self, self._take(max(SCRATCH_BYTES, HEADER_LENGTH + largest_page)))
        try:
            yield scratch
        finally:
            if not scratch.left_behind:
                scratch.give_back()

    def _take(self, size: int) -> memoryview:
        with self.lock:
            # The most recently used region is still in the CPU's caches.
            for number in reversed(range(len(self.free))):
                if self.free[number].nbytes >= size:
                    return self.free.pop(number)
        mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Huge pages, if the kernel has them: 16 MiB are copied and sent 1.05 to 1.15 times as fast.
        with contextlib.suppress(OSError, AttributeError):
            mapped.madvise(mmap.MADV_HUGEPAGE)
        region = memoryview(mapped)
        try:
            self._attachment.register(region)
        except StoreSetupError as error:
            # Transfers will then fail with a code, which becomes a result, unlike this exception.
            self._attachment.log.log(logging.WARNING, "memory", "hicache_ext: %s", error)
        return region


@dataclass(slots=True)
class Portion:
    """The part of a batch that is sent in one library call. Lists are in the order of ``positions``."""

    positions: list[int] = field(default_factory=list)
    objects: list[memoryview] = field(default_factory=list)
    """Scratch memory for header and payload."""
    addresses: list[list[int]] = field(default_factory=list)
    sizes: list[list[int]] = field(default_factory=list)


def portions(payloads: Sequence[int], positions: Sequence[int], scratch: memoryview, most: int) -> Iterator[Portion]:
    """Yield ``positions`` in order in portions of at most ``most`` pieces, or one page. ``payloads`` are the payload
    sizes of all pages, in bytes. Every portion reuses ``scratch``: finish it before taking the next. ``scratch`` must
    fit the largest page.
    """
    base = address_of(scratch)
    portion, used, pieces_left = Portion(), 0, most
    for position in positions:
        need = HEADER_LENGTH + payloads[position]
        sizes = _pieces(need)
        if portion.positions and (used + need > scratch.nbytes or len(sizes) > pieces_left):
            yield portion
            portion, used, pieces_left = Portion(), 0, most
        pieces_left -= len(sizes)
        portion.positions.append(position)
        portion.objects.append(scratch[used : used + need])
        portion.addresses.append([base + used + offset for offset in range(0, need, sizes[0])])
        portion.sizes.append(sizes)
        used += need
    if portion.positions:
        yield portion


@functools.lru_cache(maxsize=64)
def _pieces(size: int) -> list[int]:
    """Return the sizes of an object's pieces: all equal, except that the last may be shorter."""
    count = -(-size // PIECE_BYTES)
    length = size if count == 1 else -(-size // (count * _ALIGNMENT)) * _ALIGNMENT
    return [min(length, size - offset) for offset in range(0, size, length)]

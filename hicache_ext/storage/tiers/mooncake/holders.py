"""Holders that do not answer: their pages are misses, and the pages of all others are read.

A holder is known by the endpoint that the master names for what lies there. The library reads the first copy of an
object in memory, and waits for it: a second for a holder that was killed, two and more for one that is frozen, however
many good holders have a part in the same call. So nothing is asked of a holder that is *out*, nor in one call with it.

While all holders answer nobody asks where pages lie. A call that fails or is late is looked into: the holders of its
pages are out, in doubt, and probed after a tenth of a second by a read of some bytes. Those that answer are back at
once; the others are probed again and again. What the master has forgotten is asked for no more.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from hicache_ext.errors import StoreClosedError, StoreSetupError
from hicache_ext.page.memory import address_of
from hicache_ext.runtime.background import Backoff
from hicache_ext.runtime.breaker import Breaker, BreakerState
from hicache_ext.storage.tiers.mooncake import engine
from hicache_ext.storage.tiers.mooncake.engine import Attachment

_PROBES = Backoff(0.25, 1.0)
_SLOW_START = 1.0
"""Seconds over which a holder's pages are asked for again that was out for longer than a moment."""
_PROBED_NAMES = 8
"""Names of pages of a holder that are kept to probe it with: some are evicted meanwhile."""
_MOST_OUT = 256
"""Holders that are probed, each by a thread: the master may name any number."""
_PROBED_BYTES = 64
_MEMORY_BYTES = 4096


_Place = tuple[str, int]
"""The holder of the copy of an object that the library reads, and the object's size."""


class _Holder:
    """One that does not answer, or did not a moment ago."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.names: deque[str] = deque(maxlen=_PROBED_NAMES)
        self.reported = False
        self.breaker: Breaker


class Holders:
    """Threads: any."""

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment
        self._lock = threading.Lock()
        """Taken before those of the breakers."""
        self._holders: dict[str, _Holder] = {}
        self._stopped = False
        self._memory = memoryview(mmap.mmap(-1, _MEMORY_BYTES))
        """That probes read into; nobody looks at it."""
        # Where it is refused a probe fails with a code, which is an answer, too.
        with contextlib.suppress(StoreSetupError):
            attachment.register(self._memory)

    @property
    def all_answer(self) -> bool:
        return not self._holders

    def out(self) -> list[str]:
        """The endpoints of those that do not answer."""
        with self._lock:
            return sorted(endpoint for endpoint, holder in self._holders.items() if not holder.breaker.up)

    # -- before a call ---------------------------------------------------------------------------------------------

    def lost(self, client: Any, names: Sequence[str], deadline: float) -> set[str]:
        """Those of ``names`` that lie on a holder that is out; all of them where the master does not tell in time.

        Only of names that the master knows (``_known_places``).
        """
        if self.all_answer or not names:
            return set()
        places = self._attachment.call_bounded(lambda: _places(client, names), deadline)
        if places is None:
            return set(names)
        with self._lock:
            holders = list(self._holders.values())
        # Not under the lock: the last call of a slow start ends it.
        shut = {holder.endpoint: holder for holder in holders if holder.breaker.admit() is None}
        lost = {name: shut[endpoint] for name, (endpoint, _) in places.items() if endpoint in shut}
        for name, holder in lost.items():
            holder.names.append(name)
        return set(lost)

    # -- after a call ----------------------------------------------------------------------------------------------

    def learn(self, client: Any, failed: Mapping[str, int]) -> dict[str, int]:
        """Transfers of objects failed that should have had these sizes: the sizes of those that have others.

        The holders of the rest are suspects.
        """
        places = _places(client, list(failed))
        others = {name: size for name, (_, size) in places.items() if size != failed[name]}
        self._suspect({name: place for name, place in places.items() if name not in others})
        return others

    def look_into(self, names: Sequence[str]) -> bool:
        """A call for ``names`` is late: suspect their holders. Whether the master told which they are."""
        try:
            with self._attachment.inquiring() as client:
                places = None if client is None else _known_places(client, names)
        except StoreClosedError:
            return False
        self._suspect(places or {})
        return bool(places)

    def _suspect(self, places: Mapping[str, _Place]) -> None:
        with self._lock:
            if self._stopped:
                return
            suspects = set()
            for name, (endpoint, _) in places.items():
                if endpoint not in self._holders:
                    if len(self._holders) >= _MOST_OUT:
                        continue
                    self._holders[endpoint] = self._new(endpoint)
                self._holders[endpoint].names.append(name)
                suspects.add(endpoint)
            for endpoint in suspects:
                self._holders[endpoint].breaker.trip("a transfer failed or was late", in_doubt=True)

    # -- probes ----------------------------------------------------------------------------------------------------

    def _new(self, endpoint: str) -> _Holder:
        holder = _Holder(endpoint)
        holder.breaker = Breaker(
            f"hicache-{self._attachment.name}-holder",
            lambda: self._answers(holder),
            _PROBES,
            on_change=lambda state, reason: self._changed(holder, state),
            slow_start=_SLOW_START,
        )
        return holder

    def _changed(self, holder: _Holder, state: BreakerState) -> None:
        if state is BreakerState.OPEN:
            return
        with self._lock:
            if holder.breaker.state is BreakerState.CLOSED:
                self._holders.pop(holder.endpoint, None)
            reported, holder.reported = holder.reported, False
        if reported:
            self._log(holder, "answers again, or the master has forgotten it")

    def _answers(self, holder: _Holder) -> bool:
        """Whether bytes can be read from there, or nothing that is known lies there any more."""
        answers = self._probe(holder.endpoint, list(holder.names))
        if not answers and not holder.reported:
            holder.reported = True
            self._log(holder, "does not answer; its pages are misses until it does")
        return answers

    def _log(self, holder: _Holder, what: str) -> None:
        log, name = self._attachment.log, self._attachment.name
        message = "hicache_ext: tier %s: holder %s %s"
        log.log(logging.WARNING, f"{what} {holder.endpoint}", message, name, holder.endpoint, what)

    def _probe(self, endpoint: str, names: list[str]) -> bool:
        try:
            with self._attachment.inquiring() as client:
                if client is None:
                    return False
                places = _known_places(client, names)
                if places is None:
                    return False
                for name, (holder, size) in places.items():
                    if holder == endpoint:
                        places_read = [address_of(self._memory)], [[name]], [[[0]]], [[[0]]]
                        codes = client.get_into_ranges(*places_read, [[[min(_PROBED_BYTES, size)]]])
                        code = int(codes[0][0][0])
                        if code not in (engine.NOT_FOUND, engine.NOT_READY):
                            return code > 0
                return True
        except StoreClosedError:
            return False

    def stop(self) -> None:
        """Begin no further probe."""
        with self._lock:
            self._stopped = True
            breakers = [holder.breaker for holder in self._holders.values()]
        for breaker in breakers:
            breaker.close(0)


def _places(client: Any, names: Sequence[str]) -> dict[str, _Place]:
    """Where each of ``names`` is read from, of those that the master knows."""
    if not names:
        return {}
    places = {}
    for name, copies in client.batch_get_replica_desc(names).items():
        for copy in copies:
            if copy.is_memory_replica():
                described = copy.get_memory_descriptor().buffer_descriptor
                places[name] = described.transport_endpoint, described.size
                break
    return places


def _known_places(client: Any, names: Sequence[str]) -> dict[str, _Place] | None:
    """As ``_places``, for names of which some may be gone; None without a master.

    The library logs a line for each name whose place is asked for in vain.
    """
    codes = client.batch_is_exist(names) if names else []
    if any(code < 0 for code in codes):
        return None
    return _places(client, [name for name, code in zip(names, codes, strict=True) if code == 1])

"""Tracks holders that do not answer: their pages are misses, while the pages of all other holders are read.

A holder is identified by the endpoint that the master reports for its objects. The library reads the first copy of an
object in memory and waits for it: a second for a killed holder, two or more for a frozen one, however many healthy
holders take part in the same call. Therefore no call includes pages of a holder that is *out*.

While all holders answer, the places of pages are not looked up. After a call that fails or is late, the holders of its
pages are out, in doubt, and probed after a tenth of a second by reading a few bytes. Those that answer return
immediately; the others are probed repeatedly. Objects that the master has forgotten are no longer used as probes.
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
"""Seconds over which requests to a holder gradually resume after it was out for more than a moment."""
_PROBED_NAMES = 8
"""Maximum page names kept per holder for probing it; several, since some are evicted meanwhile."""
_MOST_OUT = 256
"""Maximum holders that are probed, each by its own thread: the master may report any number."""
_PROBED_BYTES = 64
_MEMORY_BYTES = 4096


_Place = tuple[str, int]
"""The holder of the copy that the library reads, and the object's size in bytes."""


class _Holder:
    """A holder that does not answer, or did not answer a moment ago."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.names: deque[str] = deque(maxlen=_PROBED_NAMES)
        self.reported = False
        self.breaker: Breaker


class Holders:
    """The holders that are out. Threads: any."""

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment
        self._lock = threading.Lock()
        """Acquired before the breakers' locks."""
        self._holders: dict[str, _Holder] = {}
        self._stopped = False
        self._memory = memoryview(mmap.mmap(-1, _MEMORY_BYTES))
        """Buffer that probes read into; its contents are not used."""
        # If registration is refused, probes fail with a code, which also counts as an answer.
        with contextlib.suppress(StoreSetupError):
            attachment.register(self._memory)

    @property
    def all_answer(self) -> bool:
        return not self._holders

    def out(self) -> list[str]:
        """Return the endpoints of the holders that do not answer."""
        with self._lock:
            return sorted(endpoint for endpoint, holder in self._holders.items() if not holder.breaker.up)

    # -- before a call ---------------------------------------------------------------------------------------------

    def lost(self, client: Any, names: Sequence[str], deadline: float) -> set[str]:
        """Return those of ``names`` whose holder is out; all of them if the master does not reply in time.

        The master must know every name (see ``_known_places``).
        """
        if self.all_answer or not names:
            return set()
        places = self._attachment.call_bounded(lambda: _places(client, names), deadline)
        if places is None:
            return set(names)
        with self._lock:
            holders = list(self._holders.values())
        # Without the lock: ``admit`` may end a slow start, which calls ``_changed``.
        shut = {holder.endpoint: holder for holder in holders if holder.breaker.admit() is None}
        lost = {name: shut[endpoint] for name, (endpoint, _) in places.items() if endpoint in shut}
        for name, holder in lost.items():
            holder.names.append(name)
        return set(lost)

    # -- after a call ----------------------------------------------------------------------------------------------

    def learn(self, client: Any, failed: Mapping[str, int]) -> dict[str, int]:
        """Process failed transfers of objects, name -> expected size. Return the sizes of those that have another size.

        The holders of the rest become suspects.
        """
        places = _places(client, list(failed))
        others = {name: size for name, (_, size) in places.items() if size != failed[name]}
        self._suspect({name: place for name, place in places.items() if name not in others})
        return others

    def look_into(self, names: Sequence[str]) -> bool:
        """Suspect the holders of ``names`` after a late call; return whether the master told which they are."""
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
        """Return whether bytes can be read from the holder, or none of its known objects is left there."""
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
        """Stop probing."""
        with self._lock:
            self._stopped = True
            breakers = [holder.breaker for holder in self._holders.values()]
        for breaker in breakers:
            breaker.close(0)


def _places(client: Any, names: Sequence[str]) -> dict[str, _Place]:
    """Return the place that each of ``names`` is read from, for those that the master knows."""
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
    """Return the same as ``_places`` for names some of which may be gone; None without a master.

    The library would log a line for each unknown name whose place is requested.
    """
    codes = client.batch_is_exist(names) if names else []
    if any(code < 0 for code in codes):
        return None
    return _places(client, [name for name, code in zip(names, codes, strict=True) if code == 1])

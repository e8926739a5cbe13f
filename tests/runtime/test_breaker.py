"""The breaker with its probes: a server that goes away and comes back. The rule of tiers is in tests/storage/guards."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from hicache_ext.runtime import breaker as breaker_module
from hicache_ext.runtime.background import Backoff
from hicache_ext.runtime.breaker import Breaker, BreakerState
from tests.waiting import wait_until

PATIENCE = 30.0
CLOSED, HALF_OPEN, OPEN = BreakerState.CLOSED, BreakerState.HALF_OPEN, BreakerState.OPEN


class Server:
    """What a breaker stands in front of."""

    def __init__(self, **settings: object) -> None:
        self.answers = False
        self.raises: Exception | None = None
        self.probes: list[str] = []
        """Names of the threads that probed."""
        self.changes: list[tuple[BreakerState, str]] = []
        self.breaker = Breaker(
            "test-probe",
            self._probe,
            Backoff(0.01, 0.02),
            on_change=lambda *change: self.changes.append(change),
            **settings,  # type: ignore[arg-type]
        )

    def _probe(self) -> bool:
        self.probes.append(threading.current_thread().name)
        if self.raises is not None:
            raise self.raises
        return self.answers


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    assert server.breaker.close(PATIENCE)


def test_it_is_probed_in_the_background_until_it_answers_and_then_in_full_use(server: Server) -> None:
    assert server.breaker.trip("gone") and not server.breaker.up
    wait_until(lambda: len(server.probes) >= 3)
    server.answers = True
    wait_until(lambda: server.breaker.up)
    assert server.changes == [(OPEN, "gone"), (CLOSED, "")]
    assert set(server.probes) == {"test-probe"}
    wait_until(lambda: not server.breaker._loop.running)


def test_one_that_opens_while_no_thread_can_be_had_is_probed_once_a_call_asks(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    server.answers = True
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert server.breaker.trip("gone") and server.breaker.admit() is None
    assert server.breaker.admit() is None
    wait_until(lambda: server.breaker.state is CLOSED)


def test_what_is_watched_trips_it_whenever_it_says_that_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after it came back."""
    monkeypatch.setattr(breaker_module, "WATCH_INTERVAL", 0.01)
    gone: list[str] = []
    server = Server()
    server.breaker.watch(lambda: gone[-1] if gone else None)
    for number in range(2):
        server.answers = False
        gone.append(f"replaced {number}")
        wait_until(lambda: not server.breaker.up)
        gone.clear()
        server.answers = True
        wait_until(lambda: server.breaker.up)
    changes = [(OPEN, "replaced 0"), (CLOSED, ""), (OPEN, "replaced 1"), (CLOSED, "")]
    wait_until(lambda: server.changes == changes)
    assert server.breaker.close(PATIENCE)


def test_a_probe_that_raises_has_no_answer(server: Server) -> None:
    server.raises = OSError("no route")
    server.breaker.trip("gone")
    wait_until(lambda: len(server.probes) >= 2)
    assert not server.breaker.up
    server.raises, server.answers = None, True
    wait_until(lambda: server.breaker.up)


def test_what_is_open_is_not_tripped_again_nor_by_what_began_before_the_last_change(server: Server) -> None:
    ticket = server.breaker.admit()
    assert server.breaker.trip("gone", ticket)
    assert not server.breaker.trip("gone again") and server.breaker.admit() is None
    server.answers = True
    wait_until(lambda: server.breaker.up)
    assert not server.breaker.trip("late news", ticket) and server.breaker.up
    assert server.breaker.trip("gone", server.breaker.admit())


def test_one_that_begins_open_is_probed_once_somebody_asks_for_it() -> None:
    server = Server(state=OPEN)
    assert server.breaker.state is OPEN and not server.breaker._loop.running
    server.answers = True
    assert not server.breaker.up and server.breaker._loop.running
    wait_until(lambda: server.breaker.up)
    assert server.changes == [(CLOSED, "")]
    assert server.breaker.close(PATIENCE)


def test_a_slow_start_ends_by_itself_and_is_cut_by_a_bad_call() -> None:
    server = Server(slow_start=0.05)
    server.answers = True
    server.breaker.trip("gone")
    wait_until(lambda: server.breaker.state is CLOSED)
    assert [state for state, _ in server.changes] == [OPEN, HALF_OPEN, CLOSED]
    long = Server(slow_start=3600.0)
    long.answers = True
    for _ in range(2):
        long.breaker.trip("gone")
        wait_until(lambda: long.breaker.state is HALF_OPEN)
    assert server.breaker.close(PATIENCE) and long.breaker.close(PATIENCE)


def test_a_slow_start_that_begins_anew_is_not_ended_by_who_saw_the_last_one_end() -> None:
    server = Server(slow_start=3600.0)
    server.breaker.trip("gone")

    server.breaker.recover()
    server.breaker._end_slow_start()
    assert server.breaker.state is HALF_OPEN
    assert server.breaker.close(PATIENCE)


def test_a_closed_one_neither_probes_nor_comes_back(server: Server) -> None:
    server.breaker.trip("gone")
    assert server.breaker.close(PATIENCE)
    server.answers = True
    probes = len(server.probes)
    server.breaker.recover()
    time.sleep(0.05)
    assert len(server.probes) == probes and not server.breaker.up

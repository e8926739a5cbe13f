"""The background loop: when its steps run, what a failure does, how it ends."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from hicache_ext.runtime.background import RETRY, BackgroundLoop, Backoff, Retry

PATIENCE = 30.0


class Steps:
    """Counts the steps of a loop; each answers the next of ``answers``, the last one again and again."""

    def __init__(self, *answers: float | Retry | BaseException | None, backoff: Backoff | None = None) -> None:
        self.times: list[float] = []
        self._answers = answers
        self._taken = threading.Condition()
        self.loop = BackgroundLoop("test-loop", self._step, backoff)

    def _step(self) -> float | Retry | None:
        with self._taken:
            self.times.append(time.monotonic())
            self._taken.notify_all()
        answer = self._answers[min(len(self.times), len(self._answers)) - 1]
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def wait_for(self, count: int) -> None:
        with self._taken:
            assert self._taken.wait_for(lambda: len(self.times) >= count, PATIENCE)

    def stays_at(self, count: int) -> bool:
        time.sleep(0.05)
        return len(self.times) == count


@pytest.fixture
def steps() -> Iterator[Callable[..., Steps]]:
    made: list[Steps] = []

    def make(*answers: float | Retry | BaseException | None, backoff: Backoff | None = None) -> Steps:
        made.append(Steps(*answers, backoff=backoff))
        return made[-1]

    yield make
    for each in made:
        assert each.loop.stop(PATIENCE)


def test_no_thread_is_started_before_the_first_wake(steps: Callable[..., Steps]) -> None:
    loop = steps(math.inf)
    assert not loop.loop.running and loop.stays_at(0)


def test_a_step_runs_again_after_the_seconds_it_answers(steps: Callable[..., Steps]) -> None:
    loop = steps(0.02)
    loop.loop.wake()
    loop.wait_for(4)
    assert loop.times[3] - loop.times[0] >= 0.06


def test_the_first_step_may_come_later(steps: Callable[..., Steps]) -> None:
    loop = steps(math.inf)
    begun = time.monotonic()
    loop.loop.wake(0.05)
    loop.wait_for(1)
    assert loop.times[0] - begun >= 0.05


def test_a_wake_cuts_a_pause_short_and_never_makes_one_longer(steps: Callable[..., Steps]) -> None:
    loop = steps(3600.0)
    loop.loop.wake()
    loop.wait_for(1)
    loop.loop.wake(0.01)
    loop.loop.wake(3600.0)
    loop.wait_for(2)


def test_a_wake_during_a_step_is_not_lost() -> None:
    begun, go_on, again = threading.Event(), threading.Event(), threading.Event()

    def step() -> float:
        if begun.is_set():
            again.set()
        begun.set()
        assert go_on.wait(PATIENCE)
        return math.inf

    loop = BackgroundLoop("test-loop", step)
    loop.wake()
    assert begun.wait(PATIENCE)
    loop.wake()
    go_on.set()
    assert again.wait(PATIENCE)
    assert loop.stop(PATIENCE)


def test_a_loop_with_nothing_left_to_do_has_no_thread_until_it_is_woken(steps: Callable[..., Steps]) -> None:
    loop = steps(None)
    for count in (1, 2, 3):
        assert loop.loop.wake()
        loop.wait_for(count)
        deadline = time.monotonic() + PATIENCE
        while loop.loop.running and time.monotonic() < deadline:
            time.sleep(0.001)
        assert not loop.loop.running


@pytest.mark.parametrize("failure", [RETRY, ValueError("bad"), SystemExit()])
def test_pauses_after_failures_double_and_begin_anew_after_a_success(
    steps: Callable[..., Steps], failure: Retry | BaseException
) -> None:
    loop = steps(failure, failure, failure, 0.0, failure, math.inf, backoff=Backoff(0.04, 10.0))
    loop.loop.wake()
    loop.wait_for(6)
    pauses = [after - before for before, after in zip(loop.times, loop.times[1:], strict=False)]
    for pause, least in zip(pauses, (0.02, 0.04, 0.08, 0.0, 0.02), strict=True):
        assert pause >= least


def test_pauses_have_a_limit_and_differ() -> None:
    backoff = Backoff(0.5, 8.0)
    assert [backoff.limit(failures) for failures in range(1, 8)] == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    pauses = {backoff.pause(10_000) for _ in range(20)}
    assert len(pauses) > 1 and all(4.0 <= pause <= 8.0 for pause in pauses)


def test_each_kind_of_failure_is_logged_once_until_a_step_succeeds(
    steps: Callable[..., Steps], caplog: pytest.LogCaptureFixture
) -> None:
    a, b = ValueError("a"), OSError("b")
    loop = steps(a, a, b, a, 0.0, a, math.inf, backoff=Backoff(0.001, 0.001))
    loop.loop.wake()
    loop.wait_for(7)
    said = [record.exc_info[1] for record in caplog.records if record.levelno == logging.ERROR and record.exc_info]
    assert said == [a, b, a]


def test_stop_cuts_every_pause_short(steps: Callable[..., Steps]) -> None:
    for answer in (3600.0, math.inf, RETRY):
        loop = steps(answer, backoff=Backoff(3600.0, 3600.0))
        loop.loop.wake()
        loop.wait_for(1)
        begun = time.monotonic()
        assert loop.loop.stop(PATIENCE)
        assert time.monotonic() - begun < 5.0
        assert not loop.loop.wake() and loop.stays_at(1)


def test_stop_leaves_a_step_that_hangs_behind_and_cuts_a_rest() -> None:
    begun, go_on, rested = threading.Event(), threading.Event(), threading.Event()

    def step() -> None:
        begun.set()
        assert go_on.wait(PATIENCE)
        assert not loop.rest(3600.0)
        rested.set()

    loop = BackgroundLoop("test-loop", step)
    loop.wake()
    assert begun.wait(PATIENCE)
    assert not loop.stop(0.01)
    assert loop.stopping
    go_on.set()
    assert rested.wait(PATIENCE) and loop.stop(PATIENCE)


def test_a_step_may_stop_its_own_loop() -> None:
    ended = threading.Event()

    def step() -> None:
        loop.stop()
        ended.set()

    loop = BackgroundLoop("test-loop", step)
    loop.wake()
    assert ended.wait(PATIENCE) and loop.stop(PATIENCE)


def test_a_machine_without_threads_is_asked_again_at_the_next_wake(
    steps: Callable[..., Steps], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    loop = steps(math.inf)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert not loop.loop.wake()
    assert "no thread to be had" in caplog.text
    assert loop.loop.wake()
    loop.wait_for(1)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_child_after_a_fork_starts_a_thread_of_its_own() -> None:
    stepped = threading.Event()

    def step() -> float:
        stepped.set()
        return math.inf

    loop = BackgroundLoop("test-loop", step)
    loop.wake()
    assert stepped.wait(PATIENCE)
    time.sleep(0.01)  # the loop waits now, without its lock
    child = os.fork()
    if child == 0:
        stepped.clear()
        os._exit(0 if loop.wake() and stepped.wait(5) else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert loop.stop(PATIENCE)

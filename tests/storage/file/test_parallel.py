"""Work shared by threads."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from hicache_ext.runtime.workers import Workers


@pytest.fixture
def workers():
    workers = Workers("test", 2)
    yield workers
    workers.close()


def test_an_interrupted_call_ends_only_when_all_of_its_work_has(workers: Workers) -> None:
    begun, helped = threading.Event(), []

    def work(piece: int) -> None:
        if threading.current_thread() is threading.main_thread():
            assert begun.wait(30)
        else:
            begun.set()
            time.sleep(0.05)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            time.sleep(0.2)
            helped.append(piece)

    # A shell starts what it puts in the background with the signal ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            workers.run(2, work)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(helped) == 1
    assert workers.run(3, lambda piece: piece) == [0, 1, 2]


def test_a_piece_that_raises_is_raised_once_all_have_ended(workers: Workers) -> None:
    ended: list[int] = []

    def work(piece: int) -> None:
        if piece == 0:
            raise ValueError
        time.sleep(0.05)
        ended.append(piece)

    with pytest.raises(ValueError):  # noqa: PT011
        workers.run(4, work)
    assert sorted(ended) == [1, 2, 3]

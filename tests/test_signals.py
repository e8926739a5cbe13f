"""A run that is told to end takes away what it made; one that outlives its terminal (nohup) goes on."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress

import pytest

from hicache_ext.runtime.commands import terminated_in_order


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_interrupts_and_is_what_it_was_afterwards(number: signal.Signals) -> None:
    def work() -> None:
        with terminated_in_order():
            os.kill(os.getpid(), number)
            signal.pause()

    # Under nohup SIGHUP is ignored, and the test would wait for ever.
    outside = signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(KeyboardInterrupt):
            work()
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, outside)


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with terminated_in_order():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_in_another_thread_it_changes_nothing() -> None:
    entered: list[bool] = []

    def enter() -> None:
        with suppress(ValueError), terminated_in_order():
            entered.append(True)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert entered == [True]

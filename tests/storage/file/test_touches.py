"""Uses of pages noted by reads: written by the next eviction or in a pause, in whole chains; only a kill loses them."""

from __future__ import annotations

import threading
import time

import pytest

from hicache_ext.storage.tiers.file.slab import touches as module
from hicache_ext.storage.tiers.file.slab.touches import Chains, Touches

PATIENCE = 30.0


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread writes nothing as long as a test takes."""
    monkeypatch.setattr(module, "_QUIET", 1000.0)
    monkeypatch.setattr(module, "_LONGEST", 1000.0)


class Recorder:
    """What was written, chain by chain."""

    def __init__(self) -> None:
        self.written: Chains = []
        self.touches = Touches("test", self._write)
        self.wrote = threading.Event()

    def _write(self) -> bool:
        taken = self.touches.take()
        self.written += taken
        if taken:
            self.wrote.set()
        return bool(taken)


def test_what_is_noted_is_written_once_reads_pause() -> None:
    recorder = Recorder()
    recorder.touches.note(b"i" * 16, 0, [b"a", b"b"])
    assert recorder.wrote.wait(PATIENCE)
    recorder.touches.close()
    assert recorder.written == [[b"a", b"b"]]


def test_reads_without_a_pause_are_written_all_the_same() -> None:
    recorder = Recorder()
    deadline = time.monotonic() + PATIENCE
    while not recorder.wrote.is_set() and time.monotonic() < deadline:
        recorder.touches.note(b"i" * 16, 0, [b"a"])
        time.sleep(0.005)
    recorder.touches.close()
    assert recorder.written


def test_a_machine_without_threads_is_asked_again_by_the_next_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    recorder = Recorder()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        recorder.touches.note(b"i" * 16, 0, [b"a"])
    recorder.touches.note(b"i" * 16, 0, [b"b"])
    assert recorder.wrote.wait(PATIENCE)
    recorder.touches.close()
    assert recorder.written == [[b"a"], [b"b"]]


@pytest.mark.usefixtures("no_pause")
def test_an_eviction_takes_a_bounded_number_of_pages_in_whole_chains_oldest_first() -> None:
    touches = Touches("test", lambda: False)
    chains = [[bytes([number]) * 48] * 100 for number in range(4)]
    for chain in chains:
        touches.note(b"i" * 16, 0, chain)
    assert touches.take() == chains[:2]
    assert touches.take() == chains[2:]
    assert touches.take() == []
    touches.close()


@pytest.mark.usefixtures("no_pause")
def test_a_chain_longer_than_a_transaction_takes_is_written_alone() -> None:
    touches = Touches("test", lambda: False)
    chain = [bytes(48)] * 1000
    touches.note(b"i" * 16, 0, [b"first"])
    touches.note(b"i" * 16, 0, chain)
    assert touches.take() == [[b"first"]]
    assert touches.take() == [chain]
    touches.close()


@pytest.mark.usefixtures("no_pause")
def test_closing_writes_the_rest_unless_it_was_forgotten() -> None:
    for forgotten in (False, True):
        recorder = Recorder()
        recorder.touches.note(b"i" * 16, 0, [b"a"])
        if forgotten:
            recorder.touches.forget()
        recorder.touches.close()
        assert recorder.written == ([] if forgotten else [[b"a"]])
        recorder.touches.note(b"i" * 16, 0, [b"after"])
        assert recorder.touches.take() == []


@pytest.mark.usefixtures("no_pause")
def test_what_is_noted_is_bounded_when_nothing_can_be_written() -> None:
    touches = Touches("test", lambda: False)
    for _ in range(2000):
        touches.note(b"i" * 16, 0, [bytes(48)] * 128)
    taken = 0
    while chains := touches.take():
        taken += sum(len(chain) for chain in chains)
    assert 0 < taken < 2000 * 128
    touches.close()

"""``codec: auto``: pages are encoded where it pays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from hicache_ext.page.transforms.codec import AGAIN, Paying

PAGE = 1 << 20
ENCODING, DECODING = 600e-6, 200e-6
SAVED = PAGE // 4


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Slow:
    """A codec that takes a known time for each page and saves a fourth."""

    rooms = (PAGE - SAVED,)
    measured = None

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.calls = 0
        self.shrinks = True

    def encode(self, payload: memoryview, encoded: memoryview) -> int:
        self.clock.now += ENCODING
        self.calls += 1
        return PAGE - SAVED - 100 if self.shrinks else 0

    def decode(self, encoded: memoryview, payload: memoryview) -> None:
        self.clock.now += DECODING


BREAK_EVEN = 2 * SAVED / (ENCODING + DECODING)
"""Bytes a second of a medium at which one thread gains nothing."""


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def codec(clock: Clock) -> Slow:
    return Slow(clock)


def _seen(paying: Paying, get: float | None, set_: float | None, start_up: float = 0.0) -> None:
    """Calls of a medium that moves so many bytes a second."""
    for size in (8 << 20, 32 << 20) * 5:
        for call, speed in (("get", get), ("set", set_)):
            if speed is not None:
                paying.moved(call, size, start_up + size / speed)


def _encodes(paying: Paying, codec: Any) -> bool:
    return paying.may_pay(codec) and paying.pays(codec, memoryview(bytes(PAGE)))


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("start_up", [0.0, 0.05])
@pytest.mark.parametrize(("speed", "pays"), [(0.1, True), (0.95, True), (1.05, False), (10, False)])
def test_pages_are_encoded_for_media_slower_than_the_break_even(
    clock: Clock, codec: Slow, threads: int, start_up: float, speed: float, pays: bool
) -> None:
    paying = Paying(threads=threads, clock=clock)
    _seen(paying, *[speed * BREAK_EVEN * threads] * 2, start_up)
    assert _encodes(paying, codec) is pays


def test_a_medium_that_writes_slowly_and_reads_fast_is_judged_by_both(clock: Clock, codec: Slow) -> None:
    paying = Paying(threads=1, clock=clock)
    _seen(paying, get=100 * BREAK_EVEN, set_=0.6 * BREAK_EVEN)
    assert not _encodes(paying, codec)
    _seen(paying, get=100 * BREAK_EVEN, set_=0.4 * BREAK_EVEN)
    assert _encodes(paying, codec)


@pytest.mark.parametrize("only", ["get", "set"])
def test_what_was_not_seen_is_taken_to_cost_what_was(clock: Clock, codec: Slow, only: str) -> None:
    slow, fast = (Paying(threads=1, clock=clock) for _ in range(2))
    for paying, speed in ((slow, 0.9 * BREAK_EVEN), (fast, 1.1 * BREAK_EVEN)):
        _seen(paying, *((speed, None) if only == "get" else (None, speed)))
    assert _encodes(slow, codec) and not _encodes(fast, codec)


def test_nothing_is_encoded_before_the_medium_was_seen(clock: Clock, codec: Slow) -> None:
    paying = Paying(clock=clock)
    paying.moved("set", 8 << 20, 1000.0)
    assert not _encodes(paying, codec) and codec.calls == 0


def test_a_medium_that_becomes_slow_gets_encoded_pages(clock: Clock, codec: Slow) -> None:
    paying = Paying(threads=1, clock=clock)
    _seen(paying, 10 * BREAK_EVEN, 10 * BREAK_EVEN)
    assert not _encodes(paying, codec)
    _seen(paying, 0.1 * BREAK_EVEN, 0.1 * BREAK_EVEN)
    assert _encodes(paying, codec)


def test_a_fast_medium_costs_one_measurement_in_a_while(clock: Clock, codec: Slow) -> None:
    paying = Paying(threads=1, clock=clock)
    _seen(paying, 10 * BREAK_EVEN, 10 * BREAK_EVEN)
    for _ in range(100):
        _encodes(paying, codec)
    assert codec.calls == 2
    clock.now += AGAIN + 1
    _encodes(paying, codec)
    assert codec.calls == 4


@pytest.mark.parametrize(("speed", "pays"), [(0.95, True), (1.05, False)])
def test_copies_count_in_what_the_codec_costs(
    clock: Clock, codec: Slow, monkeypatch: pytest.MonkeyPatch, speed: float, pays: bool
) -> None:
    """Segments into one piece, what is stored, and the page back into its segments: as body.py copies them."""
    a_byte = 100e-6 / PAGE

    def gather(source: Sequence[memoryview], target: memoryview) -> None:
        clock.now += sum(piece.nbytes for piece in source) * a_byte

    monkeypatch.setattr("hicache_ext.page.transforms.codec.gather", gather)
    copied = PAGE + (PAGE - SAVED - 100) + PAGE
    break_even = 2 * SAVED / (ENCODING + DECODING + copied * a_byte)
    paying = Paying(threads=1, clock=clock)
    _seen(paying, speed * break_even, speed * break_even)
    assert _encodes(paying, codec) is pays


def test_pages_that_do_not_shrink_are_tried_again_later(clock: Clock, codec: Slow) -> None:
    paying = Paying(threads=1, clock=clock)
    _seen(paying, 0.1 * BREAK_EVEN, 0.1 * BREAK_EVEN)
    codec.shrinks = False
    assert not _encodes(paying, codec)
    codec.shrinks = True
    assert not _encodes(paying, codec)
    clock.now += AGAIN + 1
    assert _encodes(paying, codec)

"""Pages that arrived damaged: what is removed, what stays, and what a write of them waits for. Over a dict."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from hicache_ext.errors import NotReadError
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.storage.contract import bad_pages
from hicache_ext.storage.contract.bad_pages import BadPages, Stored, Verdict, cut
from hicache_ext.testing.conformance.pages import page_key, page_keys, payload_of
from hicache_ext.testing.conformance.second_reader import write_page_object
from tests.waiting import wait_until

PATIENCE = 60.0


def page_object(key: bytes) -> bytes:
    return write_page_object(key, payload_of(key, 1000))


def bad(key: bytes) -> bytes:
    whole = page_object(key)
    return whole[:-1] + bytes([whole[-1] ^ 1])


class Pool:
    """A ``PoolStore``, as far as it is asked, over a dict; ``path`` is what happens to bytes on their way."""

    def __init__(self) -> None:
        self.objects: dict[bytes, bytes] = {}
        self.path: Callable[[bytes], bytes] = lambda stored: stored
        self.reads = 0
        self.removal: Verdict | str | None = ""
        self.reached = True
        self.go_on = threading.Event()
        self.go_on.set()

    def read_again(self, key: bytes, most: int) -> Stored | None:
        self.go_on.wait(PATIENCE)
        self.reads += 1
        if not self.reached:
            raise NotReadError("down")
        stored = self.objects.get(key)
        if stored is None:
            return None
        arrived = self.path(stored)
        return Stored(len(arrived), memoryview(arrived)[:most])

    def remove_bad(self, key: bytes, bad: Stored) -> Verdict | None:
        if self.removal != "":
            return self.removal
        return None if self.objects.pop(key, None) is None else Verdict.REMOVED


@pytest.fixture
def pool() -> Pool:
    return Pool()


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def metrics() -> TierMetrics:
    return TierMetrics("pool")


@pytest.fixture
def suspects(pool: Pool, metrics: TierMetrics, clock: Clock) -> Iterator[BadPages]:
    suspects = BadPages("pool", metrics, pool, clock)
    yield suspects
    pool.go_on.set()
    suspects.close()


def arrive(suspects: BadPages, key: bytes) -> None:
    suspects.suspect(key, len(page_object(key)), "checksum")


def settled(suspects: BadPages, key: bytes) -> Verdict | None:
    """None where it was settled before this could ask."""
    return suspects.settle([key], time.monotonic() + PATIENCE).get(key)


def test_a_page_that_is_good_in_the_pool_stays_and_is_present_again(pool, suspects, metrics, caplog):
    for key in page_keys(20):
        pool.objects[key] = page_object(key)
        arrive(suspects, key)
    assert suspects.wait(PATIENCE)
    assert metrics.value("suspect", "good") == 20
    assert len(pool.objects) == 20
    assert not any(suspects.hides(key) for key in pool.objects)
    # Said once, not for every page.
    assert sum("are good in the pool" in record.getMessage() for record in caplog.records) == 1


def test_a_page_that_is_bad_in_the_pool_goes_after_two_reads_that_agree(pool, suspects):
    key = page_key("bad")
    pool.objects[key] = bad(key)
    arrive(suspects, key)
    assert suspects.wait(PATIENCE)
    assert pool.objects == {} and pool.reads == 2


@pytest.mark.parametrize("header_length", [129, 4096, 65536])
def test_a_page_with_a_longer_header_is_a_page_and_stays(pool, suspects, metrics, header_length):
    key = page_key("long header")
    whole = write_page_object(key, payload_of(key, 1000), header_length=header_length)
    pool.objects[key] = whole
    arrive(suspects, key)
    assert suspects.wait(PATIENCE)
    assert pool.objects and metrics.value("suspect", "good") == 1
    pool.objects[key] = whole[:-1] + bytes([whole[-1] ^ 1])
    arrive(suspects, key)
    assert suspects.wait(PATIENCE)
    assert pool.objects == {}


def test_close_waits_for_the_read_under_way_and_begins_no_further_one(pool, suspects):
    key = page_key("closing")
    pool.objects[key] = bad(key)
    pool.path = lambda stored: stored[:-2] + pool.reads.to_bytes(2, "big")
    pool.go_on.clear()
    arrive(suspects, key)
    closer = threading.Thread(target=suspects.close)
    closer.start()
    wait_until(lambda: suspects._closing)
    pool.go_on.set()
    closer.join(PATIENCE)
    assert not closer.is_alive()
    assert pool.reads <= 1 and pool.objects


def test_a_page_that_arrives_with_other_bytes_each_time_stays_and_is_absent_for_a_while(pool, suspects, clock):
    key = page_key("noisy")
    pool.objects[key] = page_object(key)
    pool.path = lambda stored: stored[:-2] + pool.reads.to_bytes(2, "big")
    arrive(suspects, key)
    assert suspects.wait(PATIENCE)
    assert pool.objects and suspects.hides(key)
    assert settled(suspects, key) is Verdict.UNCLEAR
    clock.now += bad_pages._HIDDEN_SECONDS
    assert not suspects.hides(key)


def test_what_the_server_denies_stays_and_may_be_replaced(pool, suspects):
    key = page_key("denied")
    pool.objects[key] = bad(key)
    pool.removal = Verdict.DENIED
    arrive(suspects, key)
    assert settled(suspects, key) is Verdict.DENIED
    assert pool.objects and suspects.hides(key)
    suspects.clear([key])
    assert not suspects.hides(key)


def test_a_copy_that_was_replaced_before_the_removal_is_looked_at_anew(pool, suspects, monkeypatch):
    key = page_key("raced")
    pool.objects[key] = bad(key)

    def replaced(key: bytes, _: Stored) -> None:
        pool.objects[key] = page_object(key)

    monkeypatch.setattr(pool, "remove_bad", replaced)
    arrive(suspects, key)
    assert settled(suspects, key) in (None, Verdict.GOOD)
    assert pool.objects[key] == page_object(key)


def test_more_bad_pages_than_a_few_stay_until_the_pause_is_over(pool, suspects, metrics, clock, caplog):
    keys = page_keys(bad_pages.MOST_REMOVED + 10)
    pool.objects = {key: bad(key) for key in keys}
    for key in keys:
        arrive(suspects, key)
    assert suspects.wait(PATIENCE)
    assert len(pool.objects) == metrics.value("suspect", "withheld") == 10
    assert [record.levelno for record in caplog.records if "BAD PAGES" in record.getMessage()] == [logging.ERROR]
    left = next(iter(pool.objects))
    clock.now += bad_pages.WINDOW
    assert settled(suspects, left) is Verdict.WITHHELD and suspects.hides(left)
    clock.now += bad_pages.PAUSE
    assert not suspects.hides(left)
    arrive(suspects, left)
    assert settled(suspects, left) in (None, Verdict.REMOVED) and left not in pool.objects
    # What somebody else has mended meanwhile is taken for what it is.
    other = next(iter(pool.objects))
    pool.objects[other] = page_object(other)
    arrive(suspects, other)
    assert settled(suspects, other) in (None, Verdict.GOOD)


@pytest.mark.parametrize("answer", [Verdict.DENIED, None])
def test_a_removal_that_does_not_take_place_does_not_count(pool, suspects, metrics, answer):
    """A cache on the way that damages every page is denied every time, and must not end removal for what is bad."""
    for key in page_keys(2 * bad_pages.MOST_REMOVED, "stays"):
        pool.objects[key] = bad(key)
        pool.removal = answer
        arrive(suspects, key)
    assert suspects.wait(PATIENCE)
    pool.removal = ""
    for key in page_keys(bad_pages.MOST_REMOVED):
        pool.objects[key] = bad(key)
        arrive(suspects, key)
    assert suspects.wait(PATIENCE)
    assert (metrics.value("suspect", "withheld"), metrics.value("suspect", "removed")) == (0, bad_pages.MOST_REMOVED)


def test_a_removal_without_an_answer_counts(pool, suspects, metrics, monkeypatch):
    def no_answer(key: bytes, _: Stored) -> None:
        raise NotReadError("cut")

    monkeypatch.setattr(pool, "remove_bad", no_answer)
    for key in page_keys(bad_pages.MOST_REMOVED + 1):
        pool.objects[key] = bad(key)
        arrive(suspects, key)
    assert suspects.wait(PATIENCE)
    assert metrics.value("suspect", "withheld") > 0


def test_a_few_bad_pages_every_minute_are_removed_for_ever(pool, suspects, metrics, clock):
    for minute in range(5):
        for key in page_keys(bad_pages.MOST_REMOVED, f"minute {minute}"):
            pool.objects[key] = bad(key)
            arrive(suspects, key)
        assert suspects.wait(PATIENCE)
        clock.now += bad_pages.WINDOW
    assert pool.objects == {}
    assert metrics.value("suspect", "withheld") == 0


def test_a_read_that_marks_suspects_waits_for_nothing_and_a_write_waits_until_its_deadline(pool, suspects):
    key = page_key("slow")
    pool.objects[key] = bad(key)
    pool.go_on.clear()
    # Returns although nothing can be read.
    arrive(suspects, key)
    assert suspects.hides(key)
    assert suspects.settle([key], time.monotonic() + 0.05) == {key: Verdict.UNCLEAR}
    pool.go_on.set()
    assert settled(suspects, key) in (None, Verdict.REMOVED)


def test_a_pool_that_cannot_be_reached_loses_nothing_and_is_tried_again_by_a_write(pool, suspects):
    key = page_key("away")
    pool.objects[key] = bad(key)
    pool.reached = False
    arrive(suspects, key)
    assert suspects.wait(PATIENCE)
    assert pool.objects and suspects.hides(key)
    pool.reached = True
    assert settled(suspects, key) in (None, Verdict.REMOVED)


def test_suspects_are_limited_in_number(pool, suspects, metrics, monkeypatch):
    monkeypatch.setattr(bad_pages, "_MOST_SUSPECTS", 5)
    pool.go_on.clear()
    for key in page_keys(8):
        arrive(suspects, key)
    assert metrics.value("suspect", "forgotten") == 3
    pool.go_on.set()


@pytest.mark.parametrize("length", [0, 1, 127, 128, 129, 1000, 32896])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.999])
def test_a_path_that_flips_the_same_place_of_every_reply_gives_other_bytes_when_the_object_is_cut(length, share):
    stored = bytes(length)
    pieces = cut(length, share)
    assert [end for _, end in pieces[:-1]] == [begin for begin, _ in pieces[1:]]
    assert (pieces[0][0], pieces[-1][1]) == (0, length)

    def flipped(piece: bytes, place: int) -> bytes:
        return piece[:place] + b"\xff" + piece[place + 1 :] if place < len(piece) else piece

    for place in range(0, length, max(1, length // 97)):
        if len(pieces) > 1:
            assert b"".join(flipped(stored[a:b], place) for a, b in pieces) != flipped(stored, place)

"""clear() of a medium that lists and removes page by page: a write after it counts, an older page never comes back."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from hicache_ext.errors import ClearLaterError
from hicache_ext.runtime.background import Backoff
from hicache_ext.storage.contract import clearing as module
from hicache_ext.storage.contract.clearing import Cleared, Clearing
from hicache_ext.testing.conformance.pages import IDENTITY, OTHER_IDENTITY, page_keys

KEYS = page_keys(4)


class Medium:
    """Two parts; a sweep lists a part, stops at ``hold``, and removes what it may."""

    def __init__(self) -> None:
        self.parts: dict[int, set[bytes]] = {0: set(KEYS[:2]), 1: set(KEYS[2:])}
        self.down: set[int] = set()
        self.swept: list[int] = []
        self.listed, self.hold = threading.Event(), threading.Event()
        self.hold.set()

    def part_of(self, key: bytes) -> int:
        return 0 if key in KEYS[:2] else 1

    def sweep(self, cleared: Cleared) -> None:
        for part, stored in self.parts.items():
            if cleared.is_finished(part):
                continue
            if part in self.down:
                raise ClearLaterError(f"part {part} is down")
            self.swept.append(part)
            keys = {key for key in stored if cleared.has(key[:16])}
            self.listed.set()
            self.hold.wait(10)
            with cleared.old_pages(keys) as old:
                stored -= old
            cleared.finish(part)


@pytest.fixture
def medium() -> Medium:
    return Medium()


@pytest.fixture
def clearing(medium: Medium, monkeypatch: pytest.MonkeyPatch) -> Iterator[Clearing]:
    monkeypatch.setattr(module, "_ATTEMPTS", Backoff(0.01, 0.01))
    clearing = Clearing("pool", medium.part_of)
    yield clearing
    medium.hold.set()
    clearing.close(10)


def test_what_was_cleared_is_removed_and_its_identities_are_counted(medium: Medium, clearing: Clearing) -> None:
    medium.parts[0].add(page_keys(1, identity=OTHER_IDENTITY)[0])
    assert clearing.clear([IDENTITY], medium.sweep, 10) == 1
    assert clearing.wait(10) and not any(clearing.hides(key) for key in KEYS)
    assert clearing.clear(None, medium.sweep, 10) == 1
    assert medium.parts == {0: set(), 1: set()}
    assert clearing.clear(None, medium.sweep, 10) == 0


def test_old_pages_are_hidden_until_they_are_removed_and_new_ones_stay(medium: Medium, clearing: Clearing) -> None:
    medium.hold.clear()
    assert clearing.clear([IDENTITY], medium.sweep) == 0
    assert medium.listed.wait(10)
    assert all(clearing.hides(key) for key in KEYS)
    with clearing.writing(KEYS[:2]) as writing:
        assert writing.cleared == set(KEYS[:2])
        writing.stored.add(KEYS[0])
    assert [clearing.hides(key) for key in KEYS] == [False, True, True, True]
    with clearing.writing(KEYS[:1]) as writing:
        assert writing.cleared == set()
    medium.hold.set()
    assert clearing.wait(10)
    assert medium.parts == {0: {KEYS[0]}, 1: set()}


def test_a_page_cleared_again_during_the_first_sweep_goes_too(medium: Medium, clearing: Clearing) -> None:
    medium.hold.clear()
    clearing.clear([IDENTITY], medium.sweep)
    assert medium.listed.wait(10)
    with clearing.writing(KEYS[:1]) as writing:
        writing.stored.add(KEYS[0])
    clearing.clear(None, medium.sweep)
    assert clearing.hides(KEYS[0])
    medium.hold.set()
    assert clearing.wait(10)
    assert medium.parts == {0: set(), 1: set()}


def test_a_page_whose_write_failed_does_not_come_back(medium: Medium, clearing: Clearing) -> None:
    medium.hold.clear()
    clearing.clear([IDENTITY], medium.sweep)
    assert medium.listed.wait(10)
    with clearing.writing(KEYS[:1]):
        medium.hold.set()
        # Left out of this sweep, because its writer has not said yet what came of it.
        assert not clearing.wait(0.2)
        assert clearing.hides(KEYS[0])
    assert clearing.wait(10)
    assert medium.parts == {0: set(), 1: set()}


def test_a_second_writer_of_a_page_does_not_take_it_for_the_cleared_copy(medium: Medium, clearing: Clearing) -> None:
    medium.hold.clear()
    clearing.clear([IDENTITY], medium.sweep)
    assert medium.listed.wait(10)
    begun, cleared = threading.Event(), []

    def write_too() -> None:
        begun.set()
        with clearing.writing(KEYS[:2]) as writing:
            cleared.append(writing.cleared)

    with clearing.writing(KEYS[:1]) as writing:
        second = threading.Thread(target=write_too)
        second.start()
        assert begun.wait(10)
        second.join(0.1)
        with pytest.raises(TimeoutError), clearing.writing(KEYS[:1], time.monotonic() + 0.1):
            pass
        with clearing.writing(KEYS[2:3]):
            pass
        writing.stored.add(KEYS[0])
    second.join(10)
    assert cleared == [{KEYS[1]}]


def test_a_write_waits_for_the_removal_of_its_page_until_its_deadline(clearing: Clearing) -> None:
    removing, go_on = threading.Event(), threading.Event()

    def sweep(cleared: Cleared) -> None:
        with cleared.old_pages(KEYS[:1]):
            removing.set()
            go_on.wait(10)

    clearing.clear([IDENTITY], sweep)
    assert removing.wait(10)
    with pytest.raises(TimeoutError), clearing.writing(KEYS[:1], time.monotonic() + 0.05):
        raise AssertionError("the removal has not ended")
    with clearing.writing(KEYS[1:2]) as writing:
        assert writing.cleared == set(KEYS[1:2])
    threading.Timer(0.05, go_on.set).start()
    with clearing.writing(KEYS[:1]):
        assert go_on.is_set()


def test_a_part_that_is_down_is_hidden_until_it_is_back_and_no_other(medium: Medium, clearing: Clearing) -> None:
    medium.down.add(1)
    clearing.clear([IDENTITY], medium.sweep, 10)
    assert [clearing.hides(key) for key in KEYS] == [False, False, True, True]
    assert not clearing.wait(0.1)
    medium.down.clear()
    wait_until_gone(clearing)
    assert medium.swept == [0, 1] and medium.parts == {0: set(), 1: set()}


def wait_until_gone(clearing: Clearing) -> None:
    for _ in range(1000):
        if clearing.wait(0.01):
            return
        threading.Event().wait(0.01)
    raise AssertionError("not removed")


def test_what_cannot_be_removed_ends_with_the_store(medium: Medium, caplog: pytest.LogCaptureFixture) -> None:
    medium.down.add(0)
    clearing = Clearing("pool", medium.part_of)
    clearing.clear(None, medium.sweep)
    clearing.close(0.05)
    assert "closed before all cleared pages were removed" in caplog.text


def test_a_sweep_that_ends_in_an_error_of_ours_is_tried_again(clearing: Clearing) -> None:
    errors: list[Exception] = [ValueError("ours"), ClearLaterError("not now")]

    def sweep(cleared: Cleared) -> None:
        if errors:
            raise errors.pop()

    clearing.clear(None, sweep)
    wait_until_gone(clearing)
    assert errors == []

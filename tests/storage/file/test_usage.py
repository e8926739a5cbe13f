"""The account that all processes of a directory share."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hicache_ext.runtime.file_lock import try_lock_byte
from hicache_ext.runtime.members import Members
from hicache_ext.storage.tiers.file.usage import HELD, NO_ROOM, UnderWay, Usage, UsageRecord

_SPAWN = multiprocessing.get_context("spawn")


def _no_room(need: int) -> int:
    return 0


def _in_vain(need: int) -> int:
    raise AssertionError("evicted in vain")


class Account(Usage):
    """An account with a membership of its own, as one process has them."""

    def __init__(self, place: Path) -> None:
        self.members = Members(place / "members")
        super().__init__(place, self.members)

    def walk(self, *parts: int) -> bool:
        """A count that finds this in its parts."""
        return self.count(((number + 1) / len(parts), part) for number, part in enumerate(parts))

    def leave(self) -> None:
        """As when the process is killed."""
        self._lock.close()
        self._evictions.close()
        self.members.close()

    def close(self) -> None:
        super().close()
        self.members.close()


@pytest.fixture
def open_usage(tmp_path):
    opened: list[Account] = []

    def open_one(stored: int | None = None) -> Account:
        """``stored``: what a first count finds."""
        opened.append(Account(tmp_path))
        if stored is not None:
            assert opened[-1].walk(stored)
        return opened[-1]

    yield open_one
    for usage in opened:
        usage.close()


def _record_on_disk(place: Path) -> dict[str, Any]:
    return json.loads((place / "usage").read_bytes().partition(b"\n")[0].partition(b" ")[2])


def _sealed(body: bytes) -> bytes:
    return b"%08x %s\n" % (zlib.crc32(body), body)


def _change(usage: Account, change: Callable[[UsageRecord], object]) -> None:
    with usage.locked() as record:
        change(record)


def test_reserved_bytes_count_until_they_are_committed(open_usage):
    usage = open_usage(0)
    assert usage.reserve(1000, None, _no_room) is None
    assert usage.used() == 1000
    usage.commit(1000, 300)
    assert usage.used() == 300


def test_a_reservation_beyond_the_capacity_is_refused_and_leaves_no_trace(open_usage):
    usage = open_usage(600)
    assert usage.reserve(500, 1000, _no_room) == NO_ROOM
    assert usage.used() == 600
    assert usage.reserve(400, 1000, _no_room) is None


def test_room_is_asked_for_exactly_what_is_missing(open_usage):
    usage = open_usage(900)
    asked: list[int] = []

    def evict(need: int) -> int:
        asked.append(need)
        return 350

    assert usage.reserve(400, 1000, evict) is None
    assert asked == [300]
    assert usage.used() == 900 - 350 + 400


@pytest.mark.parametrize("amount", [1001, 10**9])
def test_no_page_is_evicted_for_a_reservation_that_can_never_fit(open_usage, amount):
    assert open_usage(900).reserve(amount, 1000, _in_vain) == NO_ROOM


def test_no_page_is_evicted_for_room_that_others_have_reserved(open_usage):
    first, second = open_usage(100), open_usage()
    assert first.reserve(800, 1000, _no_room) is None
    assert second.reserve(300, 1000, _in_vain) == NO_ROOM


def test_two_processes_do_not_evict_for_the_same_need(open_usage):
    first, second = open_usage(1000), open_usage()
    asked: list[int] = []
    answers: list[str | None] = []
    waiting = threading.Thread(target=lambda: answers.append(second.reserve(100, 1000, _in_vain)))

    def evict(need: int) -> int:
        asked.append(need)
        waiting.start()
        # More than is needed, for those who come next.
        return need + 500

    assert first.reserve(100, 1000, evict) is None
    waiting.join(60)
    assert (asked, answers) == ([100], [None])
    assert first.used() == 600


def test_the_account_is_free_while_a_process_evicts_and_sees_what_that_frees(open_usage):
    first, second = open_usage(1000), open_usage()
    seen: list[int] = []

    def evict(need: int) -> int:
        seen.append(second.used())
        second.commit(0, 0)
        return 300

    assert first.reserve(300, 1000, evict) is None
    assert [*seen, second.used()] == [1300, 1000]


def test_removals_are_accounted_when_they_end_also_by_an_exception(open_usage):
    usage = open_usage(1000)

    def fail_half_way():
        with usage.removing() as removal:
            removal.freed = 400
            raise PermissionError("halfway")

    with pytest.raises(PermissionError):
        fail_half_way()
    assert usage.used() == 600


def test_what_a_dead_writer_had_reserved_counts_as_stored_until_somebody_counts(open_usage):
    usage, killed = open_usage(100), open_usage()
    assert killed.reserve(500, None, _no_room) is None
    assert usage.used() == 600 and not usage.in_doubt()
    killed.leave()
    assert usage.in_doubt()
    asked: list[int] = []
    assert usage.reserve(700, 1200, lambda need: asked.append(need) or need) is None
    assert asked == [100]
    assert usage.used() == 1200 and usage.in_doubt()
    usage.commit(700, 0)
    assert usage.walk(77)
    assert usage.used() == 77 and not usage.in_doubt()


def test_a_writer_that_lives_is_not_taken_for_dead(open_usage):
    usage, other = open_usage(100), open_usage()
    assert other.reserve(500, None, _no_room) is None
    assert usage.reserve(900, 1000, _no_room) == NO_ROOM
    assert not usage.in_doubt()
    other.commit(500, 0)
    assert usage.used() == 100


def test_an_account_with_a_writer_that_is_no_member_is_none_and_counted_anew(open_usage):
    """Somebody with access to the directory wrote that name, and nothing tells who."""
    usage = open_usage(100)
    _change(usage, lambda record: record.under_way.update({"elsewhere:17:4711": UnderWay(500, time.time())}))
    assert usage.in_doubt()
    assert usage.used(1000) == 1000
    assert usage.walk(70)
    assert (usage.in_doubt(), usage.used(1000)) == (False, 70)


def test_an_eviction_is_on_record_before_its_first_file_goes(tmp_path, open_usage):
    """Killed amid it, the account must be known to be off."""
    usage = open_usage(900)
    on_disk: list[dict] = []

    def evict(need: int) -> int:
        on_disk.append(_record_on_disk(tmp_path))
        return need

    assert usage.reserve(400, 1000, evict) is None
    assert list(on_disk[0]["under_way"]) == [str(usage.members.id)]


def test_many_threads_lose_nothing(open_usage):
    usage = open_usage(0)

    def work() -> None:
        for _ in range(50):
            assert usage.reserve(10, None, _no_room) is None
            usage.commit(10, 3)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert usage.used() == 4 * 50 * 3


# -- who counts --------------------------------------------------------------------------------------------------------


def test_who_comes_first_counts_and_who_joins_does_not(open_usage):
    first = open_usage()
    assert first.in_doubt()
    assert first.walk(12345)
    assert open_usage().used() == 12345
    assert not first.in_doubt()


def test_after_the_last_one_has_gone_the_next_one_counts_again(open_usage):
    """After a power loss an old account may be back; pages may have been removed by hand."""
    first = open_usage(500)
    second = open_usage()
    first.close()
    third = open_usage()
    assert not third.in_doubt(), "its line of users was never interrupted"
    second.close()
    third.close()
    assert open_usage().in_doubt()


def test_a_count_whose_process_was_killed_is_made_by_another(open_usage):
    first, second = open_usage(), open_usage()

    def killed() -> Iterator[tuple[float, int]]:
        yield 0.5, 100
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        first.count(killed())
    first.leave()
    assert second.in_doubt()
    assert second.walk(300)
    assert second.used() == 300 and not second.in_doubt()


def test_a_count_that_ends_early_changes_nothing_and_is_still_to_be_made(open_usage):
    usage = open_usage(1000)
    assert not usage.count([(0.25, 10), (0.5, 10)])
    assert usage.used() == 1000 and usage.in_doubt()


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    begin=st.integers(0, 256),
    writes=st.lists(st.tuples(st.integers(0, 255), st.integers(-2560, 2560)), max_size=5),
)
def test_what_comes_and_goes_while_somebody_counts_is_counted_once(tmp_path_factory, begin, writes):
    """Pages come and go in all parts alike: the walk meets them only in the parts it has not yet been to."""
    usage = Account(tmp_path_factory.mktemp("tier"))
    parts = [1_000_000.0] * 256
    assert usage.walk(*map(int, parts))
    usage.commit(0, begin)

    def walk() -> Iterator[tuple[float, int]]:
        for number in range(256):
            for at, amount in writes:
                if at == number:
                    parts[:] = [part + amount / 256 for part in parts]
                    usage.commit(0, amount)
            yield (number + 1) / 256, round(parts[number])

    assert usage.count(walk())
    assert abs(usage.used() - sum(parts)) <= 256
    usage.close()


def test_a_reservation_that_ends_amid_a_count_is_counted_once(open_usage):
    usage, other = open_usage(), open_usage()
    assert other.reserve(500, None, _no_room) is None

    def walk() -> Iterator[tuple[float, int]]:
        yield 0.5, 100
        other.commit(500, 300)
        # Written since the count began: its half of it is met, the other half was walked before.
        yield 1.0, 100 + 150

    assert usage.count(walk())
    # Half of the change is met within the second part: on average it was walked to three quarters.
    assert usage.used() == 350 + 300 * 3 // 4
    assert not other.in_doubt()


def test_a_tree_that_was_taken_away_amid_a_count_makes_it_be_repeated(open_usage):
    """Its files go from sight at once, and from the account when they are deleted."""
    usage = open_usage(1000)
    with usage.detaching() as removal:
        assert usage.walk(400)
        removal.freed = 600
    assert usage.in_doubt()
    with usage.detaching() as removal:
        removal.freed = 10
    assert usage.walk(400) and not usage.in_doubt()
    with usage.detaching() as removal:
        removal.freed = 10
    assert not usage.in_doubt() and usage.used() == 390


# -- damage ------------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    damaged=st.one_of(
        st.binary(max_size=60),
        st.sampled_from(
            [
                b'{"stored": 5, "under_way": {}, "recount": false}\n',
                b'00000000 {"stored": 5, "under_way": {}, "recount": false}\n',
                *map(
                    _sealed,
                    [
                        b'{"stored": 1e999, "under_way": {}, "recount": false}',
                        b'{"stored": NaN, "under_way": {}, "recount": false}',
                        b'{"stored": "five", "under_way": {}, "recount": false}',
                        b'{"stored": 5, "under_way": {"a": [5, 0.0]}, "recount": false}',
                        b'{"stored": 5, "under_way": {"1": 3}, "recount": false}',
                        b'{"stored": 5, "under_way": [], "recount": false}',
                        b'{"stored": 1%b, "under_way": {}, "recount": false}' % (b"0" * 400),
                        b'{"stored": 5, "under_way": {"1": [-7, 0.0]}, "recount": false}',
                        b'{"stored": 5, "under_way": {"1": [7, NaN]}, "recount": false}',
                        b"[" * 100_000,
                        b"null",
                    ],
                ),
            ]
        ),
    )
)
def test_a_damaged_account_is_replaced_by_a_count(tmp_path, damaged):
    (tmp_path / "usage").write_bytes(damaged)
    usage = Account(tmp_path)
    assert usage.in_doubt()
    assert usage.walk(4242)
    assert usage.used() == 4242 and not usage.in_doubt()
    usage.close()
    assert _record_on_disk(tmp_path)["stored"] == 4242


def test_no_changed_byte_of_the_account_is_believed(tmp_path, open_usage):
    usage = open_usage(123456)
    assert usage.reserve(500, None, _no_room) is None
    whole = (tmp_path / "usage").read_bytes()
    length = whole.index(b"\n")
    for place in range(length):
        changed = bytearray(whole)
        changed[place] ^= 1 << place % 7
        (tmp_path / "usage").write_bytes(changed)
        with usage.locked() as record:
            assert not record.counted or record.stored == 123456, chr(whole[place])


def test_while_nobody_knows_what_is_stored_as_much_goes_as_comes(tmp_path, open_usage):
    """The capacity holds, and the cache is not emptied."""
    usage = open_usage(700)
    (tmp_path / "usage").write_bytes(b"")
    assert usage.used(1000) == 1000
    asked: list[int] = []
    for amount in (100, 50, 60):
        assert usage.reserve(amount, 1000, lambda need: asked.append(need) or need) is None
        usage.commit(amount, amount)
    assert asked == [100, 50, 60]
    assert usage.used(1000) == 1000
    assert usage.walk(700)
    assert usage.used(1000) == 700


def test_of_a_file_that_had_grown_and_is_gone_only_as_much_goes_as_comes_until_somebody_counts(open_usage):
    usage = open_usage(9000)
    with usage.removing() as removal:
        removal.freed, removal.uncertain = 100, True
    asked: list[int] = []
    assert usage.reserve(50, 1000, lambda need: asked.append(need) or need) is None
    usage.commit(50, 50)
    assert asked == [50]
    while usage.in_doubt():
        usage.walk(700)
    assert usage.used(1000) == 700


def test_what_is_under_way_survives_the_loss_of_the_account(tmp_path, open_usage):
    first, second = open_usage(0), open_usage()
    assert first.reserve(300, 1000, _no_room) is None
    (tmp_path / "usage").write_bytes(b"")
    assert first.reserve(1, None, _no_room) is None
    assert second.walk(0)
    assert second.used() == 301


def test_a_removed_account_is_made_anew_for_all(tmp_path, open_usage):
    first, second = open_usage(700), open_usage()
    (tmp_path / "usage").unlink()
    first.commit(0, 100)
    second.commit(0, 10)
    assert first.walk(700)
    assert second.used() == first.used() == 700


# -- a process that is stopped -----------------------------------------------------------------------------------------


@pytest.fixture
def held(tmp_path):
    """The account is held by somebody who does nothing."""
    fd = os.open(tmp_path / "usage", os.O_RDWR | os.O_CREAT)
    assert try_lock_byte(fd, 0)
    yield fd
    os.close(fd)


def test_an_account_that_is_held_cannot_be_opened(tmp_path, held):
    with pytest.raises(TimeoutError, match="another process has held"):
        Account(tmp_path)


def test_what_could_not_be_told_to_the_account_is_told_later(tmp_path, open_usage, caplog):
    usage, other = open_usage(1000), open_usage()
    assert usage.reserve(300, None, _no_room) is None
    fd = os.open(tmp_path / "usage", os.O_RDWR)
    assert try_lock_byte(fd, 0)
    usage.commit(300, 200)
    with usage.removing() as removal:
        removal.freed = 50
        removal.uncertain = True
    assert usage.reserve(1, None, _no_room) == HELD
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "is not stored" not in caplog.text and "nothing is stored until it goes on" in caplog.text
    assert other.used() == 1300
    os.close(fd)
    assert not other.in_doubt()
    usage.commit(0, 0)
    assert other.used() == 1150 and other.in_doubt()


def test_somebody_stopped_amid_an_eviction_does_not_keep_others_from_the_room_there_is(open_usage, monkeypatch):
    first, second = open_usage(900), open_usage()
    done = threading.Event()
    begun = threading.Event()

    def evict(need: int) -> int:
        begun.set()
        done.wait(60)
        return need

    thread = threading.Thread(target=first.reserve, args=(200, 1000, evict))
    thread.start()
    begun.wait(60)
    # The room that the first one waits for is taken; what is there beyond it can be had.
    assert second.reserve(100, 1000, _in_vain) == HELD
    assert second.reserve(100, 1300, _in_vain) is None
    done.set()
    thread.join(60)

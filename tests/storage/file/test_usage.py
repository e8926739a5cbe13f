"""The account that all processes of a directory share."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hicache_ext.runtime.liveness import writer_alive, writer_name
from hicache_ext.storage.tiers.file.usage import UnderWay, Usage

_SPAWN = multiprocessing.get_context("spawn")


def _no_room(need: int) -> int:
    return 0


@pytest.fixture
def open_usage(tmp_path):
    opened: list[Usage] = []

    def open_one(walked: int = 0) -> Usage:
        opened.append(Usage(tmp_path / "usage", lambda _: walked))
        return opened[-1]

    yield open_one
    for usage in opened:
        usage.close()


def _dead_writer() -> str:
    """The name of a process that is not there any more."""
    process = _SPAWN.Process(target=time.sleep, args=(60,))
    process.start()
    name = writer_name(process.pid)
    process.kill()
    process.join()
    return name


def test_a_new_account_starts_with_what_a_walk_finds(open_usage):
    assert open_usage(walked=12345).total() == 12345


def test_reserved_bytes_count_until_they_are_committed(open_usage):
    usage = open_usage()
    assert usage.reserve(1000, None, _no_room)
    assert usage.total() == 1000
    usage.commit(1000, 300)
    assert usage.total() == 300


def test_a_reservation_beyond_the_capacity_is_refused_and_leaves_no_trace(open_usage):
    usage = open_usage(walked=600)
    assert not usage.reserve(500, 1000, _no_room)
    assert usage.total() == 600
    assert usage.reserve(400, 1000, _no_room)


def test_room_is_asked_for_exactly_what_is_missing(open_usage):
    usage = open_usage(walked=900)
    asked: list[int] = []

    def evict(need: int) -> int:
        asked.append(need)
        return 350

    assert usage.reserve(400, 1000, evict)
    assert asked == [300]
    assert usage.total() == 900 - 350 + 400


@pytest.mark.parametrize("amount", [1001, 10**9])
def test_no_page_is_evicted_for_a_reservation_that_can_never_fit(open_usage, amount):
    usage = open_usage(walked=900)
    assert not usage.reserve(amount, 1000, lambda need: pytest.fail("evicted in vain"))


def test_no_page_is_evicted_for_room_that_others_have_reserved(open_usage):
    usage = open_usage(walked=100)
    assert usage.reserve(800, 1000, _no_room)
    assert not usage.reserve(300, 1000, lambda need: pytest.fail("evicted in vain"))


def test_removals_are_accounted_when_they_end_also_by_an_exception(open_usage):
    usage = open_usage(walked=1000)

    def fail_half_way():
        with usage.removing() as removal:
            removal.freed = 400
            raise PermissionError("halfway")

    with pytest.raises(PermissionError):
        fail_half_way()
    assert usage.total() == 600


def test_what_a_dead_writer_had_reserved_counts_as_stored_and_the_next_start_recounts(open_usage):
    usage = open_usage(walked=100)
    with usage.locked() as record:
        record.under_way[_dead_writer()] = UnderWay(1, 500, time.time())
    assert usage.total() == 600
    asked: list[int] = []
    assert usage.reserve(700, 1200, lambda need: asked.append(need) or need)
    assert asked == [100]
    assert usage.total() == 1200
    with usage.locked() as record:
        assert record.recount and list(record.under_way) == [writer_name()]
    usage.commit(700, 0)
    usage.close()
    assert open_usage(walked=77).total() == 77


def test_an_eviction_is_on_record_before_its_first_file_goes(tmp_path, open_usage):
    """Killed amid it, the account must be known to be off."""
    usage = open_usage(walked=900)
    on_disk: list[dict] = []

    def evict(need: int) -> int:
        on_disk.append(json.loads((tmp_path / "usage").read_bytes().partition(b"\n")[0]))
        return need

    assert usage.reserve(400, 1000, evict)
    assert list(on_disk[0]["under_way"]) == [writer_name()]


def test_a_dead_writer_without_reservations_is_a_reason_to_recount_too(open_usage):
    """Killed between removing a file and telling the account."""
    usage = open_usage(walked=100)
    with usage.locked() as record:
        record.under_way[_dead_writer()] = UnderWay(1, 0, time.time())
    assert open_usage(walked=40).total() == 40


def test_no_recount_beside_operations_under_way(open_usage):
    """The walk would find what they have published, and they would report it once more."""
    first = open_usage(walked=100)
    assert first.reserve(500, None, _no_room)
    with first.locked() as record:
        record.recount = True
    second = open_usage(walked=100 + 500)
    first.commit(500, 500)
    assert second.total() == 600
    assert open_usage(walked=600).total() == 600


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    damaged=st.one_of(
        st.binary(max_size=60),
        st.sampled_from(
            [
                b'{"stored": 1e999, "under_way": {}, "recount": false}\n',
                b'{"stored": NaN, "under_way": {}, "recount": false}\n',
                b'{"stored": 5, "under_way": {"a": 3}, "recount": false}\n',
                b'{"stored": 5, "under_way": [], "recount": false}\n',
                b'{"stored": 5, "reserved": {}, "recount": false}\n',
                b"[" * 100_000 + b"\n",
                b"null\n",
            ]
        ),
    )
)
def test_a_damaged_account_is_replaced_by_a_walk(tmp_path, damaged):
    (tmp_path / "usage").write_bytes(damaged)
    usage = Usage(tmp_path / "usage", lambda _: 4242)
    assert usage.total() == 4242
    usage.close()
    assert json.loads((tmp_path / "usage").read_bytes().partition(b"\n")[0])["stored"] == 4242


def test_many_threads_lose_nothing(open_usage):
    usage = open_usage()

    def work() -> None:
        for _ in range(50):
            assert usage.reserve(10, None, _no_room)
            usage.commit(10, 3)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert usage.total() == 4 * 50 * 3


def test_this_process_is_alive_and_a_killed_one_is_not():
    assert writer_alive(writer_name(), time.time())
    assert not writer_alive(_dead_writer(), time.time())


def test_a_process_is_alive_while_a_thread_of_it_is_at_work_though_its_first_one_has_ended():
    """A killed writer: its first thread was gone, another one still inside a write to a slot that was given away."""
    program = (
        "import ctypes, threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "print('ready', flush=True)\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            name = writer_name(process.pid)
            state = Path(f"/proc/{process.pid}/stat")
            deadline = time.monotonic() + 30
            while ") Z " not in state.read_text() and time.monotonic() < deadline:
                time.sleep(0.01)
            assert ") Z " in state.read_text()
            assert writer_alive(name, time.time())
        finally:
            process.kill()
    assert not writer_alive(name, time.time())


def test_a_zombie_is_dead():
    process = _SPAWN.Process(target=time.sleep, args=(60,))
    process.start()
    name = writer_name(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while writer_alive(name, time.time()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not writer_alive(name, time.time()), "still counted as alive before its parent has waited for it"
    process.join()


def test_a_recycled_pid_is_another_writer():
    host, pid, start = writer_name().rsplit(":", 2)
    assert not writer_alive(f"{host}:{pid}:{int(start) + 1}", time.time())


def test_a_writer_of_another_machine_is_dead_after_ten_silent_minutes():
    assert writer_alive("elsewhere:1:1", time.time() - 500)
    assert not writer_alive("elsewhere:1:1", time.time() - 700)


@pytest.mark.parametrize("name", ["", "x", "a:b", "a:b:c", "::"])
def test_a_name_that_is_none_is_dead(name):
    assert not writer_alive(name, 0.0)

"""The thread pool: pieces of a call, calls that take turns, calls that are left behind."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from hicache_ext.runtime.threads import Call, ThreadPool, call_within


@pytest.fixture
def workers():
    workers = ThreadPool("test", 2)
    yield workers
    workers.close()


def test_an_interrupted_call_ends_only_when_all_of_its_work_has(workers: ThreadPool) -> None:
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


def test_a_piece_that_raises_is_raised_once_all_have_ended(workers: ThreadPool) -> None:
    ended: list[int] = []

    def work(piece: int) -> None:
        if piece == 0:
            raise ValueError
        time.sleep(0.05)
        ended.append(piece)

    with pytest.raises(ValueError):  # noqa: PT011
        workers.run(4, work)
    assert sorted(ended) == [1, 2, 3]


# -- calls that take turns ---------------------------------------------------------------------------------------------

PATIENCE = 30.0


def test_a_shared_call_answers_in_order(workers: ThreadPool) -> None:
    assert workers.share(50, lambda position, call: 2 * position, PATIENCE) == ([2 * i for i in range(50)], True)
    assert workers.share(0, lambda position, call: position, PATIENCE) == ([], True)


def test_what_a_shared_call_raises_leaves_a_gap_and_a_line_in_the_log(
    workers: ThreadPool, caplog: pytest.LogCaptureFixture
) -> None:
    def work(position: int, call: Call[int]) -> int:
        if position == 1:
            raise SystemExit("a panic inside a client library")
        return position

    assert workers.share(3, work, PATIENCE) == ([0, None, 2], True)
    assert "a panic inside a client library" in caplog.text
    assert workers.share(2, lambda position, call: position, PATIENCE) == ([0, 1], True)


def test_a_caller_leaves_at_its_deadline_and_its_memory_is_touched_no_more(workers: ThreadPool) -> None:
    go_on, touched, begun = threading.Event(), [], []

    def work(position: int, call: Call[int]) -> int:
        begun.append(position)
        go_on.wait(PATIENCE)
        with call.memory() as ours:
            if ours:
                touched.append(position)
        return position

    results, done = workers.share(10, work, 0.05)
    assert results == [None] * 10 and not done
    go_on.set()
    assert workers.share(2, lambda position, call: position, PATIENCE) == ([0, 1], True)
    assert len(begun) == 2 and not touched and results == [None] * 10


def test_of_a_call_that_was_left_nothing_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ThreadPool("one", 1)
    begun: list[int] = []
    go_on = threading.Event()

    def work(position: int, call: Call[None]) -> None:
        begun.append(position)
        go_on.wait(30)

    stop = Call.stop

    def stop_late(call: Call[None], end: int = 0) -> None:
        # The caller has left, and loses the processor.
        go_on.set()
        time.sleep(0.1)
        stop(call, end)

    monkeypatch.setattr(Call, "stop", stop_late)
    assert pool.share(2, work, 0.1) == ([None, None], False)
    go_on.set()
    pool.close()
    assert begun == [0]


def test_a_caller_waits_for_a_copy_in_its_memory(workers: ThreadPool) -> None:

    def work(position: int, call: Call[int]) -> int:
        with call.memory():
            time.sleep(0.2)
            copied.append(position)
        return position

    copied: list[int] = []
    _, done = workers.share(1, work, 0.1)
    assert not done and copied == [0]


def test_calls_under_way_take_turns() -> None:
    pool = ThreadPool("test", 1)
    order: list[str] = []
    both = threading.Event()

    def work(name: str) -> None:
        def one(position: int, call: Call[None]) -> None:
            assert both.wait(PATIENCE)
            order.append(name)

        pool.share(4, one, PATIENCE)

    callers = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for caller in callers:
        caller.start()
    while pool._jobs.qsize() < 1:  # one has begun, the other waits
        time.sleep(0.001)
    both.set()
    for caller in callers:
        caller.join(PATIENCE)
    pool.close()
    assert "".join(order) in ("abababab", "babababa")


def test_a_stopped_call_begins_no_more(workers: ThreadPool) -> None:
    begun: list[int] = []

    def work(position: int, call: Call[int]) -> int:
        begun.append(position)
        call.stop()
        return position

    _, done = workers.share(1000, work, PATIENCE)
    assert done and len(begun) <= 3


# -- calls that are left behind ----------------------------------------------------------------------------------------


@pytest.fixture
def growing():
    pool = ThreadPool("test")
    yield pool
    assert pool.close(PATIENCE) == 0


def test_a_call_in_time_answers_or_raises(growing: ThreadPool) -> None:
    call = growing.start(lambda: 7)
    assert call.ended_within(PATIENCE) and call.result() == 7
    failing = growing.start(lambda: 1 // 0)
    assert failing.ended_within(PATIENCE)
    with pytest.raises(ZeroDivisionError):
        failing.result()


def test_a_call_left_behind_goes_on_and_tells_once_when_it_has_ended(growing: ThreadPool) -> None:
    go_on, late, ended = threading.Event(), [], threading.Event()

    def end_late() -> None:
        late.append(None)
        ended.set()

    call = growing.start(lambda: go_on.wait(PATIENCE), end_late)
    assert not call.ended_within(0.02) and not late
    go_on.set()
    assert ended.wait(PATIENCE) and len(late) == 1
    in_time = growing.start(lambda: None, end_late)
    assert in_time.ended_within(PATIENCE)
    assert len(late) == 1


def test_a_pool_that_grows_has_a_thread_for_each_call_and_keeps_some(growing: ThreadPool) -> None:
    go_on = threading.Event()
    calls = [growing.start(lambda: go_on.wait(PATIENCE)) for _ in range(20)]
    assert len(growing._threads) == 20
    go_on.set()
    assert all(call.ended_within(PATIENCE) for call in calls)
    deadline = time.monotonic() + PATIENCE
    while len(growing._threads) > 8 and time.monotonic() < deadline:
        time.sleep(0.005)
    assert len(growing._threads) == 8


def test_a_closed_pool_begins_nothing_and_says_what_hangs() -> None:
    pool, go_on = ThreadPool("test"), threading.Event()
    pool.start(lambda: go_on.wait(PATIENCE))
    assert pool.close(0.02) == 1
    with pytest.raises(RuntimeError):
        pool.start(lambda: None)
    go_on.set()
    assert pool.close(PATIENCE) == 0


def test_one_call_within_a_time_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    call = call_within(PATIENCE, "test-once", lambda: 7)
    assert call is not None and call.result() == 7
    go_on, late = threading.Event(), threading.Event()
    assert call_within(0.02, "test-once", lambda: go_on.wait(PATIENCE), late.set) is None
    go_on.set()
    assert late.wait(PATIENCE)
    deadline = time.monotonic() + PATIENCE
    while not set(threading.enumerate()) <= before and time.monotonic() < deadline:
        time.sleep(0.005)
    assert set(threading.enumerate()) <= before

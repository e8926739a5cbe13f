"""Every promise of ``storage/contract/store.py`` as a test. For any PageStore, bare or wrapped.

A store's test file:

    class MyMedium(Medium):
        type = "mine"
        shared = False
        ...  # open, open_elsewhere, read, write, keys, failing, full


    class TestMyStore(PageStoreTests):
        @pytest.fixture
        def medium(self, tmp_path):
            return MyMedium(tmp_path)

``Medium`` says what each of its parts is for. docs/write-a-tier.md shows how to use it.
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import random
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import pytest

from hicache_ext.errors import StoreClosedError
from hicache_ext.page.envelope import page_seal
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.storage.contract.abilities import RemovesCopies
from hicache_ext.storage.contract.base import TierStore
from hicache_ext.storage.contract.store import GetResult, PageBatch, PageStore, SetResult
from hicache_ext.testing.conformance.medium import Medium
from hicache_ext.testing.conformance.one_store import PageStoreCases
from hicache_ext.testing.conformance.pages import (
    IDENTITY,
    OTHER_IDENTITY,
    HostPages,
    assert_hits,
    assert_pages,
    assert_whole,
    cut,
    page_key,
    page_keys,
    payload_of,
    read_pages,
    settle,
    store_pages,
)

_LARGE = 8_000_000
_IN_THE_WAY = 1.0
"""Seconds after which another store that has not written is taken to wait for a lock of the reader."""

_WAYS: dict[str, Callable[[PageStore, list[bytes]], int]] = {
    "remove": lambda store, keys: store.remove(keys),
    "clear": lambda store, keys: store.clear([IDENTITY]) * len(keys),
    "clear of everything": lambda store, keys: store.clear(None) * len(keys),
}

_KILLS = 3
_BATCHES = 2
"""Batches that a writer completes before it is killed in the next one."""
_SIZES = (60_000, 70_000)


class PageStoreTests(PageStoreCases):
    """Inherit and override the fixture ``medium``. Here are the cases of several threads, stores and processes."""

    # -- several threads, and the end of a store -----------------------------------------------------------------------

    def test_eight_threads_use_one_store(self, store: PageStore) -> None:
        keys = page_keys(60)

        def use(seed: int) -> None:
            chance = random.Random(seed)
            for _ in range(12):
                chosen = chance.sample(keys, 8)
                assert all(result.durable for result in store_pages(store, chosen, [3000, 1000]))
                assert_hits(store, chosen, [3000, 1000])
                asked = chance.sample(keys, 20)
                assert set(assert_whole(store, asked, [3000, 1000])) <= {GetResult.HIT, GetResult.MISS}
                store.count_leading(asked)

        self.in_threads(*[partial(use, seed) for seed in range(8)])

    def test_batches_written_at_once_lose_no_page(self, store: PageStore, medium: Medium) -> None:
        """Each of four threads writes pages of its own and some that all write, every thread other bytes."""
        common = page_keys(10, "common")
        wrote: dict[bytes, set[int]] = {}
        begin = threading.Barrier(4)

        def write(fill: int) -> None:
            own = page_keys(10, f"own-{fill}")
            keys = own + common if fill % 2 else common + own
            pages = HostPages([[3000]] * 20, fill=fill)
            begin.wait(self.patience)
            results = store.set(PageBatch(keys, pages.buffers))
            assert all(result.durable for result in results), results
            for key, result in zip(keys, results, strict=True):
                if result is SetResult.STORED:
                    wrote.setdefault(key, set()).add(fill)

        self.in_threads(*[partial(write, fill) for fill in range(1, 5)])
        if medium.writes_later:
            settle(store)
        keys = common + [key for fill in range(1, 5) for key in page_keys(10, f"own-{fill}")]
        results, payloads = read_pages(store, keys, [3000])
        assert results == [GetResult.HIT] * 50
        for key, payload in zip(keys, payloads, strict=True):
            assert len(set(payload)) == 1 and payload[0] in wrote[key], "not the bytes of one that answered STORED"
        settle(store)
        assert_pages(store, keys, payloads, [3000])  # nothing changes once it is stored

    def test_pages_are_whole_while_they_are_removed_and_written_again(self, store: PageStore) -> None:
        keys = page_keys(4)
        stop = threading.Event()

        def churn() -> None:
            while not stop.is_set():
                results = store_pages(store, keys, [2000])
                # A write that meets the removal of what it stands on is no error.
                assert SetResult.ERROR not in results and SetResult.TIMEOUT not in results
                store.remove(keys[:2])
                store.clear([IDENTITY])

        def read() -> None:
            try:
                for _ in range(60):
                    assert set(assert_whole(store, keys, [2000])) <= {GetResult.HIT, GetResult.MISS}
            finally:
                stop.set()

        self.in_threads(churn, churn, read)
        assert self.count(store, "error") == 0

    def test_close_waits_for_calls_under_way(self, store: PageStore) -> None:
        keys, closed = page_keys(16), threading.Event()
        store_pages(store, keys, [20_000])
        problems: list[str] = []
        memory = HostPages([[20_000]] * 16)

        def use() -> None:
            with suppress(StoreClosedError):
                while True:
                    store_pages(store, keys, [20_000])
                    read_pages(store, keys, [20_000])

        def read_into_one_memory() -> None:
            with suppress(StoreClosedError):
                while True:
                    late = closed.is_set()
                    store.get(PageBatch(keys, memory.buffers))
                    if late:
                        problems.append("a call after close() was answered")
                        return

        def close() -> None:
            time.sleep(0.05)
            store.close()
            closed.set()

        self.in_threads(use, use, read_into_one_memory, close)
        assert problems == []

    def test_a_closed_store_refuses_calls_and_may_be_closed_again(self, store: PageStore) -> None:
        keys = page_keys(1)
        store_pages(store, keys)
        before = store.describe()
        store.close()
        store.close()
        after = store.describe()
        assert (after.name, after.type, after.shared) == (before.name, before.type, before.shared)
        calls: list[Callable[[], object]] = [
            lambda: read_pages(store, keys),
            lambda: store_pages(store, keys),
            lambda: store.contains(keys),
            lambda: store.count_leading(keys),
            lambda: store.remove(keys),
            lambda: store.clear([IDENTITY]),
        ]
        for call in calls:
            with pytest.raises(StoreClosedError):
                call()

    def test_close_leaves_no_thread_behind(self, threads_before: set[threading.Thread], store: PageStore) -> None:
        keys = page_keys(64)
        store_pages(store, keys)
        assert_hits(store, keys)
        store.clear([IDENTITY])
        store.close()
        assert [thread.name for thread in threading.enumerate() if thread not in threads_before] == []

    def test_close_leaves_no_open_file_behind(self, store: PageStore, medium: Medium) -> None:
        def open_stores(stores: int) -> None:
            for _ in range(stores):
                another = medium.open()
                store_pages(another, page_keys(40))
                assert_hits(another, page_keys(40))
                another.clear([IDENTITY])
                another.close()

        def files_open() -> int:
            # A client library closes its connections when the last reference to it goes, in a thread of its own.
            gc.collect()
            return len(os.listdir("/proc/self/fd"))

        open_stores(2)  # what is opened once in a process may stay
        first = files_open()
        open_stores(7)
        deadline = time.monotonic() + 30
        while (more := files_open() - first) >= 7:
            assert time.monotonic() < deadline, f"{more} more open files after 7 more stores"
            time.sleep(0.05)

    def test_calls_leave_no_file_open(self, store: PageStore) -> None:
        def files_open_after_calls(name: str) -> int:
            keys = page_keys(100, name)
            for begin in range(0, 100, 5):
                store_pages(store, keys[begin : begin + 5])
                assert_hits(store, keys[begin : begin + 5])
                store.contains(keys)
            store.remove(keys)
            return len(os.listdir("/proc/self/fd"))

        counts = [files_open_after_calls(f"round {number}") for number in range(3)]
        assert counts[-1] - counts[0] < 50, f"open files: {counts}"

    @pytest.fixture
    def threads_before(self) -> set[threading.Thread]:
        return set(threading.enumerate())

    def test_pages_outlive_the_store(self, store: PageStore, medium: Medium) -> None:
        keys = page_keys(30)
        store_pages(store, keys)
        store.close()
        with closing(medium.open()) as again:
            assert again.contains(keys) == [True] * 30
            assert_hits(again, keys)
            assert medium.writes_later or store_pages(again, keys[:3]) == [SetResult.EXISTS] * 3

    # -- several stores: none works on what it remembers alone ---------------------------------------------------------

    @pytest.fixture
    def other(self, store: PageStore, medium: Medium) -> Iterator[PageStore]:
        """A store that was opened over the medium while it was empty. It is closed before ``store``."""
        with closing(medium.open()) as other:
            yield other

    @pytest.mark.parametrize("way", list(_WAYS))
    def test_what_another_store_takes_away_is_gone(self, store: PageStore, other: PageStore, way: str) -> None:
        """Whatever the first one remembers of pages that it wrote, read and asked for."""
        keys = page_keys(12)
        for _ in range(2):
            assert store_pages(store, keys) == [SetResult.STORED] * 12
            settle(store)
            assert_hits(store, keys)
            assert store.contains(keys) == [True] * 12
            assert _WAYS[way](other, keys) == 12, "the other store has not seen the pages"
            settle(other)
            assert store.contains(keys) == [False] * 12
            assert store.count_leading(keys) == 0
            assert read_pages(store, keys)[0] == [GetResult.MISS] * 12
        assert store_pages(store, keys) == [SetResult.STORED] * 12
        settle(store)
        assert_hits(other, keys)

    def test_clear_of_everything_takes_identities_that_another_store_brought(
        self, store: PageStore, other: PageStore, medium: Medium
    ) -> None:
        keys = page_keys(5) + page_keys(5, identity=OTHER_IDENTITY)
        store_pages(store, keys)
        settle(store)
        assert other.clear(None) == (2 if medium.counts_all_identities else 1)
        settle(other)
        for each in (store, other):
            assert read_pages(each, keys)[0] == [GetResult.MISS] * 10

    def test_a_page_is_absent_until_it_is_whole(self, store: PageStore, other: PageStore, medium: Medium) -> None:
        """What a concurrent reader sees is what a kill -9 would leave."""
        sizes = cut(min(_LARGE, medium.largest_page), 2)
        for number in range(4):
            key = page_key(f"large {number}")
            seen: set[GetResult] = set()
            written = threading.Event()

            def read(key: bytes = key, seen: set[GetResult] = seen, written: threading.Event = written) -> None:
                last = False
                while not last:
                    last = written.is_set()
                    seen.update(assert_whole(other, [key], sizes))
                    # On a busy machine a reader without a pause keeps the writer from Python for minutes.
                    time.sleep(0.001)

            def write(key: bytes = key, written: threading.Event = written) -> None:
                try:
                    # EXISTS: the reader found it in an outer tier, and brought it to the inner one first.
                    assert store_pages(store, [key], sizes)[0] in (SetResult.STORED, SetResult.EXISTS)
                    settle(store)
                finally:
                    written.set()

            self.in_threads(read, write)
            assert seen <= {GetResult.MISS, GetResult.HIT}
            assert_hits(store, [key], sizes)

    @pytest.mark.parametrize("bad", [b"?", b"??"], ids=["of the same length", "of another length"])
    def test_a_good_copy_that_replaced_a_bad_one_stays(
        self, store: PageStore, other: PageStore, medium: Medium, monkeypatch: pytest.MonkeyPatch, bad: bytes
    ) -> None:
        """Between the read of a bad copy and its removal another store may have taken it away and written a good one:
        a reader that removes by name takes that one. It is counted in between, which is where the other store comes
        in here; one that has to wait for the reader comes afterwards."""
        keys = page_keys(3)
        store_pages(store, keys)
        settle(store)
        for key in keys:
            medium.write(key, (medium.read(key) or b"")[:-1] + bad)
        writers: list[threading.Thread] = []
        replaced: list[list[SetResult]] = []

        def replace() -> None:
            other.remove(keys)
            replaced.append(store_pages(other, keys))

        def then_replace(count: Callable[..., None]) -> Callable[..., None]:
            def add(metrics: TierMetrics, event: str, *amount: Any, **named: Any) -> None:
                count(metrics, event, *amount, **named)
                if event == "corrupt" and not writers:
                    writers.append(threading.Thread(target=replace, daemon=True))
                    writers[0].start()
                    writers[0].join(_IN_THE_WAY)

            return add

        for name in ("add", "add_many"):
            monkeypatch.setattr(TierMetrics, name, then_replace(getattr(TierMetrics, name)))
        read_pages(store, keys)
        monkeypatch.undo()
        for writer in writers:
            writer.join(self.patience)
            assert not writer.is_alive(), "the other store hangs"
        assert writers, "the bad copies are not counted"
        assert len(replaced) == 1
        settle(other)
        settle(store)
        assert_hits(store, keys)

    def test_of_a_page_that_another_store_has_replaced_the_new_copy_stays(
        self, store: PageStore, other: PageStore
    ) -> None:
        """For stores that remove a page only if it is still the copy that was seen (``RemovesCopies``)."""
        compares = getattr(type(store), "_remove_copies", None) is not TierStore._remove_copies
        if not compares or not isinstance(store, RemovesCopies):
            pytest.skip("declared: it cannot compare copies; another case shows it")
        keys = page_keys(4)
        seen = {key: page_seal(key, 100, [memoryview(payload_of(key, 100))]) for key in keys}
        store_pages(store, keys, [100])
        settle(store)
        replaced = memoryview(bytearray(b"x" * 100))
        other.remove(keys[:2])
        settle(other)
        other.set(PageBatch(keys[:1], [[replaced]]))
        settle(other)
        # More where it does not know yet what the other one took away.
        assert store.remove_copies(seen) >= 2
        settle(store)
        results, payloads = read_pages(store, keys, [100])
        assert results == [GetResult.HIT] + [GetResult.MISS] * 3
        assert payloads[0] == replaced

    # -- several processes: what they see of each other, and kill -9 ---------------------------------------------------

    def test_processes_see_each_others_pages_exactly_if_declared(self, store: PageStore, medium: Medium) -> None:
        ours, theirs = page_keys(20), page_keys(20, "theirs")
        store_pages(store, ours, _SIZES)
        settle(store)
        with another_process(medium, partial(_look_and_store, ours, theirs), self.patience) as (_, hear):
            seen = hear()
        assert seen == [medium.between_processes] * 20
        assert store.contains(theirs) == seen
        assert store.count_leading(theirs) == sum(seen)
        assert_hits(store, theirs if medium.between_processes else [], _SIZES)

    @pytest.fixture
    def between_processes(self, medium: Medium) -> None:
        if not medium.between_processes:
            pytest.skip("declared: between_processes = False; another case shows it")

    @pytest.mark.usefixtures("between_processes")
    def test_pages_are_whole_or_absent_after_their_writer_was_killed(self, store: PageStore, medium: Medium) -> None:
        chance = random.Random(0)
        for kill in range(_KILLS):
            durable = self._killed_while_it_writes(medium, f"kill {kill}", chance)
            if not medium.writes_later:
                assert store.contains(durable) == [True] * len(durable), "STORED, and gone with its writer"
                assert_hits(store, durable, _SIZES)
            for batch in range(_BATCHES + 1):
                keys = _batch(f"kill {kill}", batch)
                present = store.contains(keys)
                there = [GetResult.HIT if known else GetResult.MISS for known in present]
                assert assert_whole(store, keys, _SIZES) == there
                self._store_as_soon_as_possible(store, medium, keys)
                assert_hits(store, keys, _SIZES)

    @pytest.mark.usefixtures("between_processes")
    def test_clear_holds_when_its_process_is_killed(self, store: PageStore, medium: Medium) -> None:
        keys, theirs = page_keys(20), page_keys(5, identity=OTHER_IDENTITY)
        store_pages(store, keys + theirs, _SIZES)
        settle(store)
        with another_process(medium, _clear_and_wait, self.patience) as (process, hear):
            assert hear() == 1
            process.kill()
        possible = {GetResult.MISS} if medium.clears_at_once else {GetResult.MISS, GetResult.HIT}
        assert set(assert_whole(store, keys, _SIZES)) <= possible, "a page from before clear() is back"
        assert all(result.durable for result in store_pages(store, keys, _SIZES))
        assert_hits(store, keys + theirs, _SIZES)

    def _store_as_soon_as_possible(self, store: PageStore, medium: Medium, keys: list[bytes]) -> None:
        end = time.monotonic() + medium.killed_writes_end_after
        results = store_pages(store, keys, _SIZES)
        while not all(result.durable for result in results):
            assert time.monotonic() < end, f"pages of a killed writer cannot be written: {results}"
            time.sleep(0.1)
            results = store_pages(store, keys, _SIZES)

    def _killed_while_it_writes(self, medium: Medium, name: str, chance: random.Random) -> list[bytes]:
        """The pages that a writer had stored by its own account when it was killed in the middle of a batch."""
        durable: list[bytes] = []
        with another_process(medium, partial(_write_batches, name), self.patience) as (process, hear):
            took = 0.0
            for _ in range(_BATCHES):
                begun = time.monotonic()
                durable += hear()
                took = time.monotonic() - begun
            time.sleep(took * chance.uniform(0.1, 0.9))
            process.kill()
        return durable


def _batch(name: str, number: int) -> list[bytes]:
    return page_keys(8, f"{name}-{number}")


def _look_and_store(theirs: list[bytes], ours: list[bytes], store: PageStore) -> Iterator[list[bool]]:
    """Return which of the other process's pages are present; those must be whole. Then ours are checked."""
    results = assert_whole(store, theirs, _SIZES)
    present = store.contains(theirs)
    assert [result is GetResult.HIT for result in results] == present
    assert all(result.durable for result in store_pages(store, ours, _SIZES))
    settle(store)
    yield present


def _clear_and_wait(store: PageStore) -> Iterator[int]:
    yield store.clear([IDENTITY])
    threading.Event().wait()


def _write_batches(name: str, store: PageStore) -> Iterator[list[bytes]]:
    """Write a batch after the other; never ends."""
    for number in itertools.count():
        keys = _batch(name, number)
        results = store_pages(store, keys, _SIZES)
        yield [key for key, result in zip(keys, results, strict=True) if result.durable]


# -- another process over the same medium ------------------------------------------------------------------------------

Work = Callable[[PageStore], Iterator[Any]]
"""The other process's work on its store: a module-level generator function."""


@contextmanager
def another_process(
    medium: Medium, work: Work, patience: float
) -> Iterator[tuple[multiprocessing.Process, Callable[[], Any]]]:
    """The process that does ``work``, and what answers the next of what it yields, or fails with its traceback. It is
    killed at the end if it still runs."""
    context: Any = multiprocessing.get_context(medium.start_method)
    if medium.start_method == "forkserver":
        # Imported once, not by every process. The server itself opens nothing and has one thread.
        context.set_forkserver_preload([__name__, type(medium).__module__])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(medium, work, theirs), daemon=True)
    process.start()
    theirs.close()

    def hear() -> Any:
        assert ours.poll(patience), f"the other process has not answered after {patience:g} s"
        try:
            done, answer = ours.recv()
        except EOFError:
            pytest.fail(f"the other process died; {type(medium).__name__} has to be one that can be pickled")
        assert done, f"in the other process:\n{answer}"
        return answer

    try:
        yield process, hear
    finally:
        process.join(1.0)
        process.kill()
        process.join(patience)
        ours.close()


def _run(medium: Medium, work: Work, connection: Connection) -> None:
    try:
        with closing(medium.open()) as store:
            for answer in work(store):
                connection.send((True, answer))
    except BaseException:  # noqa: BLE001 - reported by the test
        with suppress(OSError):
            connection.send((False, traceback.format_exc()))

"""What the base of a tier does for every tier: refuses after close, waits, counts, and answers for a medium that
raised."""

import errno
import threading

import pytest

from hicache_ext.errors import ClearLaterError, StoreClosedError, UnansweredError
from hicache_ext.storage.contract.store import GetResult, SetResult, StoreInfo
from hicache_ext.storage.tiers.memory import MemoryPageStore
from hicache_ext.testing.conformance.pages import IDENTITY, page_keys, read_pages, store_pages


class BrokenStore(MemoryPageStore):
    """Raises ``error`` from every hook while there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.error: BaseException | None = None
        self.hooks_called = 0
        self.closed = 0

    def _call(self, hook, *arguments):
        self.hooks_called += 1
        if self.error is not None:
            raise self.error
        return hook(*arguments)

    def _read(self, batch):
        return self._call(super()._read, batch)

    def _write(self, batch):
        return self._call(super()._write, batch)

    def _has(self, keys):
        return self._call(super()._has, keys)

    def _remove(self, keys):
        return self._call(super()._remove, keys)

    def _clear(self, digests):
        return self._call(super()._clear, digests)

    def _register(self, digest, document):
        return self._call(super()._register, digest, document)

    def _close(self):
        self.closed += 1


@pytest.mark.parametrize(
    ("error", "reason", "read", "written"),
    [
        (OSError(errno.EIO, "broken"), "EIO", GetResult.ERROR, SetResult.ERROR),
        (OSError("no number"), "unknown", GetResult.ERROR, SetResult.ERROR),
        (TimeoutError("late"), "timeout", GetResult.TIMEOUT, SetResult.TIMEOUT),
        (RuntimeError("a client library"), "raised", GetResult.ERROR, SetResult.ERROR),
    ],
)
def test_a_medium_that_raises_is_an_answer_for_every_page_and_a_count(error, reason, read, written):
    store, keys = BrokenStore(), page_keys(3)
    store_pages(store, keys[:1])
    store.error = error
    assert read_pages(store, keys)[0] == [read] * 3
    assert store_pages(store, keys) == [written] * 3
    assert store.metrics.value("error", reason) == 6
    assert store.metrics.value("get", read.value) == store.metrics.value("set", written.value) == 3
    assert store.contains(keys) == [False] * 3
    assert store.count_leading(keys) == store.remove(keys) == 0
    for cleared in ([IDENTITY], None):
        with pytest.raises(ClearLaterError):
            store.clear(cleared)
    store.register_identity(IDENTITY, {})
    assert store.metrics.value("error", reason) == 11
    store.error = None
    assert store.count_leading(keys) == 1


@pytest.mark.parametrize("answers", [2, 4])
def test_a_hook_with_too_few_or_too_many_answers_has_failed(answers):
    store, keys = MemoryPageStore(), page_keys(3)
    store._read = lambda batch: [GetResult.HIT] * answers
    store._write = lambda batch: [SetResult.STORED] * answers
    store._has = lambda keys: [True] * answers
    assert read_pages(store, keys)[0] == [GetResult.ERROR] * 3
    assert store_pages(store, keys) == [SetResult.ERROR] * 3
    assert store.contains(keys) == [False] * 3
    assert store.metrics.value("error", "raised") == 7


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_medium_that_is_full_rejects_pages_and_is_no_error(code):
    store, keys = BrokenStore(), page_keys(3)
    store.error = OSError(code, "full")
    assert store_pages(store, keys) == [SetResult.REJECTED] * 3
    assert store.metrics.value("rejected", "capacity") == 3
    assert store.metrics.total("error") == 0


def test_results_and_bytes_are_counted():
    store, keys = MemoryPageStore(), page_keys(3)
    store_pages(store, keys[:2], [700, 300])
    store_pages(store, keys[:1], [1000])
    read_pages(store, keys, [1000])
    assert store.metrics.snapshot() == {
        ("set", "stored"): 2,
        ("set", "exists"): 1,
        ("bytes", "set"): 2000,
        ("get", "hit"): 2,
        ("get", "miss"): 1,
        ("bytes", "get"): 2000,
    }


def test_no_hook_is_called_with_nothing_to_do():
    store = BrokenStore()
    assert read_pages(store, [])[0] == store_pages(store, []) == store.contains([]) == []
    assert store.count_leading([]) == store.remove([]) == store.clear([]) == 0
    assert store.hooks_called == 0 and store.metrics.snapshot() == {}


def test_a_key_that_is_removed_twice_in_one_call_was_there_once():
    store, keys = MemoryPageStore(), page_keys(2)
    store_pages(store, keys)
    assert store.remove([keys[0], keys[0]]) == 1
    assert store.clear([IDENTITY, IDENTITY]) == 1


def test_close_waits_for_calls_under_way_and_releases_once():
    store, keys = BrokenStore(), page_keys(1)
    inside, go_on, answers = threading.Event(), threading.Event(), []

    def held(batch):
        inside.set()
        go_on.wait(10)
        return [GetResult.MISS] * len(batch)

    store._read = held
    reader = threading.Thread(target=lambda: answers.append(read_pages(store, keys)[0]))
    reader.start()
    assert inside.wait(10)
    closer = threading.Thread(target=store.close)
    closer.start()
    closer.join(0.2)
    assert closer.is_alive() and store.closed == 0
    go_on.set()
    closer.join(10)
    reader.join(10)
    store.close()
    assert store.closed == 1 and answers == [[GetResult.MISS]]
    with pytest.raises(StoreClosedError):
        read_pages(store, [])
    store.register_identity(IDENTITY, {})


def test_a_leading_run_is_a_number_also_where_pages_could_not_be_asked_for():
    store, keys = MemoryPageStore(), page_keys(4)

    def has(keys):
        raise UnansweredError([True, True, False, True], 1, len(keys))

    store._has = has
    assert store.count_leading(keys) == 2 and store.contains(keys) == [True, True, False, True]


def lines_about_failing(caplog):
    return [line for record in caplog.records if " fails (" in (line := record.getMessage())]


def test_a_line_about_failing_calls_names_their_own_reason(caplog):
    store, keys = BrokenStore(), page_keys(1)
    store.error = OSError(errno.EIO, "broken")
    read_pages(store, keys)
    store.error = None
    store._read = lambda batch: [GetResult.TIMEOUT] * len(batch)
    for _ in range(3):
        read_pages(store, keys)
    (line,) = lines_about_failing(caplog)
    assert "every read fails (timeout)" in line


def test_a_full_tier_does_not_fail_whatever_happens_beside_it(caplog):
    store, keys = BrokenStore(), page_keys(1)

    def full(batch):
        # Another thread's read fails meanwhile.
        beside = threading.Thread(target=store.count_error, args=[OSError(errno.EIO, "broken")])
        beside.start()
        beside.join()
        return [SetResult.REJECTED] * len(batch)

    store._write = full
    for _ in range(5):
        store_pages(store, keys)
    assert not lines_about_failing(caplog) and store.metrics.levels()["failing", "write"] == 0.0


def test_a_tier_is_described_by_what_it_declares():
    class Pool(MemoryPageStore):
        type_name = "pool"

        def __init__(self):
            super().__init__("far")
            self.shared = True

    assert Pool().describe() == StoreInfo("far", "pool", True, {"pages": 0})

"""The PageStore suite against every store of this package, and against stores that are wrong, to see that it tells."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hicache_ext.storage.contract.store import PageBatch, SetResult
from hicache_ext.storage.tiering.tiered import TieredStore, TieringSettings
from hicache_ext.storage.tiering.write_behind import AsyncStore
from hicache_ext.storage.tiers.file.pages.directory import PageDirectory
from hicache_ext.storage.tiers.file.pages.store import PageFileStore
from hicache_ext.storage.tiers.memory import MemoryPageStore
from hicache_ext.testing.conformance.page_store import PageStoreTests
from hicache_ext.testing.conformance.pages import HostPages, assert_hits, page_keys, payload_of, store_pages
from hicache_ext.testing.conformance.second_reader import write_page_object
from hicache_ext.testing.faults import (
    DroppingStore,
    FailingStore,
    LyingStore,
    PageStoreWrapper,
    RaisingStore,
    SlowStore,
)
from tests.storage.raw_access import RawFiles, RawObjects

MIB = 1 << 20


class TestMemoryPageStore(PageStoreTests):
    @pytest.fixture
    def store(self):
        return MemoryPageStore()

    @pytest.fixture
    def raw(self, store):
        return RawObjects(store)

    @pytest.fixture
    def reopen(self, store):
        return lambda: MemoryPageStore(objects=store.objects)


class TestPageFileStore(PageStoreTests):
    capacity: int | None = None

    def open(self, directory):
        return PageFileStore("disk", directory, capacity=self.capacity)

    @pytest.fixture
    def store(self, tmp_path):
        store = self.open(tmp_path)
        yield store
        store.close()

    @pytest.fixture
    def raw(self, tmp_path):
        return RawFiles(tmp_path)

    @pytest.fixture
    def reopen(self, tmp_path):
        return lambda: self.open(tmp_path)


class TestPageFileStoreWithACapacity(TestPageFileStore):
    capacity = 128 * MIB


class TestPageFileStoreWithoutUnnamedFiles(TestPageFileStore):
    """As on NFS: temp name and rename instead of O_TMPFILE and linkat."""

    @pytest.fixture(autouse=True)
    def _no_unnamed_files(self, monkeypatch):
        monkeypatch.setattr(PageDirectory, "_supports_unnamed_files", lambda self: False)


class TestTieredStore(PageStoreTests):
    def open(self, directory):
        tiers = [PageFileStore(name, directory / name, capacity=None) for name in ("near", "far")]
        return TieredStore(tiers, tiers)

    @pytest.fixture
    def store(self, tmp_path):
        store = self.open(tmp_path)
        yield store
        store.close()

    @pytest.fixture
    def raw(self, tmp_path):
        return RawFiles(tmp_path / "near", tmp_path / "far")

    @pytest.fixture
    def reopen(self, tmp_path):
        return lambda: self.open(tmp_path)


class TestTieredStoreThatWritesTheFarTierInTheBackground(TestTieredStore):
    """Every page is written to the near tier first; with promotion and prefetch on."""

    def open(self, directory):
        tiers = [PageFileStore(name, directory / name, capacity=None) for name in ("near", "far")]
        settings = TieringSettings(async_tiers=frozenset({"far"}))
        return TieredStore(tiers, tiers, promote_to=tiers[0], settings=settings)

    @pytest.fixture
    def raw(self, store, tmp_path):
        class Settled(RawFiles):
            """Past the store, once it has written what it has in its queues."""

            def _files(self, key):
                assert store.wait_until_written(30)
                return super()._files(key)

        return Settled(tmp_path / "near", tmp_path / "far")


class TestAsyncStore(PageStoreTests):
    @pytest.fixture
    def store(self):
        store = AsyncStore(MemoryPageStore())
        yield store
        store.close()

    @pytest.fixture
    def raw(self, store):
        class Settled(RawObjects):
            def read(self, key):
                assert store.wait_until_written(30)
                return super().read(key)

            def write(self, key, stored):
                assert store.wait_until_written(30)
                super().write(key, stored)

            def keys(self):
                assert store.wait_until_written(30)
                return super().keys()

        return Settled(store.inner)

    @pytest.fixture
    def reopen(self, store):
        return lambda: MemoryPageStore(objects=store.inner.objects)

    def test_a_page_of_another_writer_is_a_hit(self, store, raw):
        """Otherwise than in the suite, STORED may be the answer here: to know better it would have to ask and wait."""
        sample, key = page_keys(2)
        store_pages(store, [sample])
        page = raw.read(sample)
        raw.write(key, write_page_object(key, payload_of(key, 1000)))
        assert_hits(store, [key])
        assert store_pages(store, [key, sample]) == [SetResult.STORED] * 2
        assert raw.read(sample) == page

    def test_the_first_writer_wins(self, store, raw):
        """STORED or EXISTS, as far as the background has come; what is stored stays the first writer's."""
        (key,) = page_keys(1)
        store_pages(store, [key])
        page = raw.read(key)
        assert store.set(PageBatch([key], HostPages([[1000]], fill=0xEE).buffers))[0].durable
        assert raw.read(key) == page
        assert_hits(store, [key])


class TestTieredStoreThatOnlyWritesInTheBackground(TestAsyncStore):
    """As a decode node that stores to a pool alone, and reads it, too."""

    @pytest.fixture
    def far(self):
        return MemoryPageStore("far")

    @pytest.fixture
    def store(self, far):
        store = TieredStore([far], [far], settings=TieringSettings(async_tiers=frozenset({"far"})))
        store.inner = far
        yield store
        store.close()

    @pytest.fixture
    def reopen(self, far):
        return lambda: MemoryPageStore(objects=far.objects)


class TestWrappedStore(PageStoreTests):
    @pytest.fixture
    def store(self):
        return PageStoreWrapper(MemoryPageStore())

    @pytest.fixture
    def raw(self, store):
        return RawObjects(store.inner)


_WRONG_STORES = """
import threading
import time
import pytest
from hicache_ext.storage.contract.store import GetResult
from hicache_ext.testing import faults
from hicache_ext.testing.conformance.page_store import PageStoreTests
from hicache_ext.storage.tiers.memory import MemoryPageStore
from tests.storage.raw_access import RawObjects


class Trusting(faults.PageStoreWrapper):
    "Takes any object of the right length."
    def get(self, batch):
        results = []
        for key, segments in zip(batch.keys, batch.buffers):
            stored = self.inner.objects.get(key, b"")[128:]
            if len(stored) != sum(segment.nbytes for segment in segments):
                results.append(GetResult.MISS)
                continue
            for segment in segments:
                segment[:], stored = stored[: segment.nbytes], stored[segment.nbytes :]
            results.append(GetResult.HIT)
        return results


class Poisoned(faults.PageStoreWrapper):
    "Refuses a bad page, and leaves it where it is."
    def get(self, batch):
        kept = {key: self.inner.objects[key] for key in batch.keys if key in self.inner.objects}
        results = super().get(batch)
        self.inner.objects.update(kept)
        return results


class Overwriting(faults.PageStoreWrapper):
    def set(self, batch):
        self.inner.remove(batch.keys)
        return super().set(batch)


class Late(faults.PageStoreWrapper):
    "Goes on writing into the caller's memory: again and again, so that a loaded machine cannot hide it."
    def get(self, batch):
        def go_on():
            for _ in range(150):
                time.sleep(0.02)
                self.inner.get(batch)

        for _ in range(3):
            threading.Thread(target=go_on, daemon=True).start()
        return super().get(batch)


class Spilling(faults.PageStoreWrapper):
    "Writes one byte beside every segment."
    def get(self, batch):
        import ctypes
        for segments in batch.buffers:
            for segment in segments:
                ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(segment)) + segment.nbytes, 0, 1)
        return super().get(batch)


class Tests(PageStoreTests):
    wrong = faults.PageStoreWrapper

    @pytest.fixture
    def store(self):
        return self.wrong(MemoryPageStore())

    @pytest.fixture
    def raw(self, store):
        return RawObjects(store.inner)
"""

_CAUGHT_BY = {
    "faults.LyingStore": "test_a_stored_page_is_read_back",
    "faults.DroppingStore": "test_a_stored_page_is_read_back",
    "faults.FailingStore": "test_a_stored_page_is_read_back",
    "Trusting": "test_a_damaged_page_is_refused_and_replaced",
    "Poisoned": "test_a_damaged_page_is_refused_and_replaced",
    "Overwriting": "test_the_first_writer_wins",
    "Late": "test_memory_is_left_alone_once_a_read_has_returned",
    "Spilling": "test_nothing_beside_the_segments_is_touched",
}


@pytest.fixture(scope="module")
def failed_tests(tmp_path_factory) -> set[tuple[str, str]]:
    """(wrong store, test) of what fails when the suite runs over stores that are wrong."""
    directory = tmp_path_factory.mktemp("wrong")
    classes = [f"class Test{name.rpartition('.')[2]}(Tests):\n    wrong = {name}\n" for name in _CAUGHT_BY]
    (directory / "test_wrong.py").write_text("\n\n".join([_WRONG_STORES, *classes]))
    wanted = " or ".join(sorted(set(_CAUGHT_BY.values())))
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rf", "--tb=no", "-p", "no:cacheprovider", "-k", wanted, directory],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1, run.stdout + run.stderr
    return set(re.findall(r"^FAILED test_wrong\.py::Test(\w+)::(\w+)", run.stdout, re.MULTILINE))


@pytest.mark.parametrize(("wrong", "test"), _CAUGHT_BY.items())
def test_the_suite_fails_on_a_store_that_is_wrong(failed_tests, wrong, test):
    assert (wrong.rpartition(".")[2], test) in failed_tests


@pytest.mark.parametrize("wrapper", [LyingStore, DroppingStore, FailingStore])
def test_a_wrapper_that_is_not_active_keeps_every_promise(wrapper):
    store = wrapper(MemoryPageStore())
    store.active = False
    TestMemoryPageStore().test_the_first_writer_wins(store)


def test_a_slow_store_takes_longer_and_answers_the_same():
    store = SlowStore(MemoryPageStore(), 0.05)
    begun = time.monotonic()
    TestMemoryPageStore().test_the_first_writer_wins(store)
    assert time.monotonic() - begun >= 0.05 * store.calls > 0


def test_a_raising_store_raises_what_it_was_told_to():
    store = RaisingStore(MemoryPageStore(), lambda: ConnectionResetError("gone"))
    with pytest.raises(ConnectionResetError):
        store.contains([])

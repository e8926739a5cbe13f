"""The PageStore suite and the state machine against the object tier: a real S3 server, a directory, memory."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from hicache_ext.page.transforms.sealing import SealMode
from hicache_ext.storage.contract.store import GetResult, SetResult
from hicache_ext.storage.tiers.object.store import ObjectPageStore
from hicache_ext.testing.conformance.page_store import PageStoreTests
from hicache_ext.testing.conformance.pages import assert_hits, page_key, read_pages, store_pages
from hicache_ext.testing.conformance.state_machine import page_store_machine
from tests.rigs.s3_server import S3Server
from tests.storage.remote.object.bucket import Objects, ObjectsInADirectory, ObjectsInMemory, objects_on
from tests.storage.transforms.rig import Transformed


@pytest.mark.slow
class TestObjectStoreOnS3(PageStoreTests):
    @pytest.fixture
    def medium(self, s3_server: S3Server) -> Objects:
        return objects_on(s3_server)


class TestObjectStoreOnADirectory(PageStoreTests):
    @pytest.fixture
    def medium(self, tmp_path: Path) -> Objects:
        return ObjectsInADirectory(tmp_path / "objects")


class TestObjectStoreInMemory(PageStoreTests):
    @pytest.fixture
    def medium(self) -> Objects:
        return ObjectsInMemory()


class TestSealedObjectStore(PageStoreTests):
    @pytest.fixture
    def medium(self) -> Transformed:
        return Transformed(ObjectsInMemory(), SealMode.ENCRYPT)


class TestEncodedObjectStore(PageStoreTests):
    @pytest.fixture
    def medium(self, tmp_path: Path) -> Transformed:
        return Transformed(ObjectsInMemory(), SealMode.AUTHENTICATE, tmp_path / "shelf")


class _OwnDirectory(ObjectsInADirectory):
    def __init__(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="hicache-objects-"))
        super().__init__(self._directory)

    def close(self) -> None:
        super().close()
        shutil.rmtree(self._directory)


_PROFILE = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)

TestMachineInMemory = page_store_machine(ObjectsInMemory).TestCase
TestMachineInADirectory = page_store_machine(_OwnDirectory).TestCase
TestMachineInMemory.settings = _PROFILE
TestMachineInADirectory.settings = _PROFILE


def test_a_bad_page_that_goes_while_a_write_looks_for_it_is_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The listing of that write shows the pack still that was removed meanwhile."""
    medium, key = ObjectsInMemory(), page_key("bad")
    with closing(medium.open()) as store:
        assert isinstance(store, ObjectPageStore)
        store_pages(store, [key], [5000])
        good = medium.read(key)
        assert good is not None
        medium.write(key, good[:-1] + bytes([good[-1] ^ 1]))
        is_listed, listed, read_again = threading.Event(), store._requests.listed, store.read_again

        def listed_before(*arguments: Any, **options: Any) -> Iterator[Any]:
            if shown := list(listed(*arguments, **options)):
                is_listed.set()
                assert store.wait_until_examined(10)
            yield from shown

        monkeypatch.setattr(store, "read_again", lambda *asked: read_again(*asked) if is_listed.wait(10) else None)
        assert read_pages(store, [key], [5000])[0] == [GetResult.CORRUPT]
        monkeypatch.setattr(store._requests, "listed", listed_before)
        assert store_pages(store, [key], [5000]) == [SetResult.STORED]
        assert_hits(store, [key], [5000])


@pytest.mark.slow
def test_any_order_of_calls_on_s3(s3_server: S3Server) -> None:
    machine = page_store_machine(lambda: objects_on(s3_server)).TestCase
    machine.settings = settings(_PROFILE, max_examples=15)
    machine().runTest()

"""The PageStore suite and the state machine against the object tier: a real S3 server, a directory, memory."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from hicache_ext.page.transforms.sealing import SealMode
from hicache_ext.testing.conformance.page_store import PageStoreTests
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


@pytest.mark.slow
def test_any_order_of_calls_on_s3(s3_server: S3Server) -> None:
    machine = page_store_machine(lambda: objects_on(s3_server)).TestCase
    machine.settings = settings(_PROFILE, max_examples=15)
    machine().runTest()

"""The PageStore suite and the state machine against the object tier: a real S3 server, a directory, memory."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from hicache_ext.storage.tiers.object.store import ObjectPageStore
from hicache_ext.testing.conformance.page_store import PageStoreTests
from hicache_ext.testing.conformance.state_machine import StoreUnderTest, page_store_machine
from tests.rigs.s3_server import S3Server
from tests.storage.remote.object.bucket import Medium, RawBucket, directory_medium, memory_medium, s3_client, s3_medium
from tests.storage.remote.object.fault_proxy import FaultProxy
from tests.storage.remote.object.test_object_faults import through


class _ObjectStoreTests(PageStoreTests):
    @pytest.fixture
    def store(self, medium: Medium) -> Iterator[ObjectPageStore]:
        store = medium.open()
        yield store
        medium.close()

    @pytest.fixture
    def raw(self, medium: Medium) -> RawBucket:
        return medium.raw

    @pytest.fixture
    def reopen(self, medium: Medium) -> Callable[[], ObjectPageStore]:
        return medium.open


@pytest.mark.slow
class TestObjectStoreOnS3(_ObjectStoreTests):
    """Without conditional create, which s3rver lacks."""

    @pytest.fixture
    def prefix(self) -> str:
        return secrets.token_hex(6)

    @pytest.fixture
    def medium(self, s3_server: S3Server, prefix: str) -> Medium:
        return Medium(lambda: s3_client(s3_server, prefix))

    @pytest.fixture
    def damaged_reader(self, s3_server: S3Server, prefix: str, store: ObjectPageStore) -> Iterator[ObjectPageStore]:
        with FaultProxy(s3_server.port).serving() as proxy:
            client = through(proxy.port, s3_server.bucket, prefix)
            reader = ObjectPageStore("cold", client, url="test", timeout=60.0)
            proxy.flipped = 0.5
            proxy.break_with("flip")
            yield reader
            proxy.break_with("")
            reader.close()


class TestObjectStoreOnADirectory(_ObjectStoreTests):
    @pytest.fixture
    def medium(self, tmp_path: Path) -> Medium:
        return directory_medium(tmp_path / "objects")


class TestObjectStoreInMemory(_ObjectStoreTests):
    @pytest.fixture
    def medium(self) -> Medium:
        return memory_medium()


def _in_memory() -> StoreUnderTest:
    medium = memory_medium()
    return StoreUnderTest(medium.open(), dispose=medium.close, raw=medium.raw, reopen=medium.open)


def _in_a_directory() -> StoreUnderTest:
    directory = Path(tempfile.mkdtemp(prefix="hicache-objects-"))
    medium = directory_medium(directory)

    def dispose() -> None:
        medium.close()
        shutil.rmtree(directory)

    return StoreUnderTest(medium.open(), dispose=dispose, raw=medium.raw, reopen=medium.open)


_PROFILE = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)

TestMachineInMemory = page_store_machine(_in_memory).TestCase
TestMachineInADirectory = page_store_machine(_in_a_directory).TestCase
TestMachineInMemory.settings = _PROFILE
TestMachineInADirectory.settings = _PROFILE


@pytest.mark.slow
def test_any_order_of_calls_on_s3(s3_server: S3Server) -> None:
    def on_s3() -> StoreUnderTest:
        medium = s3_medium(s3_server)
        return StoreUnderTest(medium.open(), dispose=medium.close, raw=medium.raw, reopen=medium.open)

    machine = page_store_machine(on_s3).TestCase
    machine.settings = settings(_PROFILE, max_examples=15)
    machine().runTest()

"""The conformance suite against Ceph's gateway.

Opt-in: ``make test-radosgw`` names this file, which pytest does not collect by itself.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import obstore.store
import pytest

from hicache_ext.storage.contract.diagnosis import Level
from tests.rigs.radosgw import ACCESS_KEY, SECRET_KEY, Radosgw, missing_radosgw
from tests.storage.remote.object.bucket import Medium
from tests.storage.remote.object.test_object_conformance import _ObjectStoreTests


@pytest.fixture(scope="session")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Radosgw]:
    if missing := missing_radosgw():
        pytest.skip(f"missing: {missing}")
    with Radosgw(tmp_path_factory.mktemp("ceph")) as gateway:
        gateway.make_bucket("hicache")
        yield gateway


@pytest.fixture
def medium(gateway: Radosgw) -> Medium:
    prefix = secrets.token_hex(6)

    def client() -> obstore.store.S3Store:
        return obstore.store.S3Store(
            "hicache",
            prefix=prefix,
            endpoint=gateway.endpoint,
            access_key_id=ACCESS_KEY,
            secret_access_key=SECRET_KEY,
            region="us-east-1",
            client_options={"allow_http": True},
        )

    return Medium(client)


class TestObjectStoreOnCeph(_ObjectStoreTests):
    def test_it_creates_conditionally_and_the_doctor_finds_nothing_wrong(self, medium: Medium) -> None:
        store = medium.open()
        try:
            found = {finding.subject: finding for finding in store.diagnose()}
        finally:
            medium.close()
        assert store.describe().details["conditional_create"] is True
        assert {finding.level for finding in found.values()} <= {Level.OK, Level.NOTE}
        assert found["first writer"].level is Level.OK

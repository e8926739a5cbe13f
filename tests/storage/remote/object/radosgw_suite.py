"""The conformance suite against Ceph's gateway.

Opt-in: ``make test-radosgw`` names this file, which pytest does not collect by itself.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import obstore.store
import pytest

from hicache_ext.storage.contract.diagnosis import Level
from hicache_ext.storage.tiers.object.store import ObjectPageStore
from hicache_ext.testing.conformance.page_store import PageStoreTests
from tests.rigs.radosgw import ACCESS_KEY, SECRET_KEY, Radosgw, missing_radosgw
from tests.storage.remote.object.bucket import Objects, ObjectsOnS3
from tests.storage.remote.object.fault_proxy import FaultProxy


@pytest.fixture(scope="session")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Radosgw]:
    if missing := missing_radosgw():
        pytest.skip(f"missing: {missing}")
    with Radosgw(tmp_path_factory.mktemp("ceph")) as gateway:
        gateway.make_bucket("hicache")
        yield gateway


def _client(endpoint: str, prefix: str, **options: Any) -> Any:
    return obstore.store.S3Store(
        "hicache",
        prefix=prefix,
        endpoint=endpoint,
        access_key_id=ACCESS_KEY,
        secret_access_key=SECRET_KEY,
        region="us-east-1",
        client_options={"allow_http": True},
        **options,
    )


class TestObjectStoreOnCeph(PageStoreTests):
    @pytest.fixture
    def medium(self, gateway: Radosgw) -> Objects:
        prefix = secrets.token_hex(6)

        def damaging(proxies: ExitStack) -> Any:
            proxy = proxies.enter_context(FaultProxy(gateway.port).serving())
            proxy.flipped = 0.5
            proxy.break_with("flip")
            return _client(f"http://127.0.0.1:{proxy.port}", prefix)

        return ObjectsOnS3(partial(_client, gateway.endpoint, prefix), damaging)

    def test_the_doctor_finds_nothing_wrong(self, store: ObjectPageStore) -> None:
        assert {finding.level for finding in store.diagnose()} <= {Level.OK, Level.NOTE}

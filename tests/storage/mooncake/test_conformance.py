"""The PageStore suite and the state machine against a real Mooncake cluster."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from hicache_ext.storage.mooncake import open_mooncake_tier
from hicache_ext.testing.conformance.page_store import PageStoreTests
from hicache_ext.testing.conformance.state_machine import StoreUnderTest, page_store_machine
from tests.storage.mooncake.conftest import tier_for
from tests.storage.mooncake.raw_client import RawClient


@pytest.fixture(scope="module")
def client(servers):
    client = RawClient(servers)
    yield client
    client.close()


class TestMooncakeStore(PageStoreTests):
    @pytest.fixture
    def store(self, servers, client):
        client.empty()
        store = open_mooncake_tier("pool", tier_for(servers))
        yield store
        store.close()

    @pytest.fixture
    def raw(self, client):
        return client

    @pytest.fixture
    def reopen(self, servers):
        return lambda: open_mooncake_tier("pool", tier_for(servers))


@pytest.mark.slow
def test_any_order_of_calls(servers, client):
    def open_store() -> StoreUnderTest:
        client.empty()
        return StoreUnderTest(reopen(), dispose=client.empty, raw=client, reopen=reopen)

    def reopen():
        return open_mooncake_tier("pool", tier_for(servers))

    case = page_store_machine(open_store).TestCase
    case.settings = settings(
        max_examples=15, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
    )
    case("runTest").runTest()

"""The PageStore suite and the state machine against a real Mooncake cluster."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from hicache_ext.storage.contract.diagnosis import Level
from hicache_ext.storage.contract.registry import open_tier
from hicache_ext.storage.contract.store import SetResult
from hicache_ext.testing.conformance.page_store import PageStoreTests
from hicache_ext.testing.conformance.pages import assert_hits, page_keys, store_pages
from hicache_ext.testing.conformance.state_machine import StoreUnderTest, page_store_machine
from tests.storage.mooncake.conftest import PATIENCE, DamagingClient, open_with, tier_for
from tests.storage.mooncake.raw_client import RawClient

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def client(servers):
    client = RawClient(servers)
    yield client
    client.close()


class TestMooncakeStore(PageStoreTests):
    @pytest.fixture
    def store(self, open_quickly, client):
        client.empty()
        store = open_quickly()
        yield store
        store.close()

    @pytest.fixture
    def raw(self, client):
        return client

    @pytest.fixture
    def damaged_reader(self, store, client, servers):
        damaging = DamagingClient(client.client)
        damaging.flipped = 0.5
        reader = open_with(damaging, tier_for(servers, timeout=PATIENCE))
        yield reader
        reader.close()

    @pytest.fixture
    def reopen(self, open_quickly):
        return open_quickly


def test_any_order_of_calls(open_quickly, client):
    def open_store() -> StoreUnderTest:
        client.empty()
        return StoreUnderTest(open_quickly(), dispose=client.empty, raw=client, reopen=open_quickly)

    case = page_store_machine(open_store).TestCase
    case.settings = settings(
        max_examples=8, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
    )
    case("runTest").runTest()


def test_the_doctor_sees_a_healthy_pool(servers):
    store = open_tier("pool", tier_for(servers, timeout=PATIENCE))
    findings = {finding.subject: finding for finding in store.diagnose()}
    store.close()
    assert not [finding for finding in findings.values() if finding.level in (Level.ERROR, Level.WARNING)]
    assert "MB/s" in findings["round trip"].seen
    assert "256MiB" in findings["capacity"].seen


def test_pins_replicas_and_groups_are_taken_by_the_engine(servers, open_quickly, client):
    for wanted in (
        {"soft_pin": True},
        {"soft_pin": "10s"},
        {"hard_pin": True},
        {"group": "page"},
        {"preferred_segments": servers.segment_names},
    ):
        client.empty()
        store = open_quickly(**wanted)
        assert store_pages(store, page_keys(3)) == [SetResult.STORED] * 3, wanted
        assert_hits(store, page_keys(3))
        store.close()
    client.empty()


def test_pages_outlive_the_librarys_client(servers, client):
    client.empty()
    store = open_tier("pool", tier_for(servers, timeout=PATIENCE))
    store_pages(store, page_keys(3))
    store.close()
    store = open_tier("pool", tier_for(servers, timeout=PATIENCE))
    assert_hits(store, page_keys(3))
    store.close()


def test_a_process_that_contributes_memory_reads_and_writes_its_own(servers, client):
    client.empty()
    store = open_tier("pool", tier_for(servers, timeout=PATIENCE, segment_size="64MiB"))
    assert store_pages(store, page_keys(40), [1 << 19]) == [SetResult.STORED] * 40
    assert_hits(store, page_keys(40), [1 << 19])
    store.close()

"""The PageStore suite and the state machine against a real Mooncake cluster."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from hicache_ext.storage.contract.diagnosis import Level
from hicache_ext.storage.contract.registry import open_tier
from hicache_ext.storage.contract.store import SetResult
from hicache_ext.testing.conformance.page_store import PageStoreTests
from hicache_ext.testing.conformance.pages import assert_hits, page_keys, store_pages
from hicache_ext.testing.conformance.state_machine import page_store_machine
from tests.storage.mooncake.conftest import PATIENCE, Pool, tier_for
from tests.storage.transforms.rig import ENCRYPT, Transformed

pytestmark = pytest.mark.slow


class TestMooncakeStore(PageStoreTests):
    @pytest.fixture
    def medium(self, pool):
        return pool


class TestEncodedAndEncryptedMooncakeStore(PageStoreTests):
    @pytest.fixture
    def medium(self, pool, tmp_path):
        return Transformed(pool, ENCRYPT, tmp_path / "shelf")


def test_any_order_of_calls(servers, library_client, raw_client):
    case = page_store_machine(lambda: Pool(servers, library_client, raw_client)).TestCase
    case.settings = settings(
        max_examples=8, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
    )
    case("runTest").runTest()


def test_the_doctor_sees_a_healthy_pool(servers):
    store = open_tier("pool", tier_for(servers, timeout=PATIENCE))
    findings = {finding.subject: finding for finding in store.diagnose()}
    store.close()
    assert not [finding for finding in findings.values() if finding.level in (Level.ERROR, Level.WARNING)]
    assert "MB/s" in findings["bandwidth"].seen
    assert "256MiB" in findings["capacity"].seen


def test_pins_are_taken_by_the_engine(servers, open_quickly, raw_client):
    raw_client.empty()
    store = open_quickly(hard_pin=True)
    assert store_pages(store, page_keys(3)) == [SetResult.STORED] * 3
    assert_hits(store, page_keys(3))
    store.close()
    raw_client.empty()


def test_pages_outlive_the_librarys_client(servers, raw_client):
    raw_client.empty()
    store = open_tier("pool", tier_for(servers, timeout=PATIENCE))
    store_pages(store, page_keys(3))
    store.close()
    store = open_tier("pool", tier_for(servers, timeout=PATIENCE))
    assert_hits(store, page_keys(3))
    store.close()


def test_a_process_that_contributes_memory_reads_and_writes_its_own(servers, raw_client):
    raw_client.empty()
    store = open_tier("pool", tier_for(servers, timeout=PATIENCE, segment_size="64MiB"))
    assert store_pages(store, page_keys(40), [1 << 19]) == [SetResult.STORED] * 40
    assert_hits(store, page_keys(40), [1 << 19])
    store.close()

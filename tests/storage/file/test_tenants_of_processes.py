"""Shares and leases of processes on one directory, in containers of their own, too, one of which is killed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from hicache_ext.page.envelope import IDENTITY_LENGTH
from hicache_ext.storage.contract import tenancy, tenants
from hicache_ext.storage.contract.tenants import DEFAULT, Tenant
from hicache_ext.storage.tiers.file import pins
from hicache_ext.storage.tiers.file.multipath import SpreadStore
from hicache_ext.testing.conformance.pages import page_keys, store_pages
from tests.rigs.pods import Pod
from tests.rigs.workers import missing_for_namespaces

CAPACITY = 8 << 20
SIZES = (60_000, 70_000)
"""A slot of 128 KiB and a bit holds a page; the tier has some 60."""
LEASE = 600.0
_containers = pytest.mark.skipif(missing_for_namespaces() is not None, reason=f"missing: {missing_for_namespaces()}")


def write(store: SpreadStore, tenant: str, name: str, count: int) -> None:
    tenancy.put_in_force({"team": Tenant(0.4)})
    pins._LOOK_INTERVAL = pins._COUNT_INTERVAL = pins._PAUSE = 0
    keys, owners = page_keys(count, name), tenants.in_force()
    owners.note([key[IDENTITY_LENGTH:] for key in keys], tenant)
    for first in range(0, count, 8):
        store_pages(store, keys[first : first + 8], SIZES)


def lease(store: SpreadStore, name: str, count: int) -> int:
    return store.lease_pages([key[IDENTITY_LENGTH:] for key in page_keys(count, name)], LEASE, "")


def there(store: SpreadStore, name: str, count: int) -> int:
    return sum(store.contains(page_keys(count, name)))


def when_leases_are_over(store: SpreadStore) -> None:
    """From now on this process' clock is that of later."""
    real = time.time
    time.time = lambda: real() + LEASE + 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "in_containers", [False, pytest.param(True, marks=[pytest.mark.thorough, _containers])], ids=["host", "containers"]
)
def test_what_a_killed_process_has_leased_stays_to_its_time_and_its_tenant_s_share_for_good(
    tmp_path: Path, in_containers: bool
) -> None:
    place = tmp_path / "tier"
    with Pod(place, capacity=CAPACITY, namespaces=in_containers) as crawler:
        with Pod(place, capacity=CAPACITY, namespaces=in_containers) as killed:
            assert (crawler.refused, killed.refused) == ("", "")
            killed.do(write, "team", "of the team", 16)
            killed.do(write, DEFAULT, "leased", 8)
            assert killed.do(lease, "leased", 8) == 8
            killed.kill()
        crawler.do(write, DEFAULT, "crawled", 400)
        assert (crawler.do(there, "of the team", 16), crawler.do(there, "leased", 8)) == (16, 8)
        crawler.do(when_leases_are_over)
        crawler.do(write, DEFAULT, "crawled later", 800)
        assert (crawler.do(there, "of the team", 16), crawler.do(there, "leased", 8)) == (16, 0)
        assert crawler.lines() == []

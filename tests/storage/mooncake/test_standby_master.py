"""Two masters that find each other through etcd: the one that leads is killed."""

from __future__ import annotations

import shutil

import pytest

from hicache_ext.storage.contract.registry import open_tier
from hicache_ext.storage.contract.store import GetResult, SetResult
from hicache_ext.storage.tiers.mooncake.config import MooncakeTierConfig
from hicache_ext.storage.tiers.mooncake.pages import MooncakeStore
from hicache_ext.testing.conformance.pages import assert_hits, page_keys, read_pages, store_pages
from tests.rigs.mooncake_servers import StandbyServers
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.thorough]


def test_when_the_master_that_leads_is_killed_the_pool_comes_back_with_the_other_one(network, tmp_path):
    if shutil.which("etcd") is None:
        pytest.skip("missing: etcd (package etcd-server)")
    with StandbyServers(tmp_path) as servers:
        settings = {"type": "mooncake", "master": servers.master, "local_hostname": "127.0.0.1", "timeout": 2}
        store = open_tier("pool", MooncakeTierConfig.model_validate(settings))
        assert isinstance(store, MooncakeStore)
        keys = page_keys(4)
        wait_until(lambda: set(store_pages(store, keys)) <= {SetResult.STORED, SetResult.EXISTS})
        assert_hits(store, keys)
        servers.kill_leader()
        assert GetResult.HIT not in read_pages(store, keys)[0]
        assert not store.attached
        assert read_pages(store, keys)[0] == [GetResult.REJECTED] * 4
        print(f"attached to the other one after {wait_until(lambda: store.attached):.1f} s")
        print(f"pages stored after {wait_until(lambda: store_pages(store, keys) == [SetResult.STORED] * 4):.1f} s more")
        assert_hits(store, keys)
        store.close()

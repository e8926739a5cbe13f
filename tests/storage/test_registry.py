"""Opening and examining a tier whose package is not installed."""

from __future__ import annotations

import importlib

import pytest

from hicache_ext.config import ExtraConfig, load_config
from hicache_ext.errors import StoreSetupError
from hicache_ext.storage.contract.registry import examine_tier, open_tier
from hicache_ext.storage.tiers.redis.tier_type import RedisTier


@pytest.mark.parametrize("use", [open_tier, examine_tier])
def test_a_missing_package_is_named_with_the_command_that_installs_it(use, monkeypatch):
    monkeypatch.setattr(RedisTier, "open", lambda *_: importlib.import_module("far_store"))
    monkeypatch.setattr(RedisTier, "install", "pip install far-store")
    tier = load_config(ExtraConfig.around({"tiers": {"pool": {"type": "redis", "url": "redis://pool"}}})).tiers["pool"]
    with pytest.raises(StoreSetupError) as raised:
        use("pool", tier)
    assert str(raised.value) == (
        "tier 'pool' cannot start: a package that it needs cannot be imported (No module named 'far_store'); "
        "pip install far-store"
    )

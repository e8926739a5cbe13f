"""What follows from the tiers where a configuration does not say how they are written and promoted to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hicache_ext.config import ExtraConfig, HicacheExtConfig, load_config
from hicache_ext.config.model import ServerRole
from hicache_ext.errors import ConfigError
from hicache_ext.runtime.file_systems import Mount
from hicache_ext.storage.contract.store import GetResult, SetResult
from hicache_ext.storage.opening import open_tiers
from hicache_ext.storage.tiering.tier_use import TierUse, tier_use
from hicache_ext.testing.conformance.pages import page_keys, read_pages, store_pages
from tests.waiting import wait_until

NVME = {"type": "file", "path": "/mnt/nvme", "capacity": "1GiB", "shared": False}
DISK = {"type": "file", "path": "/mnt/disk", "capacity": "1GiB", "shared": False}
NFS = {"type": "file", "path": "/mnt/nfs", "capacity": "1GiB", "shared": True}
COLD = {"type": "object", "url": "s3://bucket/prefix"}
POOL = {"type": "redis", "url": "redis://pool:6379"}


def config_of(tiers: dict[str, Any], role: ServerRole = "both", **section: Any) -> HicacheExtConfig:
    return load_config(ExtraConfig.around({"tiers": tiers, **section})).for_role(role)


def use_of(tiers: dict[str, Any], role: ServerRole = "both", **section: Any) -> TierUse:
    return tier_use(config_of(tiers, role, **section))


def policies(use: TierUse) -> dict[str, str]:
    return {name: policy for name, (policy, _) in use.policies.items()}


def test_the_near_tier_is_written_at_once_and_promoted_to_and_the_pool_in_the_background() -> None:
    """The first example of docs/object-stores.md, word for word."""
    use = use_of({"nvme": NVME, "cold": COLD}, retrieve_locations=["nvme", "cold"])
    assert policies(use) == {"nvme": "sync", "cold": "async"}
    assert use.promote_to == "nvme"


@pytest.mark.parametrize("tier", [NVME, NFS, POOL], ids=["private", "shared", "redis"])
def test_a_lone_tier_is_written_at_once_and_nothing_is_promoted(tier: dict[str, Any]) -> None:
    use = use_of({"one": tier})
    assert (policies(use), use.promote_to) == ({"one": "sync"}, None)


def test_a_shared_directory_is_a_pool_like_any_other() -> None:
    use = use_of({"nvme": NVME, "nfs": NFS})
    assert (policies(use), use.promote_to) == ({"nvme": "sync", "nfs": "async"}, "nvme")


def test_private_tiers_behind_each_other_are_all_written_at_once() -> None:
    use = use_of({"nvme": NVME, "disk": DISK, "pool": POOL})
    assert (policies(use), use.promote_to) == ({"nvme": "sync", "disk": "sync", "pool": "async"}, "nvme")


def test_pools_without_a_private_tier_before_them_are_written_at_once() -> None:
    use = use_of({"pool": POOL, "cold": COLD})
    assert (policies(use), use.promote_to) == ({"pool": "sync", "cold": "sync"}, None)


def test_nothing_is_promoted_to_a_tier_that_this_node_does_not_write() -> None:
    assert use_of({"nvme": NVME, "pool": POOL}, store_locations=["pool"]).promote_to is None
    assert use_of({"nvme": NVME, "pool": POOL}, store_locations=[]).promote_to is None


def test_the_nearest_private_tier_is_the_first_that_others_lie_behind() -> None:
    assert use_of({"pool": POOL, "nvme": NVME, "cold": COLD}).promote_to == "nvme"
    assert use_of({"pool": POOL, "nvme": NVME}).promote_to is None


def test_a_decode_node_writes_at_once_so_that_its_writer_knows_what_has_reached_the_pool() -> None:
    use = use_of({"nvme": NVME, "pool": POOL}, "decode")
    assert (policies(use), use.promote_to) == ({"nvme": "sync", "pool": "sync"}, None)


@pytest.mark.parametrize("role", ["prefill", "decode", "both"])
def test_what_is_configured_wins(role: ServerRole) -> None:
    said = {"promote_to": "disk", "store_policies": {"pool": "sync", "nvme": "async"}}
    use = use_of({"nvme": NVME, "disk": DISK, "pool": POOL}, role, **said)
    assert (use.policies["pool"], use.policies["nvme"]) == (("sync", "configured"), ("async", "configured"))
    assert (use.promote_to, use.promotion_reason) == ("disk", "configured")


def test_what_a_role_says_wins_over_what_all_are_told() -> None:
    roles = {"prefill": {"promote_to": "off", "store_policies": {"pool": "sync"}}}
    tiers = {"nvme": NVME, "pool": POOL}
    prefill = use_of(tiers, "prefill", promote_to="nvme", roles=roles)
    assert (prefill.promote_to, policies(prefill)) == (None, {"nvme": "sync", "pool": "sync"})
    both = use_of(tiers, "both", promote_to="off", roles={"both": {"promote_to": "nvme"}})
    assert both.promote_to == "nvme"


@pytest.mark.parametrize("off", ["off", False, None])
@pytest.mark.parametrize("role", ["prefill", "decode", "both"])
def test_promotion_is_switched_off_in_a_word(off: Any, role: ServerRole) -> None:
    config = config_of({"nvme": NVME, "pool": POOL}, role, promote_to=off)
    assert tier_use(config).promote_to is None
    assert config.for_role(role).promote_to == config.promote_to == "off"


def test_hints_without_a_tier_to_bring_the_pages_to_stop_the_start_before_anything_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which file systems are shared shows on the node alone."""
    near = {"type": "file", "path": str(tmp_path / "near"), "capacity": "64MiB", "layout": "pages"}
    config = config_of({"near": near, "pool": POOL}, "prefill", pd={"hints": {"enabled": True}})
    assert tier_use(config).promote_to == "near"
    mounts = [Mount("/", "nfs4", "server:/")]
    monkeypatch.setattr("hicache_ext.runtime.file_systems.read_mounts", lambda _: mounts)
    with pytest.raises(ConfigError, match="brings the pages to the tier promote_to, and there is none"):
        open_tiers(config)
    assert not (tmp_path / "near").exists()


def test_no_tier_is_named_off() -> None:
    with pytest.raises(ConfigError, match="this name has a meaning of its own in promote_to"):
        config_of({"off": NVME})


def test_pages_found_in_a_shared_directory_are_kept_on_the_own_disk_by_default(tmp_path: Path) -> None:
    def directory(name: str, **more: Any) -> dict[str, Any]:
        return {"type": "file", "path": str(tmp_path / name), "capacity": "64MiB", "layout": "pages", **more}

    config = config_of({"near": directory("near"), "pool": directory("pool", shared=True)})
    store = open_tiers(config)
    near, pool = store.tiers
    keys = page_keys(5)
    assert store_pages(store, keys) == [SetResult.STORED] * 5
    wait_until(lambda: pool.contains(keys) == [True] * 5)  # in the background
    near.remove(keys)
    assert read_pages(store, keys)[0] == [GetResult.HIT] * 5
    wait_until(lambda: near.contains(keys) == [True] * 5)
    store.close()

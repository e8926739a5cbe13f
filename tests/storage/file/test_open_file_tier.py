"""Which store a configured file tier becomes, and what is refused at start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hicache_ext.config import ExtraConfig, load_config
from hicache_ext.errors import ConfigError, StoreSetupError
from hicache_ext.storage.opening import open_tiers


def opened(tmp_path: Path, **tier: Any) -> Any:
    disk = {"type": "file", "path": str(tmp_path / "l3"), "capacity": "64MiB", **tier}
    return open_tiers(load_config(ExtraConfig.around({"tiers": {"disk": disk}})))


@pytest.mark.parametrize(("layout", "becomes"), [("auto", "pages"), ("pages", "pages"), ("slab", "slab")])
def test_the_layout_chooses_the_store(tmp_path: Path, layout: str, becomes: str) -> None:
    store = opened(tmp_path, layout=layout)
    (tier,) = store.tiers
    assert tier.describe().details["layout"] == becomes
    assert tier.describe().details["capacity"] == 64 << 20
    store.close()


def test_slabs_without_a_capacity_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        opened(tmp_path, layout="slab", capacity="unlimited")
    assert str(refused.value) == (
        "hicache_ext.tiers.disk.capacity: the slab layout preallocates its files; allowed: a size such as 512GiB"
    )


def test_direct_io_is_refused_as_long_as_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"hicache_ext\.tiers\.disk\.io: 'direct' is not in this version"):
        opened(tmp_path, io="direct")


def test_a_tier_that_cannot_start_stops_the_server_unless_it_is_not_required(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "l3").write_text("a file where the directory should be")
    with pytest.raises(StoreSetupError, match="tier 'disk' cannot start"):
        opened(tmp_path)
    store = opened(tmp_path, required=False)
    assert "going on without it" in caplog.text
    assert store.count_leading([bytes(48)]) == 0
    store.close()


def test_the_settings_of_the_tiers_reach_the_store(tmp_path: Path) -> None:
    near, far = ({"type": "file", "path": str(tmp_path / name), "capacity": "64MiB"} for name in ("near", "far"))
    document = ExtraConfig.around(
        {"tiers": {"near": near, "far": far}, "promote_to": "near", "store_policies": {"far": "async"}}
    )
    store = open_tiers(load_config(document))
    assert store.describe().details == {
        "retrieve": ["near", "far"],
        "store": ["near"],
        "store_async": ["far"],
        "promote_to": "near",
    }
    store.close()

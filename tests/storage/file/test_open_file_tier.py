"""Which store a configured file tier becomes, and what is refused at start."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache_ext.config import ExtraConfig, load_config, rounded_size
from hicache_ext.errors import ConfigError, StoreSetupError
from hicache_ext.storage.contract.store import GetResult
from hicache_ext.storage.opening import open_tiers
from hicache_ext.storage.tiers.file.examination import diagnose
from hicache_ext.testing.conformance.pages import assert_hits, page_keys, read_pages, store_pages
from tests.rigs.disk_faults import DiskFaults
from tests.storage.raw_access import account_and_walk


def opened(tmp_path: Path, **tier: Any) -> Any:
    disk = {"type": "file", "path": str(tmp_path / "l3"), "capacity": "64MiB", **tier}
    return open_tiers(load_config(ExtraConfig.around({"tiers": {"disk": disk}})))


def tier_of(store: Any) -> Any:
    """The tier itself, without what lets several arrangements share it."""
    (live,) = store._live.values()
    return live.bare


@pytest.mark.parametrize(("layout", "becomes"), [("auto", "slab"), ("pages", "pages"), ("slab", "slab")])
def test_the_layout_chooses_the_store(tmp_path: Path, layout: str, becomes: str) -> None:
    store = opened(tmp_path, layout=layout)
    (tier,) = store.tiers
    assert tier.describe().details["layout"] == becomes
    assert tier.describe().details["capacity"] == 64 << 20
    store.close()


def test_the_start_says_which_layout_and_which_io_and_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    opened(tmp_path).close()
    (line,) = [record.getMessage() for record in caplog.records if "layout" in record.getMessage()]
    assert line.startswith(f"tier disk: {tmp_path / 'l3'}: layout slab (")
    assert "is local" in line
    assert "; I/O buffered" in line


def test_an_unlimited_capacity_means_page_files(tmp_path: Path) -> None:
    store = opened(tmp_path, capacity="unlimited")
    assert store.tiers[0].describe().details["layout"] == "pages"
    store.close()


@pytest.mark.parametrize("layout", ["pages", "slab"])
def test_auto_keeps_the_layout_that_is_there_with_its_pages(tmp_path: Path, layout: str) -> None:
    store = opened(tmp_path, layout=layout)
    store_pages(store, page_keys(20))
    store.close()
    again = opened(tmp_path)
    assert again.tiers[0].describe().details["layout"] == layout
    assert_hits(again, page_keys(20))
    again.close()


@pytest.mark.parametrize("layout", ["pages", "slab"])
def test_a_diagnosis_says_what_all_paths_take_and_walks_through_no_page_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    store = opened(tmp_path, layout=layout, path=[str(path) for path in paths])
    store_pages(store, page_keys(40), (1 << 18,))
    if layout == "pages":
        taken = sum(account_and_walk(part)[1] for part in tier_of(store).parts)
    else:
        parts = [path / part for path in paths for part in ("v3", "slabs", "index")]
        taken = sum(file.stat().st_blocks * 512 for part in parts for file in part.rglob("*") if file.is_file())
    walk, walked = os.walk, []

    def noted(top: Path) -> Iterator[Any]:
        walked.extend(file for file in top.rglob("*.pa[gc][ek]"))
        return walk(top)

    monkeypatch.setattr(os, "walk", noted)
    (space,) = [one for one in diagnose(paths, 64 << 20, tier_of(store)) if one.subject == "capacity"]
    assert not walked
    monkeypatch.undo()
    assert f"64MiB, of which {rounded_size(taken)} are taken" in space.seen
    store.close()


def test_slabs_found_without_a_capacity_stop_the_start(tmp_path: Path) -> None:
    opened(tmp_path, layout="slab").close()
    with pytest.raises(StoreSetupError, match="holds slabs, which need a capacity"):
        opened(tmp_path, capacity="unlimited")


def test_slabs_without_a_capacity_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        opened(tmp_path, layout="slab", capacity="unlimited")
    assert str(refused.value) == (
        "hicache_ext.tiers.disk.capacity: the slab layout preallocates its files; allowed: a size such as 512GiB"
    )


def test_direct_io_with_page_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"hicache_ext\.tiers\.disk\.io: 'direct' needs layout slab"):
        opened(tmp_path, layout="pages", io="direct")
    opened(tmp_path, layout="pages").close()
    with pytest.raises(StoreSetupError, match=r"io is 'direct', and .* holds page files"):
        opened(tmp_path, io="direct")


@pytest.mark.parametrize("io", ["direct", "buffered"])
def test_pages_come_back_whatever_the_io_and_whatever_it_was_when_they_were_written(tmp_path: Path, io: str) -> None:
    keys = page_keys(40)
    for setting in (io, "auto", "direct", "buffered"):
        store = opened(tmp_path, io=setting)
        store_pages(store, keys, (4096, 8192))
        assert_hits(store, keys, (4096, 8192))
        store_pages(store, page_keys(40, "odd"), (1000, 77))
        assert_hits(store, page_keys(40, "odd"), (1000, 77))
        store.close()


def test_a_path_more_keeps_most_pages_and_a_path_less_all_of_the_rest(tmp_path: Path) -> None:
    keys = page_keys(300)
    paths = [str(tmp_path / name) for name in "abc"]
    store = opened(tmp_path, path=paths[:2])
    store_pages(store, keys)
    store.close()
    store = opened(tmp_path, path=paths)
    kept = sum(store.contains(keys))
    assert 150 < kept < 250
    store_pages(store, keys)
    assert_hits(store, keys)
    store.close()
    store = opened(tmp_path, path=[paths[2], paths[0]])
    found = store.contains(keys)
    assert 150 < sum(found) < 270
    assert_hits(store, [key for key, present in zip(keys, found, strict=True) if present])
    store.close()


@pytest.mark.parametrize("layout", ["pages", "slab"])
def test_one_broken_path_of_two_is_left_out_at_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, layout: str
) -> None:
    (tmp_path / "file").write_text("a file where a directory should be")
    store = opened(tmp_path, path=[str(tmp_path / "a"), str(tmp_path / "file" / "b")], layout=layout)
    assert f"path {tmp_path}/file/b is out of service" in caplog.text
    store_pages(store, page_keys(20))
    assert_hits(store, page_keys(20))
    store.close()


def test_a_path_that_holds_something_else_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "b" / "v3" / "slabs").mkdir(parents=True)
    (tmp_path / "b" / "v3" / "members").touch()
    with pytest.raises(StoreSetupError, match="holds format 3, layout 'slab'"):
        opened(tmp_path, path=[str(tmp_path / "a"), str(tmp_path / "b")], layout="pages")


@pytest.mark.parametrize("layout", ["pages", "slab"])
def test_a_disk_that_dies_and_comes_back_costs_its_pages_only_while_it_is_away(tmp_path: Path, layout: str) -> None:
    keys = page_keys(200)
    store = opened(tmp_path, path=[str(tmp_path / "a"), str(tmp_path / "b")], layout=layout)
    tier = tier_of(store)
    store_pages(store, keys)
    with DiskFaults(tmp_path / "a", rate=1.0, errors=[errno.EIO], short=False):
        for _ in range(4):
            read_pages(store, keys)
        assert tier.out_of_service() == [tmp_path / "a"]
        results, _ = read_pages(store, keys)
        assert 0 < results.count(GetResult.HIT) < len(keys)
        assert set(results) == {GetResult.HIT, GetResult.MISS}
        store_pages(store, keys)
        assert_hits(store, keys)
    deadline = time.monotonic() + 60
    while tier.out_of_service():
        assert time.monotonic() < deadline, "it did not come back"
        time.sleep(0.05)
    assert_hits(store, keys)
    store.close()


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

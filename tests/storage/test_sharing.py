"""Which tiers other machines have, and what follows from that."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hicache_ext.config import ExtraConfig, HicacheExtConfig, TierConfig, load_config
from hicache_ext.errors import ConfigError, StoreSetupError
from hicache_ext.runtime import file_systems
from hicache_ext.runtime.file_systems import followed, is_on_network, read_mounts
from hicache_ext.storage.opening import open_tiers
from hicache_ext.testing.conformance.pages import page_keys, store_pages

NETWORK = [
    "nfs",
    "nfs4",
    "lustre",
    "ceph",
    "gpfs",
    "beegfs",
    "9p",
    "cifs",
    "smb3",
    "fuse.juicefs",
    "fuse.hf3fs",
    "fuse",
]
PRIVATE = ["ext4", "xfs", "tmpfs", "zfs", "fuseblk", "fuse.mergerfs", "fuse.gocryptfs", "unheard-of"]


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Writes a mount table, read by everybody, in which ``tmp_path / "mount"`` is of a file system of this type."""
    (tmp_path / "mount").mkdir()
    file = tmp_path / "mountinfo"

    def write(kind: str) -> Path:
        file.write_text(
            f"21 1 254:0 / / rw - ext4 /dev/root rw\n99 21 0:77 / {tmp_path}/mount rw - {kind} server:/x rw\n"
        )
        return file

    write("ext4")
    monkeypatch.setattr(file_systems, "read_mounts", lambda _=None: read_mounts(file))
    return write


def config_of(tiers: dict[str, Any], **section: Any) -> HicacheExtConfig:
    return load_config(ExtraConfig.around({"tiers": tiers, **section}))


def tier_of(**settings: Any) -> TierConfig:
    return config_of({"one": settings}).tiers["one"]


def pages_in(path: Path | list[str], **settings: Any) -> dict[str, Any]:
    where = path if isinstance(path, list) else str(path)
    return {"type": "file", "path": where, "capacity": "64MiB", "layout": "pages", "io": "buffered", **settings}


@pytest.mark.parametrize(("kind", "shared"), [*((one, True) for one in NETWORK), *((one, False) for one in PRIVATE)])
def test_a_directory_is_shared_where_its_file_system_is(
    tmp_path: Path, table: Callable[[str], Path], kind: str, shared: bool
) -> None:
    table(kind)
    found = tier_of(**pages_in(tmp_path / "mount" / "tier")).sharing()
    assert found.shared is shared
    assert kind in found.reason


def test_a_tier_is_shared_only_where_all_of_its_paths_are(tmp_path: Path, table: Callable[[str], Path]) -> None:
    table("nfs4")
    both = [str(tmp_path / "mount" / "a"), str(tmp_path / "here")]
    found = tier_of(**pages_in(both)).sharing()
    assert (found.shared, found.reason) == (False, "ext4 is local")
    store = open_tiers(config_of({"pool": pages_in(both)}))
    assert not store.describe().shared
    store.close()


@pytest.mark.parametrize("told", [True, False])
def test_what_the_configuration_says_wins(tmp_path: Path, table: Callable[[str], Path], told: bool) -> None:
    table("ext4" if told else "nfs4")
    assert str(tier_of(**pages_in(tmp_path / "mount", shared=told)).sharing()) == (
        f"{'shared' if told else 'private'} (as configured)"
    )


def test_slabs_belong_to_one_machine_wherever_they_are(tmp_path: Path, table: Callable[[str], Path]) -> None:
    table("nfs4")
    slabs = {"type": "file", "path": str(tmp_path / "mount"), "capacity": "64MiB", "layout": "slab"}
    assert not tier_of(**slabs).sharing().shared
    with pytest.raises(ConfigError, match=r"one\.shared: slabs belong to one machine; allowed: false, or layout: "):
        tier_of(**slabs, shared=True)


def test_a_shared_directory_gets_page_files_on_a_local_disk_too(tmp_path: Path, table: Callable[[str], Path]) -> None:
    """The machine that exports a directory has it on a disk of its own."""
    exported = {"type": "file", "path": str(tmp_path / "here"), "capacity": "64MiB", "io": "buffered"}
    store = open_tiers(config_of({"pool": {**exported, "shared": True}}))
    (tier,) = store.tiers
    assert tier.describe().details["layout"] == "pages"
    assert tier.describe().shared
    store.close()


def test_slabs_that_are_there_are_not_passed_off_as_shared(tmp_path: Path, table: Callable[[str], Path]) -> None:
    here = {"type": "file", "path": str(tmp_path / "here"), "capacity": "64MiB", "io": "buffered"}
    open_tiers(config_of({"pool": {**here, "layout": "slab"}})).close()
    with pytest.raises(StoreSetupError, match="holds slabs, which belong to one machine, and shared is true"):
        open_tiers(config_of({"pool": {**here, "shared": True}}))


def test_pools_are_shared_and_a_bucket_in_a_directory_as_much_as_the_directory(
    tmp_path: Path, table: Callable[[str], Path]
) -> None:
    assert tier_of(type="redis", url="redis://pool:6379").sharing().shared
    assert tier_of(type="object", url="s3://bucket/prefix").sharing().shared
    directory = tier_of(type="object", url=f"file://{tmp_path}/mount/objects")
    assert not directory.sharing().shared
    table("nfs4")
    assert directory.sharing().shared


def test_a_symbolic_link_is_followed_to_the_network_and_not_behind_it(
    tmp_path: Path, table: Callable[[str], Path]
) -> None:
    entries = read_mounts(table("nfs4"))
    (tmp_path / "mount" / "inner").symlink_to(tmp_path)  # on the server: nobody asks it
    (tmp_path / "data").symlink_to("./other/../mount")
    (tmp_path / "chain").symlink_to(tmp_path / "data" / "inner")
    assert followed(str(tmp_path / "chain" / "x"), entries) == f"{tmp_path}/mount/inner/x"
    assert is_on_network(str(tmp_path / "chain" / "x"))
    assert tier_of(**pages_in(tmp_path / "data" / "tier")).sharing().shared
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert not is_on_network(str(tmp_path / "loop" / "x"))


def test_following_links_looks_at_nothing_on_the_network(
    tmp_path: Path, table: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = read_mounts(table("nfs4"))
    seen: list[str] = []
    readlink = os.readlink

    def look(path: str) -> str:
        seen.append(path)
        return readlink(path)

    monkeypatch.setattr(os, "readlink", look)
    followed(str(tmp_path / "mount" / "a" / "b"), entries)
    assert seen and not [path for path in seen if path.startswith(str(tmp_path / "mount"))]


# -- what follows from it ----------------------------------------------------------------------------------------------


def test_a_decode_writer_looks_for_its_pages_in_the_shared_directory_and_not_on_its_own_disk(
    tmp_path: Path, table: Callable[[str], Path]
) -> None:
    table("nfs4")
    near = {"type": "file", "path": str(tmp_path / "near"), "capacity": "64MiB", "layout": "slab", "io": "buffered"}
    store = open_tiers(config_of({"near": near, "pool": pages_in(tmp_path / "mount")}, store_policies={"pool": "sync"}))
    keys = page_keys(3)
    tiers = {tier.name: tier for tier in store.tiers}
    store_pages(tiers["near"], keys)
    store_pages(tiers["pool"], keys[:1])
    assert store.count_leading_in_pool(keys) == 1
    store.close()


@pytest.mark.parametrize("required", [True, False])
def test_pages_of_a_lone_shared_directory_are_fetched_ahead(
    tmp_path: Path, table: Callable[[str], Path], required: bool
) -> None:
    table("nfs4")
    store = open_tiers(config_of({"pool": pages_in(tmp_path / "mount", required=required)}))
    keys = page_keys(3)
    store_pages(store, keys)
    assert store.count_leading(keys) == 3
    fetched_ahead = store.prefetcher  # type: ignore[attr-defined]
    assert fetched_ahead._plans or fetched_ahead._pages
    store.close()

"""Which file systems count as local, and what ``layout: auto`` makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache_ext.runtime.file_systems import file_system_of
from hicache_ext.storage.tiers.file.layouts import choose_layout

CAPACITY = 64 << 20


@pytest.fixture
def mounted(tmp_path):
    """A mount table in which ``tmp_path / "tier"`` is a mount of its own: (type, options) -> its path."""

    def write(kind: str, options: str = "rw", source: str = "/dev/x") -> Path:
        (tmp_path / "tier").mkdir(exist_ok=True)
        table = tmp_path / "mountinfo"
        table.write_text(
            "21 1 254:0 / / rw,relatime - ext4 /dev/root rw\n"
            f"99 21 0:77 / {tmp_path}/tier rw,relatime shared:1 - {kind} {source} {options}\n"
            "100 21 0:78 / /somewhere\\040else rw - xfs /dev/y rw\n"
        )
        return table

    return write


@pytest.mark.parametrize("kind", ["ext4", "xfs", "tmpfs"])
def test_a_local_file_system_gets_slabs(tmp_path, mounted, kind):
    choice = choose_layout(tmp_path / "tier", CAPACITY, mounted(kind))
    assert choice[0] == "slab"
    assert kind in choice[1]


@pytest.mark.parametrize("kind", ["btrfs", "zfs", "f2fs", "bcachefs"])
def test_a_file_system_that_writes_elsewhere_gets_page_files(tmp_path, mounted, kind):
    choice = choose_layout(tmp_path / "tier", CAPACITY, mounted(kind))
    assert choice[0] == "pages"
    assert f"{kind} is local, but writes changed blocks elsewhere" in choice[1]


@pytest.mark.parametrize(
    "kind", ["nfs", "nfs4", "lustre", "ceph", "gpfs", "fuse", "fuse.hf3fs", "9p", "virtiofs", "cifs", "newfs"]
)
def test_a_shared_or_unknown_file_system_gets_page_files_and_the_reason_names_it(tmp_path, mounted, kind):
    choice = choose_layout(tmp_path / "tier", CAPACITY, mounted(kind))
    assert choice[0] == "pages"
    assert kind in choice[1]


def test_a_directory_that_is_not_there_yet_is_judged_by_the_mount_it_will_be_on(tmp_path, mounted):
    table = mounted("nfs4")
    assert file_system_of(tmp_path / "tier" / "not" / "yet", table).type == "nfs4"
    assert file_system_of(tmp_path / "tierless", table).type == "ext4"
    assert file_system_of(Path("/somewhere else/x"), table).type == "xfs"


def test_the_last_of_two_mounts_over_one_point_counts(tmp_path, mounted):
    table = mounted("nfs4")
    with table.open("a") as file:
        file.write(f"101 21 0:79 / {tmp_path}/tier rw - xfs /dev/z rw\n")
    assert file_system_of(tmp_path / "tier", table).type == "xfs"


def test_an_overlay_is_a_disk_of_the_host(tmp_path, mounted):
    seen = file_system_of(tmp_path / "tier", mounted("overlay", f"rw,lowerdir=/l,upperdir={tmp_path}/upper,workdir=/w"))
    assert seen.local and seen.in_place and not seen.shared


def test_without_a_mount_table_nothing_is_known_to_be_local(tmp_path):
    choice = choose_layout(tmp_path / "tier", CAPACITY, tmp_path / "no such table")
    assert choice[0] == "pages"


def test_an_unlimited_capacity_gets_page_files(tmp_path, mounted):
    choice = choose_layout(tmp_path / "tier", None, mounted("ext4"))
    assert (choice[0], "unlimited" in choice[1]) == ("pages", True)


@pytest.mark.parametrize(("held", "directory", "kind"), [("slab", "v3/slabs", "nfs4"), ("pages", "pages", "ext4")])
def test_a_directory_keeps_the_layout_that_it_has(tmp_path, mounted, held, directory, kind):
    table = mounted(kind)
    (tmp_path / "tier" / directory).mkdir(parents=True)
    ((tmp_path / "tier" / directory).parent / "members").touch()
    choice = choose_layout(tmp_path / "tier", CAPACITY, table)
    assert (choice[0], "already" in choice[1]) == (held, True)

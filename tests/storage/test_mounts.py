"""On which file system a path is."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache_ext.runtime.file_systems import is_on_network, mount_of, on_root_file_system, read_mounts

MOUNTS = """\
22 1 259:1 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p1 rw
30 22 0:40 / /mnt/pool rw,relatime shared:2 - nfs4 server:/pool rw,vers=4.2
31 30 259:2 / /mnt/pool/local rw shared:3 - xfs /dev/nvme1n1 rw
32 22 0:41 / /mnt/with\\040space rw - fuse.juicefs JuiceFS:x rw
33 22 0:42 / /mnt/twice rw - nfs4 server:/a rw
34 33 259:3 / /mnt/twice rw - ext4 /dev/nvme2n1 rw
"""


@pytest.mark.parametrize(
    ("path", "kind", "network"),
    [
        ("/", "ext4", False),
        ("/home/x", "ext4", False),
        ("/mnt/pool", "nfs4", True),
        ("/mnt/pool/cache/not/there/yet", "nfs4", True),
        ("/mnt/poolside", "ext4", False),
        ("/mnt/pool/local/cache", "xfs", False),
        ("/mnt/with space/cache", "fuse.juicefs", True),
        ("/mnt/twice", "ext4", False),
    ],
)
def test_the_longest_and_last_mount_counts(tmp_path: Path, path: str, kind: str, network: bool) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(MOUNTS)
    mount = mount_of(path, read_mounts(table))
    assert mount is not None and mount.type == kind
    assert is_on_network(path, table) is network


def test_no_table_is_no_network(tmp_path: Path) -> None:
    assert not is_on_network("/mnt/pool", tmp_path / "none")


def test_broken_lines_are_passed_over(tmp_path: Path) -> None:
    table = tmp_path / "mountinfo"
    table.write_text("nonsense\n1 2 3 - x\n22 1 259:1 / / rw - ext4\n")
    (mount,) = read_mounts(table)
    assert (mount.type, mount.source, mount.point) == ("ext4", "", "/")


def test_this_machine_has_a_mount_for_every_path(tmp_path: Path) -> None:
    mount = mount_of(str(tmp_path / "not there yet"), read_mounts())
    assert mount is not None and mount.type


ON_ROOT = """\
22 1 259:1 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p1 rw
30 22 259:2 / /mnt/disk rw - xfs /dev/nvme1n1 rw
31 22 259:1 /srv/cache /mnt/part rw - ext4 /dev/nvme0n1p1 rw
32 22 0:41 / /dev/shm rw - tmpfs tmpfs rw
33 22 0:42 / /mnt/gone rw - nfs4 server:/a rw
"""
CONTAINER = """\
500 400 0:77 / / rw,relatime - overlay overlay rw,lowerdir=/l,upperdir=/u,workdir=/w
501 500 259:1 /var/lib/kubelet/pods/x/volumes/cache /cache rw - ext4 /dev/nvme0n1p1 rw
502 500 259:1 /etc/hosts /etc/hosts rw - ext4 /dev/nvme0n1p1 rw
"""


@pytest.mark.parametrize(
    ("table", "path", "kind"),
    [
        (ON_ROOT, "/var/cache", "ext4"),
        (ON_ROOT, "/mnt", "ext4"),
        (ON_ROOT, "/mnt/diskless", "ext4"),
        (ON_ROOT, "/mnt/not/mounted/yet", "ext4"),
        # Another part of the root file system, made visible here: it fills the same disk.
        (ON_ROOT, "/mnt/part/l3", "ext4"),
        (ON_ROOT, "/mnt/disk", None),
        (ON_ROOT, "/mnt/disk/l3/not/there", None),
        (ON_ROOT, "/dev/shm/l3", None),
        (ON_ROOT, "/mnt/gone/l3", None),
        (CONTAINER, "/data/l3", "overlay"),
        # A volume is the host's, and stays when the container goes.
        (CONTAINER, "/cache/l3", None),
    ],
)
def test_what_is_on_the_root_file_system(tmp_path: Path, table: str, path: str, kind: str | None) -> None:
    file = tmp_path / "mountinfo"
    file.write_text(table)
    root = on_root_file_system(path, file)
    assert root is None if kind is None else f"({kind})" in str(root)


def test_a_link_to_a_disk_is_on_that_disk(tmp_path: Path) -> None:
    file = tmp_path / "mountinfo"
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    file.write_text(f"22 1 259:1 / / rw - ext4 /dev/a rw\n30 22 259:2 / {tmp_path}/disk rw - xfs /dev/b rw\n")
    assert on_root_file_system(str(tmp_path / "link" / "l3"), file) is None
    assert on_root_file_system(str(tmp_path / "l3"), file) is not None


def test_without_a_table_nothing_is_said_of_the_root(tmp_path: Path) -> None:
    assert on_root_file_system("/var/cache", tmp_path / "none") is None

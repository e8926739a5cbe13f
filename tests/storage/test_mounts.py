"""On which file system a path is."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache_ext.storage.mounts import is_on_network, mount_of, read_mounts

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

"""What a kubelet does to the files of a pod, done here: the contents of a volume change, and its files change hands.

::

    volume = ConfigMapVolume(directory, {"hicache.yaml": text})
    volume.update({"hicache.yaml": other})        # as the kubelet's AtomicWriter does it
    give_to_group(directory, 1000)                # as it does for ``fsGroup``

Secrets are written as ConfigMaps are. The steps are those of Kubernetes' pkg/volume/util/atomic_writer.go and
pkg/volume/volume_linux.go.
"""

from __future__ import annotations

import itertools
import os
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path

_numbers = itertools.count()
_READ_WRITE, _EXECUTE = 0o660, 0o110


class ConfigMapVolume:
    """A mounted ConfigMap or Secret: ``NAME -> ..data/NAME``, ``..data -> ..TIME``, and all files in the latter."""

    def __init__(self, directory: Path, data: Mapping[str, str]) -> None:
        self.directory = directory
        directory.mkdir(parents=True)
        self.update(data)

    def update(self, data: Mapping[str, str]) -> None:
        """New files in a new directory, then one rename of the link to it, then the old directory goes."""
        current = self.directory / "..data"
        old = os.readlink(current) if current.is_symlink() else None
        new = self.directory / f"..2026_11_24_03_05_{next(_numbers):09d}"
        new.mkdir(mode=0o755)
        for name, text in data.items():
            (new / name).write_text(text)
        temporary = self.directory / "..data_tmp"
        temporary.symlink_to(new.name)
        temporary.rename(current)
        for name in data:
            if not (self.directory / name).is_symlink():
                (self.directory / name).symlink_to(Path("..data") / name)
        if old is not None:
            shutil.rmtree(self.directory / old)


def give_to_group(volume: Path, group: int, *, on_root_mismatch: bool = False) -> int:
    """What ``fsGroup: group`` does to a volume that supports it when a pod is started; how many files it changed.

    ``on_root_mismatch``: the ``fsGroupChangePolicy`` OnRootMismatch, with which the root of the volume alone decides.
    """
    if on_root_mismatch and not _mismatch(volume, group):
        return 0
    changed = 0
    for place in [volume, *volume.rglob("*")]:
        status = place.lstat()
        os.lchown(place, -1, group)
        if not stat.S_ISLNK(status.st_mode):
            mask = _READ_WRITE | (stat.S_ISGID | _EXECUTE if stat.S_ISDIR(status.st_mode) else 0)
            place.chmod(stat.S_IMODE(status.st_mode) | mask)
        changed += 1
    return changed


def _mismatch(volume: Path, group: int) -> bool:
    wanted = _READ_WRITE | _EXECUTE | stat.S_ISGID
    status = volume.stat()
    return status.st_gid != group or status.st_mode & wanted != wanted

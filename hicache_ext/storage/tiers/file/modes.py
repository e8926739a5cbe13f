"""The modes of the files in PATH, corrected when a server starts: somebody has changed them, or the configuration.

A directory of ours in PATH that holds nothing else is ours with all that is below it. What is not ours keeps its mode,
and so does PATH, or a directory in it, that holds such a thing. The directory of a newer release is left alone.
"""

from __future__ import annotations

import logging
import math
import os
import re
import stat
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

from hicache_ext.errors import StoreSetupError
from hicache_ext.runtime.access import IDENTITIES, Access, make_directory, make_tier_directory
from hicache_ext.storage.tiers.file.layouts import (
    IDENTITY_NAME,
    MEMBERS,
    TEMPORARY_FILE,
    Layout,
    layout_in,
    newer_versions,
    slab_home,
)

logger = logging.getLogger(__name__)

_FILES = re.compile(rf"usage|{MEMBERS}|io_probe\.(json|lock)|\.io_probe\.json\.[0-9]+\.[0-9]+|\.probe\.[0-9]+")
"""In PATH."""
_OF_IDENTITY = r"([0-9a-f]{32}|all)\.(json|cleared)"
_DIRECTORIES = {
    IDENTITIES: rf"{_OF_IDENTITY}|\.{_OF_IDENTITY}\.[0-9]+\.[0-9]+",
    "pins": r".+\.json|\..+\.json\.[0-9]+\.[0-9]+",
    "hints": r".+\.(hint|new)",
    "tmp": TEMPORARY_FILE.pattern,
    "pages": IDENTITY_NAME.pattern,
    "weights": IDENTITY_NAME.pattern,
}
"""In PATH, by name, and what matches the names in each."""
_IN_SLAB_HOME = rf"lock|{MEMBERS}|slabs|[0-9a-f]{{1,10}}\.sock"
_NOBODYS = re.compile(r"lost\+found|.+\.not-ours-[0-9a-f]{8}|\.hicache-ext-trial-.+")
"""Not ours, and not harmed when the directory around it is closed to others."""

_SECONDS = 10.0
"""Longest time for what is in a directory that was just closed to others: nobody can reach it any more, so its own mode
matters little."""


def prepare_directory(path: Path, access: Access, tier: str) -> None:
    """Make PATH and its parents, and give our files in it the modes of ``access``; logs one line if that changed
    anything. Raises OSError where PATH cannot be made, StoreSetupError where this account is not in the group."""
    layout = layout_in(path)
    try:
        make_tier_directory(path, access)
        make_directory(path / IDENTITIES, access)
    except PermissionError as error:
        if access.gid is not None and path.exists() and os.access(path, os.W_OK | os.X_OK):
            raise _no_such_right(path, access, tier) from error
        raise
    _Modes(path, access, tier).put_right(layout)


def _no_such_right(path: Path, access: Access, tier: str) -> StoreSetupError:
    return StoreSetupError(
        tier,
        f"{str(path)!r} cannot be given to the group {access.gid}: this account (uid {os.geteuid()}) is not a member",
        ["add it to the group, or name another group"],
    )


class _Modes:
    """Corrects the modes below one PATH, once."""

    def __init__(self, path: Path, access: Access, tier: str) -> None:
        self._path = path
        self._access = access
        self._tier = tier
        self._changed = 0
        self._kept: defaultdict[str, list[str]] = defaultdict(list)
        """What keeps a wrong mode, by the reason."""
        self._until = math.inf if access.group else time.monotonic() + _SECONDS

    def put_right(self, layout: Layout | None) -> None:
        """``layout``: of the tier that PATH was before. If it was none, everything in it is somebody else's, whatever
        its name: others use names like ``pages`` and ``weights``, too."""
        mode, newer = stat.S_IMODE(self._path.stat().st_mode), {place.name for place in newer_versions(self._path)}
        known = _DIRECTORIES | ({slab_home(self._path).name: _IN_SLAB_HOME} if layout == "slab" else {})
        places: list[tuple[str, list[str], list[str]]] = [(str(self._path), [], [])]
        """Directories, each with the paths of what is ours in it, and of what is not and harmed when it is closed."""
        _, files, strangers = places[0]
        for entry in _entries(self._path):
            is_directory = entry.is_dir(follow_symlinks=False)
            if layout is None and self._wrong(entry.path):
                # What another process makes that starts now has the right mode already.
                strangers.append(entry.path)
            elif is_directory and entry.name in known:
                inside = {one.path: re.fullmatch(known[entry.name], one.name) for one in _entries(entry.path)}
                others = [path for path, ours in inside.items() if not ours]
                places.append((entry.path, [path for path, ours in inside.items() if ours], others))
                strangers += others
            elif not is_directory and _FILES.fullmatch(entry.name):
                files.append(entry.path)
            elif entry.name not in newer:
                strangers.append(entry.path)
        # Close from outside inwards, open from inside outwards: after a kill at any point nothing is open that should
        # not be, and the next start goes on.
        for directory, ours, others in reversed(places) if self._access.group else places:
            if not self._access.group:
                self._put_shared(directory, others)
            for path in ours if layout is not None else ():
                self._put_all(path)
            if self._access.group:
                self._put_shared(directory, others)
        self._say(mode)

    def _put_shared(self, directory: str, strangers: list[str]) -> None:
        """Correct PATH, or a directory in it, unless it also holds something else."""
        status = os.stat(directory)
        is_sticky = status.st_mode & stat.S_ISVTX
        if not strangers and not is_sticky:
            self._correct(os.path.realpath(directory))
        elif self._is_wrong(status):
            logger.warning(
                "tier %s: %s %s and keeps its mode %04o%s",
                self._tier,
                directory,
                f"holds other things than this tier ({strangers[0]!r})"
                if strangers
                else "has the sticky bit of a place that accounts share",
                stat.S_IMODE(status.st_mode),
                ": whoever may write there can take the tier's directories away"
                if status.st_mode & 0o022 and not is_sticky
                else "",
            )

    def _put_all(self, path: str) -> None:
        """Correct a file of ours, or a directory with all that is in it, unless its own mode is right."""
        if not self._wrong(path):
            return
        if not self._access.group:
            self._correct(path)
        for directory, directories, files in os.walk(path, topdown=not self._access.group):
            for name in (*directories, *files):
                if time.monotonic() > self._until:
                    return
                self._correct(os.path.join(directory, name))
        if self._access.group:
            self._correct(path)

    def _wrong(self, path: str) -> bool:
        with suppress(OSError):
            return self._is_wrong(os.lstat(path))
        return False

    def _is_wrong(self, status: os.stat_result) -> bool:
        is_directory = stat.S_ISDIR(status.st_mode)
        if not (is_directory or stat.S_ISREG(status.st_mode) or stat.S_ISSOCK(status.st_mode)):
            return False
        if self._access.gid is not None and status.st_gid != self._access.gid:
            return True
        # A private directory may have the set-group-ID bit from its parent: that is no error.
        mask = 0o7777 if not is_directory else 0o2777 if self._access.group else 0o777
        return status.st_mode & mask != self._wanted(status) & mask

    def _wanted(self, status: os.stat_result) -> int:
        return self._access.directory_mode if stat.S_ISDIR(status.st_mode) else self._access.file_mode

    def _correct(self, path: str) -> None:
        """Change the file or directory that has this name now, whatever has it in a moment."""
        try:
            fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return
        opened = f"/proc/self/fd/{fd}"
        try:
            status = os.fstat(fd)
            if not self._is_wrong(status):
                return
            if status.st_uid != os.geteuid():
                self._kept[f"belong to another account than this one (uid {os.geteuid()})"].append(path)
                return
            try:
                if self._access.gid is not None:
                    os.chown(opened, -1, self._access.gid)
                os.chmod(opened, self._wanted(status))
            except OSError as error:
                if self._access.gid is not None and isinstance(error, PermissionError):
                    raise _no_such_right(self._path, self._access, self._tier) from error
            # Some file systems report success and change nothing.
            if self._is_wrong(os.fstat(fd)):
                self._kept["are on a file system that does not change modes"].append(path)
            else:
                self._changed += 1
        finally:
            os.close(fd)

    def _say(self, mode: int) -> None:
        if self._changed:
            logger.warning(
                "tier %s: %s had mode %04o: %d files and directories in it have modes %s now",
                self._tier,
                self._path,
                mode,
                self._changed,
                self._access,
            )
        for reason, paths in self._kept.items():
            logger.warning(
                "tier %s: %d files and directories, the first of them %s, %s and keep their mode; others may be able "
                "to read them",
                self._tier,
                len(paths),
                paths[0],
                reason,
            )


def _entries(directory: Path | str) -> list[os.DirEntry[str]]:
    """What is in a directory and somebody's."""
    try:
        with os.scandir(directory) as listing:
            return [entry for entry in listing if not _NOBODYS.fullmatch(entry.name)]
    except OSError:
        return []

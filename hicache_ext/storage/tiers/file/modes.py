"""The modes of the files in PATH, corrected when a server starts: older files, or files made with another mode.

A file that is not ours keeps its mode, and so does a directory that holds one. The directory of a newer release
(layouts.py) is left alone.
"""

from __future__ import annotations

import logging
import math
import os
import re
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from hicache_ext.errors import StoreSetupError
from hicache_ext.runtime.access import IDENTITIES, Access, make_directory, make_tier_directory

logger = logging.getLogger(__name__)

MEMBERS = "members"
"""In PATH, or in the directory of slabs: who uses it (runtime/members.py)."""
SLAB_VERSION = 3
"""Format of the slabs of this version, and the number of their directory."""
VERSION_NAME = re.compile(r"v([0-9]{1,9})")
"""A directory in PATH with one version's files."""

IDENTITY_NAME = re.compile(r"[0-9a-f]{32}")
FANOUT_NAME = re.compile(r"[0-9a-f]{2}")
"""A directory of pages alone."""
BUCKET_NAME = re.compile(r"[0-9a-f]{11}")
"""A directory of packs."""
FILES_NAME = re.compile(f"{FANOUT_NAME.pattern}|{BUCKET_NAME.pattern}")
PACK_NAME = re.compile(r"[0-9a-f]{11}-[0-9a-f]{10}-.+\.pack")
PAGE_NAME = re.compile(r"[0-9a-f]{64}\.page")
"""A page alone."""
SLAB_FILE = re.compile(r"([0-9a-f]{8})-([0-9]+)\.(slab|headers)")
TEMPORARY_FILE = re.compile(r"([0-9]{1,15})\.[0-9]+\.(?:tmp|clear)")
"""In PATH/tmp; its first group is the number of the member that writes."""
_OF_IDENTITY = r"([0-9a-f]{32}|all)\.(json|cleared)"


@dataclass(frozen=True, slots=True)
class _Directory:
    """What is ours in a directory: files by what their names match, and so directories."""

    files: str
    directories: Mapping[str, _Directory] = field(default_factory=dict)
    is_large: bool = False
    """It holds page files: who else has something in it is not looked for, and it is corrected only where its own mode
    is wrong."""


_NONE = "(?!)"
_PAGES_OF_IDENTITY = _Directory(
    _NONE,
    {
        FANOUT_NAME.pattern: _Directory(PAGE_NAME.pattern, is_large=True),
        BUCKET_NAME.pattern: _Directory(PACK_NAME.pattern, is_large=True),
    },
    is_large=True,
)
_SLAB_HOME = _Directory(
    r"lock|members|[0-9a-f]{1,10}\.sock",
    {"slabs": _Directory(SLAB_FILE.pattern)},
)
_TIER = _Directory(
    r"usage|members|io_probe\.(json|lock)|\.io_probe\.json\.[0-9]+\.[0-9]+|\.probe\.[0-9]+",
    {
        IDENTITIES: _Directory(rf"{_OF_IDENTITY}|\.{_OF_IDENTITY}\.[0-9]+\.[0-9]+"),
        "pins": _Directory(r".+\.json|\..+\.json\.[0-9]+\.[0-9]+"),
        "hints": _Directory(r".+\.(hint|new)"),
        "tmp": _Directory(TEMPORARY_FILE.pattern, {TEMPORARY_FILE.pattern: _PAGES_OF_IDENTITY}),
        "pages": _Directory(_NONE, {IDENTITY_NAME.pattern: _PAGES_OF_IDENTITY}),
        "weights": _Directory(r"[0-9a-f]{32}"),
    },
)
"""PATH; there also are the directories of versions (``_inside``)."""
_NOBODYS = re.compile(r"lost\+found|.+\.not-ours-[0-9a-f]{8}|\.hicache-ext-trial-.+")
"""Not ours, and not harmed when the directory around it is closed to others."""

_PAGE_FILES_SECONDS = 10.0
"""Longest time for page files in a directory that was just closed to others: nobody can reach them any more,
so their own mode matters little."""


def prepare_directory(path: Path, access: Access, tier: str, *, is_tier: bool) -> None:
    """Make PATH and its parents, and give our files in it the modes of ``access``; logs one line if that changed
    anything. Raises OSError where PATH cannot be made, StoreSetupError where this account is not in the group.

    ``is_tier``: whether PATH was a tier's before (layouts.py). If not, everything in it is somebody else's, whatever
    its name: others use names like ``index`` and ``weights``, too.
    """
    try:
        make_tier_directory(path, access)
        make_directory(path / IDENTITIES, access)
    except PermissionError as error:
        if access.gid is not None and path.exists() and os.access(path, os.W_OK | os.X_OK):
            raise _no_such_right(path, access, tier) from error
        raise
    _Modes(path, access, tier).put_right(is_tier=is_tier)


def name_in(directory: str) -> re.Pattern[str]:
    """The names of files of pages in this directory: of packs in a bucket, and of pages alone anywhere else."""
    return PACK_NAME if BUCKET_NAME.fullmatch(os.path.basename(directory)) else PAGE_NAME


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
        self._theirs: list[str] = []
        self._failed: list[str] = []
        self._until = math.inf if access.group else time.monotonic() + _PAGE_FILES_SECONDS

    def put_right(self, *, is_tier: bool) -> None:
        mode = stat.S_IMODE(self._path.stat().st_mode)
        if is_tier:
            self._put_all(self._path, _TIER)
        else:
            # What another process makes that starts now has the right mode already.
            ours, others = _ours_and_others(self._path, _TIER)
            self._put_shared(self._path, [*others, *[entry.name for entry, _ in ours if self._wrong(entry)]])
        self._say(mode)

    def _put_all(self, path: Path, directory: _Directory) -> None:
        """Correct a directory of ours and what is ours in it."""
        ours, others = _ours_and_others(path, directory)
        # Close from outside inwards, open from inside outwards: after a kill at any point nothing is open that should
        # not be, and the next start goes on.
        if not self._access.group:
            self._put_shared(path, others)
        for entry, inside in ours:
            if inside is not None:
                if not inside.is_large or self._wrong(entry):
                    self._put_all(Path(entry.path), inside)
            elif (not directory.is_large or time.monotonic() < self._until) and (status := self._wrong(entry)):
                self._change(entry.path, status)
        if self._access.group:
            self._put_shared(path, others)

    def _put_shared(self, directory: Path, strangers: list[str]) -> None:
        """Correct PATH, or a directory in it, unless it also holds files of others."""
        try:
            status = directory.lstat() if directory != self._path else directory.stat()
        except OSError:
            return
        if not self._is_wrong(status):
            return
        if not strangers and not status.st_mode & stat.S_ISVTX:
            self._change(str(directory), status)
            return
        logger.warning(
            "tier %s: %s %s and keeps its mode %04o%s",
            self._tier,
            directory,
            f"holds other things than this tier ({strangers[0]!r})"
            if strangers
            else "has the sticky bit of a place that accounts share",
            stat.S_IMODE(status.st_mode),
            ": whoever may write there can take the tier's directories away"
            if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX
            else "",
        )

    def _wrong(self, entry: os.DirEntry[str]) -> os.stat_result | None:
        """The status of an entry whose mode is not as it is to be; None for one that is gone, too."""
        with suppress(OSError):
            status = entry.stat(follow_symlinks=False)
            return status if self._is_wrong(status) else None
        return None

    def _is_wrong(self, status: os.stat_result) -> bool:
        if self._access.gid is not None and status.st_gid != self._access.gid:
            return True
        if stat.S_ISDIR(status.st_mode):
            # A private directory may have the set-group-ID bit from its parent: that is no error.
            mask = 0o2777 if self._access.group else 0o777
            return status.st_mode & mask != self._access.directory_mode & mask
        is_file = stat.S_ISREG(status.st_mode) or stat.S_ISSOCK(status.st_mode)
        return is_file and stat.S_IMODE(status.st_mode) != self._access.file_mode

    def _change(self, path: str, seen: os.stat_result) -> None:
        """Change the file or directory that was seen, and not another one that has taken its name since."""
        if seen.st_uid != os.geteuid():
            self._theirs.append(path)
            return
        try:
            fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return
        try:
            status = os.fstat(fd)
            if (status.st_dev, status.st_ino) != (seen.st_dev, seen.st_ino):
                return
            opened = f"/proc/self/fd/{fd}"
            if self._access.gid is not None and status.st_gid != self._access.gid:
                os.chown(opened, -1, self._access.gid)
            is_directory = stat.S_ISDIR(status.st_mode)
            os.chmod(opened, self._access.directory_mode if is_directory else self._access.file_mode)
            # Some file systems report success and change nothing.
            if self._is_wrong(os.fstat(fd)):
                self._failed.append(path)
            else:
                self._changed += 1
        except PermissionError as error:
            if self._access.gid is not None:
                raise _no_such_right(self._path, self._access, self._tier) from error
            self._failed.append(path)
        except OSError:
            self._failed.append(path)
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
        for paths, why in (
            (self._theirs, f"belong to another account than this one (uid {os.geteuid()})"),
            (self._failed, "are on a file system that does not change modes"),
        ):
            if paths:
                logger.warning(
                    "tier %s: %d files and directories, the first of them %s, %s and keep their mode; others may be "
                    "able to read them",
                    self._tier,
                    len(paths),
                    paths[0],
                    why,
                )


def _entries(directory: str | Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as listing:
            return list(listing)
    except OSError:
        return []


def _ours_and_others(
    path: Path | str, directory: _Directory
) -> tuple[list[tuple[os.DirEntry[str], _Directory | None]], list[str]]:
    """What is ours in a directory of ours, directories with what they are; and the names of what is not, and harmed
    when it is closed, there and below it."""
    ours: list[tuple[os.DirEntry[str], _Directory | None]] = []
    others: list[str] = []
    for entry in _entries(path):
        inside = _inside(entry, directory)
        if inside is not None or (
            re.fullmatch(directory.files, entry.name) and not entry.is_dir(follow_symlinks=False)
        ):
            ours.append((entry, inside))
            if inside is not None and not inside.is_large:
                others += [f"{entry.name}/{name}" for name in _ours_and_others(entry.path, inside)[1]]
        elif not (_NOBODYS.fullmatch(entry.name) or (directory is _TIER and _is_other_version(entry))):
            others.append(entry.name)
    return ours, others


def _inside(entry: os.DirEntry[str], directory: _Directory) -> _Directory | None:
    """What an entry of a directory of ours is; None where it is no directory of ours."""
    if not entry.is_dir(follow_symlinks=False):
        return None
    if directory is _TIER and _version_of(entry) == SLAB_VERSION:
        return _SLAB_HOME
    return next((inside for name, inside in directory.directories.items() if re.fullmatch(name, entry.name)), None)


def _version_of(entry: os.DirEntry[str]) -> int | None:
    """The version whose directory this entry of PATH is. Others have directories of such names, too: where nobody uses
    it as a tier, it is theirs."""
    match = VERSION_NAME.fullmatch(entry.name)
    return int(match[1]) if match and os.path.lexists(os.path.join(entry.path, MEMBERS)) else None


def _is_other_version(entry: os.DirEntry[str]) -> bool:
    return _version_of(entry) not in (None, SLAB_VERSION)

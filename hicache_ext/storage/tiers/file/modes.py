"""The modes of the files in PATH, corrected when a server starts: older files, or files made with another mode.

A file that is not ours keeps its mode, and so does a directory that holds one. The directory of a newer release
(manifest.py) is left alone.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hicache_ext.errors import StoreSetupError
from hicache_ext.runtime.access import IDENTITIES, Access, make_directory, make_tier_directory

logger = logging.getLogger(__name__)

MANIFEST = "hicache_ext.json"
SLAB_VERSION = 3
"""Format of the slabs of this version, and the number of their directory."""
VERSION_NAME = re.compile(r"v([0-9]{1,9})")
"""A directory in PATH with one version's files."""

_PAGES = "pages"

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
TEMPORARY_FILE = re.compile(r"([0-9]+|.+:[0-9]+:(?:[0-9]+|gone))\.[0-9]+\.(?:tmp|[0-9a-f]{32}\.clear)")
"""In PATH/tmp; its first group is the writer (``usage.Writers``)."""
_FILES = re.compile(
    r"hicache_ext\.json|usage|lock|members|trust|ttl\.json|expiry\.lock|io_probe\.(json|lock)"
    r"|\.(hicache_ext\.json|trust|ttl\.json|io_probe\.json)\.[0-9]+\.[0-9]+|\.probe\.[0-9]+"
)
"""Our files in PATH."""
_OF_IDENTITY = r"([0-9a-f]{32}|all)\.(json|cleared)"


@dataclass(frozen=True, slots=True)
class _Directory:
    """What is ours in a directory: names of files, and directories by name."""

    files: re.Pattern[str]
    directories: Mapping[str, _Directory] = field(default_factory=dict)


_SLABS = _Directory(SLAB_FILE)
_SLAB_HOME = _Directory(
    re.compile(r"hicache_ext\.json|\.hicache_ext\.json\.[0-9]+\.[0-9]+|lock|members|ranks|[0-9a-f]{1,10}\.sock"),
    {"slabs": _SLABS},
)
_DIRECTORIES = {
    IDENTITIES: _Directory(re.compile(rf"{_OF_IDENTITY}|\.{_OF_IDENTITY}\.[0-9]+\.[0-9]+")),
    "pins": _Directory(re.compile(r".+\.json|\..+\.json\.[0-9]+\.[0-9]+")),
    "hints": _Directory(re.compile(r".+\.(hint|new)")),
    "tmp": _Directory(TEMPORARY_FILE),
    _PAGES: _Directory(IDENTITY_NAME),
    "weights": _Directory(re.compile(r"[0-9a-f]{32}")),
}
"""Our directories in PATH."""
_TIER = _Directory(_FILES, _DIRECTORIES)
_NOBODYS = re.compile(r"lost\+found|.+\.not-ours-[0-9a-f]{8}|\.hicache-ext-trial-.+")
"""Not ours, and not harmed when PATH is closed to others."""

_PAGE_FILES_SECONDS = 10.0
"""Longest time for page files in a directory that was just closed to others: nobody can reach them any more,
so their own mode matters little."""


def prepare_directory(path: Path, access: Access, tier: str, *, is_tier: bool) -> None:
    """Make PATH and its parents, and give our files in it the modes of ``access``; logs one line if that changed
    anything. Raises OSError where PATH cannot be made, StoreSetupError where this account is not in the group.

    ``is_tier``: whether PATH was a tier's before (manifest.py). If not, everything in it is somebody else's, whatever
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


def holds_only_ours(directory: Path) -> bool:
    """Whether PATH, or one version's directory in it, has something of ours beside its manifest and nothing of others,
    going by names alone. Never raises OSError."""
    known = _SLAB_HOME if VERSION_NAME.fullmatch(directory.name) else _TIER
    ours, others = _ours_and_others(directory, known)
    names = {entry.name for entry in ours} - {MANIFEST}
    # Something else may have taken the place of a directory of ours.
    names |= known.directories.keys() & set(others)
    if known is _TIER:
        names |= {name for name in others if VERSION_NAME.fullmatch(name) and (directory / name / MANIFEST).is_file()}
    return bool(names) and all(name in names or _NOBODYS.fullmatch(name) for name in others)


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

    def put_right(self, *, is_tier: bool) -> None:
        entries = _entries(self._path)
        strangers = [stranger for entry in entries if (stranger := self._stranger(entry, is_tier))]
        mode = stat.S_IMODE(self._path.stat().st_mode)
        # Close from outside inwards, open from inside outwards: after a kill at any point nothing is open that should
        # not be, and the next start goes on.
        if not self._access.group:
            self._put_shared(self._path, strangers)
        for entry in entries if is_tier else ():
            if not _has_our_name(entry):
                continue
            if entry.name == _PAGES and entry.is_dir(follow_symlinks=False):
                self._put_pages_right(entry)
            else:
                self._put_all(entry, _directory(entry))
        if self._access.group:
            self._put_shared(self._path, strangers)
        self._say(mode)

    def _stranger(self, entry: os.DirEntry[str], is_tier: bool) -> str:
        """The name of what is not this tier's in an entry of PATH; mostly empty."""
        if _NOBODYS.fullmatch(entry.name) or _is_other_version(entry):
            return ""
        if not _has_our_name(entry):
            return entry.name
        if not is_tier:
            # Made by another process that starts now: its mode is right already.
            return "" if self._is_right(entry) else entry.name
        directory = _directory(entry)
        others = [] if directory is None else _others_below(entry, directory)
        return f"{entry.name}/{others[0]}" if others else ""

    def _put_all(self, entry: os.DirEntry[str], directory: _Directory | None) -> None:
        """Correct an entry of ours and, if it is a directory, what is ours in it."""
        if directory is None:
            self._put(entry)
            return
        self._put_shared(Path(entry.path), _others_below(entry, directory))
        for inner in _ours_and_others(entry.path, directory)[0]:
            self._put_all(inner, directory.directories.get(inner.name))

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

    def _put_pages_right(self, pages: os.DirEntry[str]) -> None:
        """Page files are many: they are corrected only when the mode of their directory was wrong."""
        status = pages.stat(follow_symlinks=False)
        if not self._is_wrong(status):
            return
        until = float("inf") if self._access.group else time.monotonic() + _PAGE_FILES_SECONDS
        identities, strangers = _ours_and_others(pages.path, _DIRECTORIES[_PAGES])
        if not self._access.group:
            self._put_shared(Path(pages.path), strangers)
        for identity in identities:
            if strangers and self._is_right(identity):
                # Beside files of others the mode of the directory stays wrong and cannot say that this was done.
                continue
            if not self._access.group:
                self._put(identity)
            for place in _entries(identity.path):
                if not FILES_NAME.fullmatch(place.name):
                    continue
                self._put(place)
                names = name_in(place.path)
                for page in _entries(place.path) if time.monotonic() < until else ():
                    if names.fullmatch(page.name):
                        self._put(page)
            if self._access.group:
                self._put(identity)
        if self._access.group:
            self._put_shared(Path(pages.path), strangers)

    def _put(self, entry: os.DirEntry[str]) -> None:
        try:
            status = entry.stat(follow_symlinks=False)
        except OSError:
            return
        if self._is_wrong(status):
            self._change(entry.path, status)

    def _is_right(self, entry: os.DirEntry[str]) -> bool:
        """Also True for an entry that is gone."""
        try:
            return not self._is_wrong(entry.stat(follow_symlinks=False))
        except OSError:
            return True

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


def _has_our_name(entry: os.DirEntry[str]) -> bool:
    if entry.is_dir(follow_symlinks=False):
        return _directory(entry) is not None
    return entry.is_file(follow_symlinks=False) and _FILES.fullmatch(entry.name) is not None


def _directory(entry: os.DirEntry[str]) -> _Directory | None:
    """What is ours in an entry of PATH; None where it is no directory of ours."""
    if not entry.is_dir(follow_symlinks=False):
        return None
    return _SLAB_HOME if _version_of(entry) == SLAB_VERSION else _DIRECTORIES.get(entry.name)


def _version_of(entry: os.DirEntry[str]) -> int | None:
    """The version whose directory this entry of PATH is. Others have directories of such names, too: without a manifest
    in it, it is theirs."""
    match = VERSION_NAME.fullmatch(entry.name)
    return int(match[1]) if match and os.path.lexists(os.path.join(entry.path, MANIFEST)) else None


def _is_other_version(entry: os.DirEntry[str]) -> bool:
    return _version_of(entry) not in (None, SLAB_VERSION)


def _others_below(entry: os.DirEntry[str], directory: _Directory) -> list[str]:
    """The names of what is not ours in a directory of ours, and below it."""
    ours, others = _ours_and_others(entry.path, directory)
    for inner in ours:
        inside = directory.directories.get(inner.name)
        if inside is not None:
            others += [f"{inner.name}/{name}" for name in _others_below(inner, inside)]
    return others


def _ours_and_others(path: str | Path, directory: _Directory) -> tuple[list[os.DirEntry[str]], list[str]]:
    """Our entries in a directory of ours, and the names of the others."""
    ours: list[os.DirEntry[str]] = []
    others: list[str] = []
    for inner in _entries(path):
        if inner.name in directory.directories:
            is_ours = inner.is_dir(follow_symlinks=False)
        else:
            is_ours = directory.files.fullmatch(inner.name) is not None
        if is_ours:
            ours.append(inner)
        else:
            others.append(inner.name)
    return ours, others

"""What is in PATH: which layout a directory of the file tier has, by the names in it, which one suits a new one, and
the modes of its files.

Page files (format 2) are in PATH itself, slabs (format 3) in PATH/v3. A format to come has a directory of its own
(``v4``). So nothing but names says what a directory is, and no file that says it can be damaged. Besides ``pages`` or
``slabs`` stands ``members`` (runtime/members.py), before the first page is there. Reasons:
docs/decisions/shared-directories.md.

The layout that suits a new directory: slabs have an index in memory that one machine's processes share, and are
preallocated. A file system that other machines may see, or that writes a changed block elsewhere, so that preallocated
files keep no room, gets page files, and so does every one where the native core was not built. Reasons:
docs/decisions/layout-and-io-auto.md.

Modes are corrected when a server starts: somebody has changed them, or the configuration. A directory of ours in PATH
that holds nothing else is ours with all that is below it. What is not ours keeps its mode, and so does PATH, or a
directory in it, that holds such a thing. The directory of a newer release is left alone.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import re
import stat
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Literal

from hicache_ext import native
from hicache_ext.errors import StoreSetupError
from hicache_ext.runtime.access import (
    IDENTITIES,
    Access,
    make_directory,
    make_tier_directory,
    move_aside,
    open_plain_file,
)
from hicache_ext.runtime.file_systems import MOUNTINFO, file_system_of

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

Layout = Literal["pages", "slab"]
FORMATS = {"pages": 2, "slab": SLAB_VERSION}
"""Layout -> format of its files."""

_SLABS = "slabs"


def name_in(directory: str) -> re.Pattern[str]:
    """The names of files of pages in this directory: of packs in a bucket, and of pages alone anywhere else."""
    return PACK_NAME if BUCKET_NAME.fullmatch(os.path.basename(directory)) else PAGE_NAME


def slab_home(path: Path) -> Path:
    """The directory in PATH with the slabs of this version."""
    return path / f"v{SLAB_VERSION}"


def layout_in(path: Path) -> Layout | None:
    """Return the layout of the directory ``path``; None where it is no tier's. Raises OSError."""
    return next(iter(_layouts_in(path)), None)


def _layouts_in(path: Path) -> list[Layout]:
    """Mostly one, or none. Raises OSError."""
    found: list[Layout] = ["pages"] if _is_used(path, "pages", IDENTITY_NAME) else []
    return [*found, "slab"] if _is_used(slab_home(path), _SLABS, SLAB_FILE) else found


def _is_used(home: Path, directory: str, name: re.Pattern[str]) -> bool:
    """Whether a server has used ``home`` for a layout that has its pages in this directory under such names. Raises
    OSError where that is not known."""
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(home / directory) as listing:
        # Others have directories of such names, too: an empty one proves nothing.
        return any(name.fullmatch(entry.name) for entry in listing) or stat.S_ISREG((home / MEMBERS).lstat().st_mode)
    return False


def members_file(path: Path) -> Path:
    """The file in a tier's directory that says who uses it. Raises OSError."""
    return (slab_home(path) if layout_in(path) == "slab" else path) / MEMBERS


def newer_versions(path: Path) -> list[Path]:
    """The directories of newer releases in ``path``, which are left alone. Never raises OSError."""
    with suppress(OSError):
        found = [(int(match[1]), path / name) for name in os.listdir(path) if (match := VERSION_NAME.fullmatch(name))]
        return [place for number, place in sorted(found) if number > SLAB_VERSION and os.path.exists(place / MEMBERS)]
    return []


def check_before_start(path: Path, layout: str, tier: str) -> None:
    """Raises StoreSetupError with a sentence unless a tier of this layout may use ``path``: what is there is of this
    layout, or of nobody yet, and the native core is there for slabs.

    Changes nothing. Raises OSError as the disk does, and for want of what the core needs to be loaded.
    """
    for found in _layouts_in(path):
        if found != layout:
            raise StoreSetupError(
                tier,
                f"{str(slab_home(path) if found == 'slab' else path)!r} holds format {FORMATS[found]}, layout "
                f"{found!r}; this tier writes format {FORMATS[layout]}, layout {layout!r}",
                ["name another path, or remove that directory"],
            )
    if layout == "slab" and (why := native.lacking()) is not None:
        raise StoreSetupError(
            tier,
            f"layout of {str(path)!r} is slab, which needs the native core, and that is not there: {why}",
            [native.REMEDY, "or set layout: pages with another path"],
        )


def adopt(path: Path, layout: Layout, tier: str) -> None:
    """Make ``path`` a directory of this layout, unless it is one: with all its directories, which survive a power loss,
    and what tells it from others. Logs a warning of newer versions.

    Raises as ``check_before_start``.
    """
    check_before_start(path, layout, tier)
    make_tier_directory(path)
    # First the one that says which modes the others have.
    make_directory(path / IDENTITIES)
    home = slab_home(path) if layout == "slab" else path
    for directory in (home, home / _SLABS) if layout == "slab" else (path / "pages", path / "tmp"):
        if layout == "slab" and directory.is_symlink():
            move_aside(directory, unless=stat.S_ISDIR)
        make_directory(directory)
    os.close(open_plain_file(home / MEMBERS, os.O_RDWR))
    # Another process may have been first, with another layout.
    check_before_start(path, layout, tier)
    if newer := newer_versions(path):
        logger.warning(
            "tier %s: %s holds pages of a newer release, which this one cannot read: they stay, and their bytes do not "
            "count in the capacity",
            tier,
            ", ".join(map(str, newer)),
        )


def choose_layout(
    path: Path, capacity: int | None, mountinfo: Path = MOUNTINFO, *, shared: bool = False
) -> tuple[Layout, str]:
    """Return what ``layout: auto`` means for ``path``, and why. A directory that is a tier already keeps its layout.
    Never raises."""
    with suppress(OSError):  # The store reports what is wrong.
        if (kept := layout_in(path)) is not None:
            return kept, "the directory has that layout already"
    if shared:
        return "pages", "shared is true, and slabs belong to one machine"
    if capacity is None:
        return "pages", "capacity is unlimited, and slabs are preallocated"
    file_system = file_system_of(path, mountinfo)
    if not file_system.local:
        return "pages", file_system.reason
    if not file_system.in_place:
        elsewhere = "writes changed blocks elsewhere, so that preallocated slabs reserve no room"
        return "pages", f"{file_system.reason}, but {elsewhere}"
    if native.is_absent():
        return "pages", f"slabs need the native core, which is not there: {native.why_not()}"
    return "slab", file_system.reason


# -- modes ---------------------------------------------------------------------------------------------------------

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
        strangers: list[str] = []
        places: dict[str, list[str] | None] = {str(self._path): strangers}
        """From outside inwards: PATH and directories in it, each with what is not ours in it and harmed when it is
        closed; None for what is ours with all that is in it."""
        for entry in _entries(self._path):
            is_directory = entry.is_dir(follow_symlinks=False)
            if layout is None and self._wrong(entry.path):
                # What another process makes that starts now has the right mode already.
                strangers.append(entry.path)
            elif is_directory and entry.name in known:
                inside = {one.path: re.fullmatch(known[entry.name], one.name) for one in _entries(entry.path)}
                places[entry.path] = others = [path for path, ours in inside.items() if not ours]
                places |= dict.fromkeys(path for path, ours in inside.items() if ours and layout is not None)
                strangers += others
            elif not is_directory and _FILES.fullmatch(entry.name):
                places[entry.path] = None
            elif entry.name not in newer:
                strangers.append(entry.path)
        # Close from outside inwards, open from inside outwards: after a kill at any point nothing is open that should
        # not be, and the next start goes on.
        for place in reversed(places) if self._access.group else places:
            if (found := places[place]) is None:
                self._put_all(place)
            else:
                self._put_shared(place, found)
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
        trees = os.walk(path, topdown=not self._access.group)
        below = (os.path.join(place, name) for place, *names in trees for name in itertools.chain(*names))
        for one in itertools.chain(below, [path]) if self._access.group else itertools.chain([path], below):
            self._correct(one)
            if time.monotonic() > self._until:
                return

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

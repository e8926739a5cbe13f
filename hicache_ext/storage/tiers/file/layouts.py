"""Layouts of the file tier: recognizes a directory's layout by its names, chooses one, and corrects the files' modes.

Page files (format 2) are in PATH itself, slabs (format 3) in PATH/v3. A future format gets a directory of its own
(``v4``). Names alone identify a directory: there is no descriptive file that could be damaged. Next to ``pages`` or
``slabs``, there is ``members`` (runtime/members.py) before the first page is written. Reasons:
docs/decisions/shared-directories.md.

Choosing a layout: slabs are preallocated, and the processes of one machine share their in-memory index. Page files are
chosen for a file system that other machines may see, or that writes changed blocks elsewhere, so that preallocation
reserves no space; and wherever the native core was not built. Reasons: docs/decisions/layout-and-io-auto.md.

Modes are corrected when a server starts, because someone may have changed them or the configuration. A directory of
ours in PATH that holds nothing else is ours with everything below it. Foreign files keep their modes, and so do PATH
and directories in it that hold any. The directory of a newer release is left alone.
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
"""File in PATH, or in the directory of slabs, that tells who uses it (runtime/members.py)."""
SLAB_VERSION = 3
"""Format of the slabs of this version, and the number of their directory."""
VERSION_NAME = re.compile(r"v([0-9]{1,9})")
"""Name of a directory in PATH with the files of one version."""

IDENTITY_NAME = re.compile(r"[0-9a-f]{32}")
FANOUT_NAME = re.compile(r"[0-9a-f]{2}")
"""Name of a directory of pages alone."""
BUCKET_NAME = re.compile(r"[0-9a-f]{11}")
"""Name of a directory of packs."""
FILES_NAME = re.compile(f"{FANOUT_NAME.pattern}|{BUCKET_NAME.pattern}")
PACK_NAME = re.compile(r"[0-9a-f]{11}-[0-9a-f]{10}-.+\.pack")
PAGE_NAME = re.compile(r"[0-9a-f]{64}\.page")
"""Name of the file of a page alone."""
SLAB_FILE = re.compile(r"([0-9a-f]{8})-([0-9]+)\.(slab|headers)")
TEMPORARY_FILE = re.compile(r"([0-9]{1,15})\.[0-9]+\.(?:tmp|clear)")
"""Name of a file in PATH/tmp; the first group is the number of the member that writes it."""

Layout = Literal["pages", "slab"]
FORMATS = {"pages": 2, "slab": SLAB_VERSION}
"""Layout -> format of its files."""

_SLABS = "slabs"


def name_in(directory: str) -> re.Pattern[str]:
    """Return the pattern of names of page files in this directory: packs in a bucket, else pages alone."""
    return PACK_NAME if BUCKET_NAME.fullmatch(os.path.basename(directory)) else PAGE_NAME


def slab_home(path: Path) -> Path:
    """Return the directory in PATH with the slabs of this version."""
    return path / f"v{SLAB_VERSION}"


def layout_in(path: Path) -> Layout | None:
    """Return the layout of the directory ``path``; None if it does not belong to a tier. Raises OSError."""
    return next(iter(_layouts_in(path)), None)


def _layouts_in(path: Path) -> list[Layout]:
    """Return all layouts found in ``path``: normally one, or none. Raises OSError."""
    found: list[Layout] = ["pages"] if _is_used(path, "pages", IDENTITY_NAME) else []
    return [*found, "slab"] if _is_used(slab_home(path), _SLABS, SLAB_FILE) else found


def _is_used(home: Path, directory: str, name: re.Pattern[str]) -> bool:
    """Return whether a server has used ``home`` for the layout that keeps its pages in this directory under such names.
    Raises OSError if that cannot be determined."""
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(home / directory) as listing:
        # Other programs use such directory names, too: an empty directory proves nothing.
        return any(name.fullmatch(entry.name) for entry in listing) or stat.S_ISREG((home / MEMBERS).lstat().st_mode)
    return False


def members_file(path: Path) -> Path:
    """Return the path of the file in a tier's directory that tells who uses it. Raises OSError."""
    return (slab_home(path) if layout_in(path) == "slab" else path) / MEMBERS


def newer_versions(path: Path) -> list[Path]:
    """Return the directories of newer releases in ``path``, which are left alone. Never raises OSError."""
    with suppress(OSError):
        found = [(int(match[1]), path / name) for name in os.listdir(path) if (match := VERSION_NAME.fullmatch(name))]
        return [place for number, place in sorted(found) if number > SLAB_VERSION and os.path.exists(place / MEMBERS)]
    return []


def check_before_start(path: Path, layout: str, tier: str) -> None:
    """Raise StoreSetupError with a sentence unless a tier of this layout may use ``path``: it has this layout or none
    yet, and for slabs the native core is available.

    Changes nothing. Raises the disk's OSError, and OSError if resources to load the core are lacking.
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
    """Make ``path`` a directory of this layout, unless it is one: create all its directories, durably, and the file
    that identifies it. Logs a warning about newer versions.

    Raises the same errors as ``check_before_start``.
    """
    check_before_start(path, layout, tier)
    make_tier_directory(path)
    # Create it first: it determines the modes of the others.
    make_directory(path / IDENTITIES)
    home = slab_home(path) if layout == "slab" else path
    for directory in (home, home / _SLABS) if layout == "slab" else (path / "pages", path / "tmp"):
        if layout == "slab" and directory.is_symlink():
            move_aside(directory, unless=stat.S_ISDIR)
        make_directory(directory)
    os.close(open_plain_file(home / MEMBERS, os.O_RDWR))
    # Check again: another process may have been first, with another layout.
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
    """Return what ``layout: auto`` means for ``path``, and why. An existing tier directory keeps its layout. Never
    raises."""
    with suppress(OSError):  # The store will report the error.
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
"""Names of the tier's files in PATH."""
_IDENTITY_FILE = r"([0-9a-f]{32}|all)\.(json|cleared)"
_DIRECTORIES = {
    IDENTITIES: rf"{_IDENTITY_FILE}|\.{_IDENTITY_FILE}\.[0-9]+\.[0-9]+",
    "pins": r".+\.json|\..+\.json\.[0-9]+\.[0-9]+",
    "hints": r".+\.(hint|new)",
    "tmp": TEMPORARY_FILE.pattern,
    "pages": IDENTITY_NAME.pattern,
    "weights": IDENTITY_NAME.pattern,
}
"""Directories in PATH -> pattern of the names in each."""
_IN_SLAB_HOME = rf"lock|{MEMBERS}|slabs|[0-9a-f]{{1,10}}\.sock"
_HARMLESS = re.compile(r"lost\+found|.+\.not-ours-[0-9a-f]{8}|\.hicache-ext-trial-.+")
"""Names of entries that are not ours but are not harmed if the directory around them is closed to others."""

_MAX_SECONDS = 10.0
"""Longest time to correct what is in a directory that was just closed to others: they cannot reach it any more, so that
its own mode matters little."""


def prepare_directory(path: Path, access: Access, tier: str) -> None:
    """Make PATH and its parents, and give our files in it the modes of ``access``; log one line if that changed
    anything. Raises OSError if PATH cannot be made, StoreSetupError if this account is not in the group."""
    layout = layout_in(path)
    try:
        make_tier_directory(path, access)
        make_directory(path / IDENTITIES, access)
    except PermissionError as error:
        if access.gid is not None and path.exists() and os.access(path, os.W_OK | os.X_OK):
            raise _not_in_group(path, access, tier) from error
        raise
    _Modes(path, access, tier).correct_all(layout)


def _not_in_group(path: Path, access: Access, tier: str) -> StoreSetupError:
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
        self._uncorrected: defaultdict[str, list[str]] = defaultdict(list)
        """Reason -> paths that keep a wrong mode."""
        self._deadline = math.inf if access.group else time.monotonic() + _MAX_SECONDS

    def correct_all(self, layout: Layout | None) -> None:
        """Correct all modes. ``layout``: that of PATH before this start. If None, everything in PATH is foreign,
        whatever its name: other programs use names like ``pages`` and ``weights``, too."""
        mode, newer = stat.S_IMODE(self._path.stat().st_mode), {place.name for place in newer_versions(self._path)}
        known = _DIRECTORIES | ({slab_home(self._path).name: _IN_SLAB_HOME} if layout == "slab" else {})
        foreign_entries: list[str] = []
        places: dict[str, list[str] | None] = {str(self._path): foreign_entries}
        """PATH and entries in it, outermost first -> the foreign entries inside that closing it would harm; None for an
        entry that is ours with everything in it."""
        for entry in _entries(self._path):
            is_directory = entry.is_dir(follow_symlinks=False)
            if layout is None and self._has_wrong_mode(entry.path):
                # Not if its mode is right: another starting process may have just made it.
                foreign_entries.append(entry.path)
            elif is_directory and entry.name in known:
                inside = {inner.path: re.fullmatch(known[entry.name], inner.name) for inner in _entries(entry.path)}
                places[entry.path] = foreign = [path for path, ours in inside.items() if not ours]
                places |= dict.fromkeys(path for path, ours in inside.items() if ours and layout is not None)
                foreign_entries += foreign
            elif not is_directory and _FILES.fullmatch(entry.name):
                places[entry.path] = None
            elif entry.name not in newer:
                foreign_entries.append(entry.path)
        # Close directories outermost first, open them innermost first: after a kill at any point, nothing is open that
        # should not be, and the next start continues.
        for place in reversed(places) if self._access.group else places:
            if (found := places[place]) is None:
                self._correct_tree(place)
            else:
                self._correct_directory(place, found)
        self._report(mode)

    def _correct_directory(self, directory: str, foreign_entries: list[str]) -> None:
        """Correct PATH, or a directory in it, unless it holds foreign entries or is sticky."""
        status = os.stat(directory)
        is_sticky = status.st_mode & stat.S_ISVTX
        if not foreign_entries and not is_sticky:
            self._correct(os.path.realpath(directory))
        elif self._is_wrong(status):
            logger.warning(
                "tier %s: %s %s and keeps its mode %04o%s",
                self._tier,
                directory,
                f"holds other things than this tier ({foreign_entries[0]!r})"
                if foreign_entries
                else "has the sticky bit of a place that accounts share",
                stat.S_IMODE(status.st_mode),
                ": whoever may write there can take the tier's directories away"
                if status.st_mode & 0o022 and not is_sticky
                else "",
            )

    def _correct_tree(self, path: str) -> None:
        """Correct a file of ours, or a directory with everything in it, unless its own mode is right."""
        if not self._has_wrong_mode(path):
            return
        trees = os.walk(path, topdown=not self._access.group)
        below = (os.path.join(place, name) for place, *names in trees for name in itertools.chain(*names))
        for each in itertools.chain(below, [path]) if self._access.group else itertools.chain([path], below):
            self._correct(each)
            if time.monotonic() > self._deadline:
                return

    def _has_wrong_mode(self, path: str) -> bool:
        with suppress(OSError):
            return self._is_wrong(os.lstat(path))
        return False

    def _is_wrong(self, status: os.stat_result) -> bool:
        is_directory = stat.S_ISDIR(status.st_mode)
        if not (is_directory or stat.S_ISREG(status.st_mode) or stat.S_ISSOCK(status.st_mode)):
            return False
        if self._access.gid is not None and status.st_gid != self._access.gid:
            return True
        # A private directory may have inherited the set-group-ID bit from its parent: that is correct.
        mask = 0o7777 if not is_directory else 0o2777 if self._access.group else 0o777
        return status.st_mode & mask != self._wanted(status) & mask

    def _wanted(self, status: os.stat_result) -> int:
        return self._access.directory_mode if stat.S_ISDIR(status.st_mode) else self._access.file_mode

    def _correct(self, path: str) -> None:
        """Correct the file or directory that has this name now, even if another one takes the name meanwhile."""
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
                self._uncorrected[f"belong to another account than this one (uid {os.geteuid()})"].append(path)
                return
            try:
                if self._access.gid is not None:
                    os.chown(opened, -1, self._access.gid)
                os.chmod(opened, self._wanted(status))
            except OSError as error:
                if self._access.gid is not None and isinstance(error, PermissionError):
                    raise _not_in_group(self._path, self._access, self._tier) from error
            # Some file systems report success and change nothing.
            if self._is_wrong(os.fstat(fd)):
                self._uncorrected["are on a file system that does not change modes"].append(path)
            else:
                self._changed += 1
        finally:
            os.close(fd)

    def _report(self, mode: int) -> None:
        if self._changed:
            logger.warning(
                "tier %s: %s had mode %04o: %d files and directories in it have modes %s now",
                self._tier,
                self._path,
                mode,
                self._changed,
                self._access,
            )
        for reason, paths in self._uncorrected.items():
            logger.warning(
                "tier %s: %d files and directories, the first of them %s, %s and keep their mode; others may be able "
                "to read them",
                self._tier,
                len(paths),
                paths[0],
                reason,
            )


def _entries(directory: Path | str) -> list[os.DirEntry[str]]:
    """Return the entries of a directory except harmless foreign ones (``_HARMLESS``)."""
    try:
        with os.scandir(directory) as listing:
            return [entry for entry in listing if not _HARMLESS.fullmatch(entry.name)]
    except OSError:
        return []

"""Which layout a directory of the file tier has, by the names in it, and which one suits a new one.

Page files (format 2) are in PATH itself, slabs (format 3) in PATH/v3. A format to come has a directory of its own
(``v4``). So nothing but names says what a directory is, and no file that says it can be damaged. Besides ``pages`` or
``slabs`` stands ``members`` (runtime/members.py), before the first page is there. Reasons:
docs/decisions/shared-directories.md.

The layout that suits a new directory: slabs have an index in memory that one machine's processes share, and are
preallocated. A file system that other machines may see, or that writes a changed block elsewhere, so that preallocated
files keep no room, gets page files, and so does every one where the native core was not built. Reasons:
docs/decisions/layout-and-io-auto.md.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import stat
from contextlib import suppress
from pathlib import Path
from typing import Literal

from hicache_ext import native
from hicache_ext.errors import StoreSetupError
from hicache_ext.runtime.access import make_directory, move_aside, open_plain_file
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
    try:
        with os.scandir(path) as listing:
            found = [(int(match[1]), entry.path) for entry in listing if (match := VERSION_NAME.fullmatch(entry.name))]
    except OSError:
        return []
    return [
        Path(place)
        for number, place in sorted(found)
        if number > SLAB_VERSION and os.path.exists(os.path.join(place, MEMBERS))
    ]


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
    """Make ``path``, which must exist, a directory of this layout: what tells it from others, and the directories of
    slabs, which survive a power loss. Nothing in ``path`` itself is touched for slabs. Logs a warning of newer
    versions.

    Raises as ``check_before_start``.
    """
    check_before_start(path, layout, tier)
    home = path
    if layout == "slab":
        home = slab_home(path)
        for directory in (home, home / _SLABS):
            if directory.is_symlink():
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


def check_files_are_there(path: Path) -> None:
    """Raises OSError unless ``path``, a tier's, still has its files: its disk is mounted, and answers."""
    if layout_in(path) is None:
        raise FileNotFoundError(errno.ENOENT, "it has neither pages nor slabs any more", str(path))


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

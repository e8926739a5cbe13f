"""PATH/hicache_ext.json and PATH/v3/hicache_ext.json: the layout and the format of a directory of the file tier.

Page files (format 2) are in PATH itself, with the manifest in PATH.
Slabs are in PATH/v3, with a manifest there and none in PATH. Versions to come have directories of their own (``v4``).

A manifest that cannot be read, because of a flipped bit say, is made anew from the names of the files next to it.
Reasons: docs/decisions/shared-directories.md.

The layout that suits a new directory: slabs have an index in memory that one machine's processes share, and are
preallocated. A file system that other machines may see, or that writes a changed block elsewhere, so that preallocated
files keep no room, gets page files, and so does every one where the native core was not built. Reasons:
docs/decisions/layout-and-io-auto.md.
"""

from __future__ import annotations

import json
import logging
import os
import re
import stat
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Literal, cast

from hicache_ext import native
from hicache_ext.errors import StoreSetupError
from hicache_ext.runtime.access import make_directory, move_aside
from hicache_ext.runtime.file_systems import MOUNTINFO, file_system_of
from hicache_ext.runtime.whole_file import create_whole, parsed, read_small, write_whole
from hicache_ext.storage.tiers.file.modes import (
    IDENTITY_NAME,
    MANIFEST,
    SLAB_FILE,
    SLAB_VERSION,
    VERSION_NAME,
    holds_only_ours,
)

logger = logging.getLogger(__name__)

Layout = Literal["pages", "slab"]
FORMATS = {"pages": 2, "slab": SLAB_VERSION}
"""Layout -> format of its files."""

_SLABS = "slabs"


def slab_home(path: Path) -> Path:
    """The directory in PATH with the slabs of this version."""
    return path / f"v{SLAB_VERSION}"


def format_and_layout(directory: Path) -> tuple[int, str] | None:
    """Format and layout by the manifest in PATH, or in one version's directory in it; None without one of this package.
    Raises OSError."""
    try:
        document = parsed(read_small(directory / MANIFEST)) or {}
    except (FileNotFoundError, NotADirectoryError):
        return None
    number, layout = document.get("format"), document.get("layout")
    if isinstance(number, bool) or not isinstance(number, int) or not isinstance(layout, str):
        return None
    return (number, layout) if document.get("checksum") == _checksum(number, layout) else None


def manifest_text(number: int, layout: str) -> str:
    """What a manifest holds. One with a changed byte is none: not that of another release."""
    return json.dumps({"format": number, "layout": layout, "checksum": _checksum(number, layout)}) + "\n"


def _checksum(number: int, layout: str) -> int:
    return zlib.crc32(f"{number} {layout}".encode())


def layout_in(path: Path) -> str | None:
    """Return the layout of the directory ``path``, by its manifests or, where those cannot be read, by its files; None
    where that is not known. Raises OSError."""
    recorded = format_and_layout(path)
    if recorded is not None:
        return recorded[1]
    if _holds_pages(path):
        return "pages"
    return "slab" if holds_slabs(path) else None


def holds_slabs(path: Path) -> bool:
    """Whether a server of this version has used ``path`` for slabs. Raises OSError."""
    home = slab_home(path)
    recorded = format_and_layout(home)
    if recorded is not None:
        return recorded[1] == "slab"
    # With a manifest that cannot be read, the empty directory of a first start is enough.
    return _has(home / _SLABS, SLAB_FILE) or (_is_there(home / MANIFEST) and (home / _SLABS).is_dir())


def newer_versions(path: Path) -> list[Path]:
    """The directories of newer releases in ``path``, which are left alone. Never raises OSError."""
    try:
        with os.scandir(path) as listing:
            found = [(int(match[1]), entry.path) for entry in listing if (match := VERSION_NAME.fullmatch(entry.name))]
    except OSError:
        return []
    return [
        Path(place) for number, place in sorted(found) if number > SLAB_VERSION and (Path(place) / MANIFEST).exists()
    ]


def check_before_start(path: Path, layout: str, tier: str) -> None:
    """Raises StoreSetupError with a sentence unless a tier of this layout may use ``path``: what is there is of this
    layout, or of nobody yet, and the native core is there for slabs.

    Changes nothing. Raises OSError as the disk does, and for want of what the core needs to be loaded.
    """
    home = slab_home(path)
    # Looked at before they are read: one that another process makes in between is not one that cannot be read.
    was_there = {directory: _is_there(directory / MANIFEST) for directory in (path, home)}
    recorded = format_and_layout(path)
    if recorded is None:
        if _holds_pages(path):
            recorded = FORMATS["pages"], "pages"
        elif was_there[path] and not holds_only_ours(path):
            raise _not_ours(path, tier)
    if recorded is not None and (layout == "slab" or recorded != (FORMATS["pages"], "pages")):
        raise _mismatch(path, recorded, layout, tier)
    slabs, recorded = holds_slabs(path), format_and_layout(home)
    if layout != "slab":
        if slabs:
            raise _mismatch(home, recorded or (SLAB_VERSION, "slab"), layout, tier)
    elif recorded is not None and recorded != (SLAB_VERSION, "slab"):
        raise _mismatch(home, recorded, layout, tier)
    elif recorded is None and was_there[home] and not slabs and not holds_only_ours(home):
        raise _not_ours(home, tier)
    if layout == "slab" and (why := native.lacking()) is not None:
        raise StoreSetupError(
            tier,
            f"layout of {str(path)!r} is slab, which needs the native core, and that is not there: {why}",
            [native.REMEDY, "or set layout: pages with another path"],
        )


def adopt(path: Path, layout: Layout, tier: str) -> None:
    """Make the manifest of this layout in ``path``, which must exist, and the directories of slabs, where they are
    missing; they survive a power loss. Nothing in ``path`` itself is touched for slabs. Logs a warning of newer
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
    if format_and_layout(home) is None:
        manifest, text = home / MANIFEST, manifest_text(FORMATS[layout], layout)
        if _is_there(manifest):
            logger.warning(
                "tier %s: %s cannot be read and is made anew, since the files in it are ours", tier, manifest
            )
            write_whole(manifest, text)
        else:
            if os.path.lexists(manifest):
                move_aside(manifest, unless=stat.S_ISREG)
            create_whole(manifest, text)
    # Another process may have been first, with another layout.
    check_before_start(path, layout, tier)
    if newer := newer_versions(path):
        logger.warning(
            "tier %s: %s holds pages of a newer release, which this one cannot read: they stay, and their bytes do not "
            "count in the capacity",
            tier,
            ", ".join(map(str, newer)),
        )


def check_manifest_is_there(path: Path) -> None:
    """Raises OSError unless a manifest can be read in ``path``, a tier's: its disk is mounted, and answers."""
    try:
        read_small(slab_home(path) / MANIFEST)
    except FileNotFoundError:
        read_small(path / MANIFEST)


def _mismatch(directory: Path, found: tuple[int, str], layout: str, tier: str) -> StoreSetupError:
    return StoreSetupError(
        tier,
        f"{str(directory)!r} holds format {found[0]}, layout {found[1]!r}; "
        f"this tier writes format {FORMATS[layout]}, layout {layout!r}",
        ["name another path, or remove that directory"],
    )


def _not_ours(directory: Path, tier: str) -> StoreSetupError:
    return StoreSetupError(tier, f"{str(directory / MANIFEST)!r} is not a manifest of this package")


def _holds_pages(path: Path) -> bool:
    """Whether PATH itself has page files, without a look into its manifest."""
    # Nothing was stored yet, perhaps. Without any manifest, empty directories prove nothing.
    known = _is_there(path / MANIFEST) and all((path / name).is_dir() for name in ("pages", "identities", "tmp"))
    return known or _has(path / "pages", IDENTITY_NAME)


def _is_there(manifest: Path) -> bool:
    """Whether there is such a file. Raises OSError if that is not known."""
    try:
        return stat.S_ISREG(manifest.lstat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _has(directory: Path, name: re.Pattern[str]) -> bool:
    try:
        with os.scandir(directory) as listing:
            return any(name.fullmatch(entry.name) for entry in listing)
    except OSError:
        return False


def choose_layout(
    path: Path, capacity: int | None, mountinfo: Path = MOUNTINFO, *, shared: bool = False
) -> tuple[Layout, str]:
    """Return what ``layout: auto`` means for ``path``, and why. A directory that is a tier already keeps its layout.
    Never raises."""
    with suppress(OSError):  # The store reports what is wrong.
        if (kept := layout_in(path)) in ("pages", "slab"):
            return cast(Layout, kept), "the directory has that layout already"
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

"""PATH/hicache_ext.json: the layout and the format of a directory of the file tier.

Older releases did not sync it, so a power loss may have left it empty. It is then made anew from the names of the files
beside it. Reasons: docs/decisions/power-loss-of-small-files.md.
"""

from __future__ import annotations

import json
import logging
import os
import re
from pathlib import Path

from hicache_ext.errors import StoreSetupError
from hicache_ext.runtime.whole_file import create_whole, parsed, write_whole
from hicache_ext.storage.tiers.file.modes import IDENTITY_NAME, INDEX_FILE, SLAB_FILE

logger = logging.getLogger(__name__)

FORMATS = {"pages": 1, "slab": 2}
"""Layout -> format of its files. Slabs of format 1 had the header of each page in its slot."""
_TAKEN_OVER = {"slab": 1}
"""Older formats whose pages a server gives up at its start; tools leave them alone."""
MANIFEST = "hicache_ext.json"

_FILES_OF = {"pages": ("pages", IDENTITY_NAME), "slab": ("slabs", SLAB_FILE)}
"""Layout -> the directory with its pages, and the names in it."""
_DIRECTORIES_OF = {"pages": ("pages", "identities", "tmp"), "slab": ("slabs", "identities")}


def format_and_layout(path: Path) -> tuple[int, str] | None:
    """Format and layout by the manifest in ``path``; None without one of this package. Raises OSError."""
    try:
        document = parsed((path / MANIFEST).read_bytes()) or {}
    except FileNotFoundError:
        return None
    number, layout = document.get("format"), document.get("layout")
    if isinstance(number, bool) or not isinstance(number, int) or not isinstance(layout, str):
        return None
    return number, layout


def layout_in(path: Path) -> str | None:
    """The layout of the directory ``path``, by its manifest or, where that cannot be read, by its files.

    None where that is not known, or the files are of both layouts. Raises OSError.
    """
    recorded = format_and_layout(path)
    if recorded is not None:
        return recorded[1]
    holds = [layout for layout, (where, name) in _FILES_OF.items() if _has(path / where, name)]
    if not holds and _is_there(path / MANIFEST):
        # Nothing was stored yet. Without any manifest, empty directories prove nothing.
        holds = [layout for layout, names in _DIRECTORIES_OF.items() if all((path / name).is_dir() for name in names)]
    return holds[0] if len(holds) == 1 else None


def check_manifest(path: Path, layout: str, tier: str) -> None:
    """Raises StoreSetupError with a sentence unless ``path`` has this format and layout, or nothing of ours yet.

    Changes nothing. Raises OSError as the disk does.
    """
    # Looked at before the manifest, which is made before an index: so it is not being made by another process now.
    has_index = layout == "slab" and _has(path / "index", INDEX_FILE)
    # Looked at before it is read: one that another process makes in between is not one that cannot be read.
    was_there = _is_there(path / MANIFEST)
    recorded = format_and_layout(path)
    if recorded == (FORMATS[layout], layout):
        return
    if recorded is None:
        found = layout_in(path)
        if found == layout:
            return
        if found is None and not was_there:
            if not has_index:
                return
            problem = f"{str(path / 'index')!r} is an index, and not of this package: there is no {MANIFEST}"
            raise StoreSetupError(tier, problem, ["name another path"])
        if found is None:
            raise StoreSetupError(tier, f"{str(path / MANIFEST)!r} is not a manifest of this package")
        recorded = FORMATS[found], found
    raise StoreSetupError(
        tier,
        f"{str(path)!r} holds format {recorded[0]}, layout {recorded[1]!r}; "
        f"this tier writes format {FORMATS[layout]}, layout {layout!r}",
        ["name another path, or remove that directory"],
    )


def is_taken_over(path: Path, layout: str) -> bool:
    """Whether a server with this layout empties the directory because its format is older. Raises OSError."""
    return format_and_layout(path) == (_TAKEN_OVER.get(layout), layout)


def check_before_start(path: Path, layout: str, tier: str) -> None:
    """``check_manifest`` for a server."""
    if not is_taken_over(path, layout):
        check_manifest(path, layout, tier)


def adopt(path: Path, layout: str, tier: str) -> None:
    """Make a manifest for this layout in ``path`` if it is missing. Raises as ``check_manifest``."""
    check_manifest(path, layout, tier)
    if format_and_layout(path) is not None:
        return
    manifest = path / MANIFEST
    if _is_there(manifest):
        logger.warning("tier %s: %s cannot be read and is made anew, since the files in it are ours", tier, manifest)
        write_manifest(path, layout)
    else:
        create_whole(manifest, _text(layout))
        # Another process may have been first, with another layout.
        check_manifest(path, layout, tier)


def write_manifest(path: Path, layout: str) -> None:
    """Replaces one that is there. Raises OSError."""
    write_whole(path / MANIFEST, _text(layout))


def _text(layout: str) -> str:
    return json.dumps({"format": FORMATS[layout], "layout": layout}) + "\n"


def _is_there(path: Path) -> bool:
    """Raises OSError if that is not known."""
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    return True


def _has(directory: Path, name: re.Pattern[str]) -> bool:
    try:
        with os.scandir(directory) as listing:
            return any(name.fullmatch(entry.name) for entry in listing)
    except OSError:
        return False

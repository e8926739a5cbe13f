"""What is ours in a directory of the file tier, by its name; and what files take. Reads only."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

MANIFEST = "hicache_ext.json"
SLAB_VERSION = 3
"""Format of the slabs of this version, and the number of their directory."""
VERSION_NAME = re.compile(r"v([0-9]{1,9})")
"""A directory in PATH with one version's files."""

IDENTITY_NAME = re.compile(r"[0-9a-f]{32}")
BUCKET_NAME = re.compile(r"[0-9a-f]{11}")
"""A directory of packs."""
PACK_NAME = re.compile(r"[0-9a-f]{11}-[0-9a-f]{10}-.+\.pack")
SLAB_FILE = re.compile(r"([0-9a-f]{8})-([0-9]+)\.(slab|headers)")
TEMPORARY_FILE = re.compile(r"[0-9]+\.[0-9]+\.(?:tmp|[0-9a-f]{32}\.packs)")
"""In PATH/tmp; it begins with the number of its writer among the members of the directory."""

BLOCK = 4096
"""The space of a file is rounded up to a multiple of this."""

ABSENT = (FileNotFoundError, NotADirectoryError)
"""Of a pack: something else may have the name of its directory."""


def occupied(size: int) -> int:
    """Bytes of disk a file of ``size`` bytes takes."""
    return -(-size // BLOCK) * BLOCK


def entries(directory: str | Path, name: re.Pattern[str]) -> Iterator[os.DirEntry[str]]:
    """Entries of a directory with such a name; none where there is no directory. Raises OSError as the disk does."""
    try:
        with os.scandir(directory) as listing:
            yield from (entry for entry in listing if name.fullmatch(entry.name))
    except ABSENT:
        return


def directories(directory: str | Path, name: re.Pattern[str]) -> Iterator[os.DirEntry[str]]:
    """Matching directories, no symbolic links: these lead to files of others."""
    return (entry for entry in entries(directory, name) if entry.is_dir(follow_symlinks=False))

"""One directory of page files: its names, its concurrent creation by several processes, its left-overs.

::

    PATH/members                              empty; each process using PATH has one byte of it locked (members.py)
    PATH/usage                                the shared account (usage.py)
    PATH/identities/<identity>.json           the facts behind an identity digest, for people and tools
    PATH/pages/                               pages, in packs and alone (tree.py)
    PATH/tmp/                                 pages being written; trees being cleared
    PATH/pins/                                pinned pages (pins.py)
    PATH/hints/                               hints from decode nodes (hints.py), in the first path of a tier
    PATH/io_probe.*                           see devices.py

Only names of exactly these forms are read, counted or removed. Other files are kept: a directory that clear() detaches
is moved aside if it holds any, and so is a non-empty directory with a page's name.
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from hicache_ext.runtime.access import Access, access_in, make_directory, move_aside, settle
from hicache_ext.runtime.members import Members
from hicache_ext.runtime.whole_file import link_new
from hicache_ext.storage.tiers.file.layouts import FILES_NAME, adopt
from hicache_ext.storage.tiers.file.pages.tree import BLOCK, PageTree, accounted_bytes, directories, page_files
from hicache_ext.storage.tiers.file.usage import gone_writers

_TEMP_NUMBERS = itertools.count()
"""Counter shared by the whole process, because two of its stores may share a directory."""


class PageDirectory(PageTree):
    """Publishes pages whole or not at all in one directory, and cleans up there. Thread-safe."""

    def __init__(self, path: Path, tier: str) -> None:
        """Create or adopt ``path``. Raises OSError, and StoreSetupError if it has another layout."""
        super().__init__(path)
        adopt(path, "pages", tier)
        self.members = Members(self.members_path)
        self.is_gone = gone_writers(path, self.members.is_alive)
        self._access = access_in(path)

    def close(self) -> None:
        """Leave the members of the directory. What this process has in tmp/ counts as left-over from then on."""
        self.members.close()

    def create_parent(self, page_path: str) -> Iterator[int]:
        """Make missing directories of a page; yield the bytes of disk of each one as soon as it is made.

        Several threads may do this for a new identity: each counts only what it made itself.
        """
        fan_out = os.path.dirname(page_path)
        try:
            yield _make_directory(fan_out, self._access)
        except FileNotFoundError:
            yield _make_directory(os.path.dirname(fan_out), self._access)
            yield _make_directory(fan_out, self._access)

    def clear_the_way(self, page_path: str) -> None:
        """Move aside anything but a directory that has the name of a parent of the page. Make tmp/ again if it is gone.
        Never raises OSError."""
        with suppress(OSError):
            make_directory(self.temporary, self._access)
        fan_out = os.path.dirname(page_path)
        for place in (os.path.dirname(fan_out), fan_out):
            with suppress(OSError):
                if not stat.S_ISDIR(os.lstat(place).st_mode):
                    move_aside(Path(place), unless=stat.S_ISDIR)

    def open_unpublished(self) -> tuple[int, str]:
        """Create a temporary file for a page; return its descriptor and path."""
        temp_path = f"{self.temporary}/{self.members.id}.{next(_TEMP_NUMBERS)}.tmp"
        fd = os.open(temp_path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, self._access.file_mode)
        if self._access.group:
            # The umask may have removed the group's rights.
            settle(fd, self._access.file_mode)
        return fd, temp_path

    def publish(self, temp_path: str, page_path: str, *, is_new_name: bool = False) -> None:
        """Give the complete file its name atomically. ``is_new_name``: nobody else can use this name.

        Raises OSError; FileExistsError if another writer was first.
        """
        if is_new_name:
            # Renaming takes one round trip to a file server; linking and unlinking take two.
            os.rename(temp_path, page_path)
            return
        link_new(temp_path, page_path)
        # It is published now; the next start removes a second name left in tmp/.
        unlink_quietly(temp_path)

    def remove_page(self, page_path: str, seen: os.stat_result | None = None) -> int:
        """Remove whatever has the name of a page or a pack; return the size of the removed file.

        With ``seen``, remove it only if it still is the file with this status: another process may have replaced it. A
        directory is not ours: it is removed if empty, and moved aside otherwise. Raises OSError if the name cannot be
        freed, FileNotFoundError if it is free already or (with ``seen``) belongs to another file.
        """
        status = os.lstat(page_path)
        if seen is not None and (status.st_ino, status.st_ctime_ns) != (seen.st_ino, seen.st_ctime_ns):
            raise FileNotFoundError(errno.ENOENT, "replaced meanwhile", page_path)
        if not stat.S_ISDIR(status.st_mode):
            os.unlink(page_path)
            return status.st_size
        try:
            os.rmdir(page_path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            move_aside(Path(page_path))
        return 0

    def remove_empty_directories(self) -> int:
        """Remove all empty directories of pages and identities; return the bytes of disk freed."""
        return sum(map(remove_directory, [*self.file_directories(), *map(self.identity_path, self.known_identities())]))

    def detach_identity(self, identity: bytes) -> Path | None:
        """Move all pages of an identity out of sight atomically; return the tree to delete, if any. Raises OSError."""
        moved = self.temporary / f"{self.members.id}.{next(_TEMP_NUMBERS)}.clear"
        home = self.pages_path / identity.hex()
        try:
            if not stat.S_ISDIR(os.lstat(home).st_mode):
                return None
            # Another process may have removed it.
            make_directory(self.temporary, self._access)
            os.rename(home, moved)
        except FileNotFoundError:
            # It has no pages, or another process has cleared it.
            return None
        return moved

    def delete_detached(self, tree: Path) -> int:
        """Delete the pages that ``detach_identity`` moved; return the bytes of disk freed. Files of other owners are
        moved aside with their directories; a page that cannot be deleted is left to the next start."""
        freed = gone = 0
        # Twice: a writer that looked up the tree before it was moved may have made a directory in it since.
        for _ in range(2):
            for inner in list(directories(tree, FILES_NAME)):
                for entry, found in list(page_files(inner.path)):
                    # Skip what is gone or cannot be removed, and directories.
                    with suppress(OSError):
                        status = entry.stat(follow_symlinks=False)
                        os.unlink(entry.path)
                        freed += accounted_bytes(found, status)
                freed += remove_directory(inner.path)
            gone = gone or remove_directory(tree)
        if not gone and not self.has_pages(tree):
            with suppress(OSError):  # It is left to the next start, too.
                move_aside(tree)
        return freed + gone

    def remove_left_overs(self) -> int:
        """Delete what processes that no longer run have left in tmp/; return the number of entries."""
        left_overs = list(self.left_behind(self.is_gone))
        for entry in left_overs:
            if entry.name.endswith(".clear"):
                self.delete_detached(Path(entry.path))
            else:
                unlink_quietly(entry.path)
        return len(left_overs)


def _make_directory(path: str | Path, access: Access) -> int:
    """Make a directory; return its bytes of disk, 0 if it existed. Raises FileNotFoundError without its parent."""
    try:
        os.mkdir(path, access.directory_mode)
    except FileExistsError:
        return 0
    if access.group:
        os.chmod(path, access.directory_mode)
    return BLOCK


def remove_directory(path: str | Path) -> int:
    """Remove a directory if empty; return the bytes of disk freed, 0 if it stays. Writers make it again when needed,
    and they make new buckets all the time."""
    try:
        os.rmdir(path)
    except OSError:
        return 0
    return BLOCK


def unlink_quietly(path: str) -> bool:
    try:
        os.unlink(path)
    except OSError:
        return False
    return True

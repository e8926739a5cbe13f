"""One directory of page files: its names, its creation by several processes at once, its left-overs.

::

    PATH/members                              empty; who uses the directory has a byte of it locked (members.py)
    PATH/usage                                the shared account (usage.py)
    PATH/identities/<identity>.json           the facts behind an identity digest, for people and tools
    PATH/pages/                               pages, in packs and alone (tree.py)
    PATH/tmp/                                 pages being written; trees being cleared
    PATH/pins/                                pinned pages (pins.py)
    PATH/hints/                               what decode nodes announce (hints.py), in the first path of a tier
    PATH/io_probe.*                           see devices.py

Only names of exactly these forms are read, counted or removed. Other files stay: the directory around them that clear()
moves is moved aside with them, and so is a directory with a page's name.
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
from hicache_ext.storage.tiers.file.pages.tree import BLOCK, PageTree, counted_for, directories, page_files
from hicache_ext.storage.tiers.file.usage import gone_writers

_TEMP_NUMBERS = itertools.count()
"""One count for the whole process: two stores of one process may share a directory."""


class PageDirectory(PageTree):
    """Publishes pages whole or not at all in one directory, and cleans up there. Thread-safe."""

    def __init__(self, path: Path, tier: str) -> None:
        """Create or adopt ``path``. Raises OSError, and StoreSetupError where it is of another layout."""
        super().__init__(path)
        adopt(path, "pages", tier)
        self.members = Members(self.members_path)
        self.is_gone = gone_writers(path, self.members.is_alive)
        self._access = access_in(path)

    def close(self) -> None:
        """Leave the members of the directory. What this process has in tmp/ counts as left over from then on."""
        self.members.close()

    def create_parent(self, page_path: str) -> Iterator[int]:
        """Make the directories of a page, where missing; the bytes of disk of each, as soon as it is made.

        Several threads may come here for a new identity: each counts only what it made itself.
        """
        fan_out = os.path.dirname(page_path)
        try:
            yield _make_directory(fan_out, self._access)
        except FileNotFoundError:
            yield _make_directory(os.path.dirname(fan_out), self._access)
            yield _make_directory(fan_out, self._access)

    def clear_the_way(self, page_path: str) -> None:
        """Move aside what is no directory and has the name of one that the page is in. Make tmp/ anew where it is gone.
        Never raises OSError."""
        with suppress(OSError):
            make_directory(self.temporary, self._access)
        fan_out = os.path.dirname(page_path)
        for place in (os.path.dirname(fan_out), fan_out):
            with suppress(OSError):
                if not stat.S_ISDIR(os.lstat(place).st_mode):
                    move_aside(Path(place), unless=stat.S_ISDIR)

    def open_unpublished(self) -> tuple[int, str]:
        """A descriptor for a page that nobody can see yet, and its temporary path."""
        temp_path = f"{self.temporary}/{self.members.id}.{next(_TEMP_NUMBERS)}.tmp"
        fd = os.open(temp_path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, self._access.file_mode)
        if self._access.group:
            # The umask has removed the group's rights.
            settle(fd, self._access.file_mode)
        return fd, temp_path

    def publish(self, temp_path: str, page_path: str, *, is_new_name: bool = False) -> None:
        """Give the written file its name, at once and whole. ``is_new_name``: nobody else can have it.

        Raises OSError; FileExistsError when another writer was first.
        """
        if is_new_name:
            # One round trip to a server; to link and to unlink are two.
            os.rename(temp_path, page_path)
            return
        link_new(temp_path, page_path)
        # Published now; a second name left in tmp/ is removed by the next start.
        unlink_quietly(temp_path)

    def remove_page(self, page_path: str, seen: os.stat_result | None = None) -> int:
        """Remove whatever has the name of a page or a pack; the size of the file removed.

        With ``seen``, only if it still is the file with this status: another process may have replaced it. A directory
        is not ours: it is removed if empty, and moved aside otherwise. Raises OSError when the name cannot be freed,
        FileNotFoundError when it is free already or (with ``seen``) another file's.
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
        """``remove_directory`` of all directories of pages and identities."""
        return sum(map(remove_directory, [*self.file_directories(), *map(self.identity_path, self.known_identities())]))

    def detach_identity(self, identity: bytes) -> Path | None:
        """Take all pages of an identity out of sight at once; the tree to delete, if there was one. Raises OSError."""
        moved = self.temporary / f"{self.members.id}.{next(_TEMP_NUMBERS)}.clear"
        home = self.pages_path / identity.hex()
        try:
            if not stat.S_ISDIR(os.lstat(home).st_mode):
                return None
            # Somebody may have removed it.
            make_directory(self.temporary, self._access)
            os.rename(home, moved)
        except FileNotFoundError:
            # It has no pages, or another process has cleared it.
            return None
        return moved

    def delete_detached(self, tree: Path) -> int:
        """Delete the pages that ``detach_identity`` moved; return bytes of disk freed. Files of others are moved aside
        with the directories around them; a page that cannot be deleted stays to be deleted by the next start."""
        freed = gone = 0
        # Twice: a writer that had looked the tree up before it was moved may have made a directory in it since.
        for _ in range(2):
            for inner in list(directories(tree, FILES_NAME)):
                for entry, found in list(page_files(inner.path)):
                    # What is gone, what cannot be removed, and a directory.
                    with suppress(OSError):
                        status = entry.stat(follow_symlinks=False)
                        os.unlink(entry.path)
                        freed += counted_for(found, status)
                freed += remove_directory(inner.path)
            gone = gone or remove_directory(tree)
        if not gone and not self.has_pages(tree):
            with suppress(OSError):  # It stays to be looked at by the next start, too.
                move_aside(tree)
        return freed + gone

    def remove_left_overs(self) -> int:
        """Delete what processes that no longer run have left in tmp/; the number of entries."""
        left = list(self.left_behind(self.is_gone))
        for entry in left:
            if entry.name.endswith(".clear"):
                self.delete_detached(Path(entry.path))
            else:
                unlink_quietly(entry.path)
        return len(left)


def _make_directory(path: str | Path, access: Access) -> int:
    """Make one directory; the bytes of disk that took, 0 when it was there. FileNotFoundError without its parent."""
    try:
        os.mkdir(path, access.directory_mode)
    except FileExistsError:
        return 0
    if access.group:
        os.chmod(path, access.directory_mode)
    return BLOCK


def remove_directory(path: str | Path) -> int:
    """Remove an empty directory; the bytes of disk freed, 0 when it stays. Writers make it anew, and new buckets all
    the time."""
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

"""One directory of page files: its names, its creation by several processes at once, its left-overs.

::

    PATH/hicache_ext.json                     what this directory is: format and layout
    PATH/usage                                the shared account (usage.py)
    PATH/identities/<identity>.json           the facts behind an identity digest, for people and tools
    PATH/pages/<identity>/<2 hex>/<hash>.page page objects (envelope.py)
    PATH/tmp/                                 pages being written where O_TMPFILE is missing; trees being cleared
    PATH/pins/                                pinned pages (pins.py)
    PATH/hints/                               what decode nodes announce (hints.py), in the first path of a tier
    PATH/expiry.lock, ttl.json, io_probe.*    see expiry.py, device_probe.py

Only names of exactly these forms are ever read, counted or removed: a stranger's file stays, also where clear() takes
the directory around it away (it is put back) and where a directory has a page's name (it is moved aside, whole).
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import json
import os
import random
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hicache_ext.envelope import IDENTITY_LENGTH
from hicache_ext.errors import StoreSetupError
from hicache_ext.storage.file.usage import writer_alive, writer_name

FORMATS = {"pages": 1, "slab": 2}
"""Of the files in a directory, by layout. Slabs of format 1 had the header of each page in its slot."""
_MANIFEST = "hicache_ext.json"
BLOCK = 4096
"""What a file occupies is rounded up to this many bytes."""

_IDENTITY_NAME = re.compile(r"[0-9a-f]{32}")
_FANOUT_NAME = re.compile(r"[0-9a-f]{2}")
_PAGE_NAME = re.compile(r"[0-9a-f]{64}\.page")

_TEMP_NUMBERS = itertools.count()
"""One count for the whole process: two stores of one process may share a directory."""

_RENAME_NOREPLACE = 1
_AT_FDCWD = -100


def occupied(size: int) -> int:
    """Bytes of disk a file of ``size`` bytes takes."""
    return -(-size // BLOCK) * BLOCK


def page_hash_in(page_path: str) -> str:
    """The hexadecimal page hash in the name of a page file."""
    return os.path.basename(page_path).partition(".")[0]


def format_and_layout(path: Path) -> tuple[Any, Any] | None:
    """What the manifest in ``path`` says; None when it is not one of this package. Raises OSError."""
    try:
        document = json.loads((path / _MANIFEST).read_text())
        return document["format"], document["layout"]
    except (ValueError, KeyError, TypeError):
        return None


def check_manifest(path: Path, layout: str, tier: str) -> None:
    """Raises StoreSetupError with a sentence unless ``path`` holds this format and layout."""
    found = format_and_layout(path)
    if found is None:
        raise StoreSetupError(tier, f"{str(path / _MANIFEST)!r} is not a manifest of this package")
    if found != (FORMATS[layout], layout):
        raise StoreSetupError(
            tier,
            f"{str(path)!r} holds format {found[0]}, layout {found[1]!r}; "
            f"this tier writes format {FORMATS[layout]}, layout {layout!r}",
            ["name another path, or remove that directory"],
        )


def load_document(path: Path, digest: bytes) -> dict[str, Any] | None:
    """The facts behind an identity in the directory ``path``, None when they were not recorded."""
    try:
        document = json.loads((path / "identities" / f"{digest.hex()}.json").read_text())
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None


class PageDirectory:
    """Paths and whole-or-nothing publication in one directory. Thread-safe."""

    def __init__(self, path: Path, tier: str) -> None:
        """Create or adopt ``path``. Raises StoreSetupError with a sentence on anything that would fail later."""
        self.path = path
        self.pages = path / "pages"
        self.identities = path / "identities"
        self.temporary = path / "tmp"
        self._temp_prefix = writer_name()
        try:
            for directory in (path, self.pages, self.identities, self.temporary):
                directory.mkdir(parents=True, exist_ok=True)
            self._adopt(tier)
        except OSError as error:
            raise StoreSetupError(tier, f"directory {str(path)!r}: {error.strerror or error}") from error
        self._unnamed_files = self._supports_unnamed_files()
        self.remove_left_overs()

    def page_path(self, key: bytes) -> str:
        """Where the page object of a 48-byte key lives."""
        identity, page_hash = key[:IDENTITY_LENGTH].hex(), key[IDENTITY_LENGTH:].hex()
        return f"{self.pages}/{identity}/{page_hash[:2]}/{page_hash}.page"

    def create_parent(self, page_path: str) -> Iterator[int]:
        """Make the directories of a page, where missing; the bytes of disk of each, as soon as it is made.

        Several threads come here for a new identity: each hears only of what it made itself.
        """
        fan_out = os.path.dirname(page_path)
        try:
            yield _make_directory(fan_out)
        except FileNotFoundError:
            yield _make_directory(os.path.dirname(fan_out))
            yield _make_directory(fan_out)

    def open_unpublished(self, page_path: str) -> tuple[int, str | None]:
        """A descriptor to write a page to that nobody can see yet, and its temp path (None: it has no name at all)."""
        if self._unnamed_files:
            return os.open(os.path.dirname(page_path), os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o644), None
        temp_path = self._temp_path()
        return os.open(temp_path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644), temp_path

    def publish(self, fd: int, temp_path: str | None, page_path: str) -> bool:
        """Give the written file its name, at once and whole; False when another writer was first."""
        try:
            if temp_path is None:
                # The descriptor argument makes CPython call linkat, which can follow the /proc link; plain link cannot.
                os.link(f"/proc/self/fd/{fd}", page_path, src_dir_fd=fd, follow_symlinks=True)
            else:
                _rename_without_replacing(temp_path, page_path)
        except FileExistsError:
            return False
        return True

    def discard(self, temp_path: str | None) -> None:
        if temp_path is not None:
            _unlink_quietly(temp_path)

    def remove_page(self, page_path: str, seen: os.stat_result | None = None) -> int:
        """Remove whatever has a page's name; the size of the file removed.

        With ``seen``, only if it is still the file that had this status: another process may have replaced it since.
        A directory is not ours: it is removed when empty and moved aside otherwise. Raises OSError when the name cannot
        be freed, FileNotFoundError when it is free already or (with ``seen``) another file's.
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
            _rename_without_replacing(page_path, f"{page_path}.not-a-page-{os.getpid()}-{next(_TEMP_NUMBERS)}")
        return 0

    def remove_empty_directories(self) -> int:
        """Remove fan-out and identity directories without pages; bytes of disk freed. Writers make them anew."""
        freed = 0
        for identity in _directories(self.pages, _IDENTITY_NAME):
            for fan_out in _directories(identity.path, _FANOUT_NAME):
                freed += _remove_directory(fan_out.path)
            freed += _remove_directory(identity.path)
        return freed

    def fan_out_directories(self) -> list[str]:
        """Paths of all directories that may hold pages."""
        found: list[str] = []
        for identity in _directories(self.pages, _IDENTITY_NAME):
            found += [entry.path for entry in _directories(identity.path, _FANOUT_NAME)]
        return found

    def count_pages(self, most: int) -> int:
        """How many pages there are: where they are in more than ``most`` directories, judged by so many of them."""
        everything = self.fan_out_directories()
        looked_at = everything if len(everything) <= most else random.sample(everything, most)
        found = sum(sum(1 for _ in _entries(fan_out, _PAGE_NAME)) for fan_out in looked_at)
        return found * len(everything) // max(1, len(looked_at))

    def page_files(self, fan_out_directory: str) -> Iterator[tuple[str, os.stat_result]]:
        """(path, status) of the page files in one fan-out directory; files that vanish meanwhile are left out."""
        for entry in _entries(fan_out_directory, _PAGE_NAME):
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            yield entry.path, status

    def occupied_by(self, hashes: Sequence[bytes]) -> list[int]:
        """Bytes of disk that the pages under each of these hashes take, over all identities."""
        identities = self.known_identities()
        taken = [0] * len(hashes)
        for position, page_hash in enumerate(hashes):
            for identity in identities:
                try:
                    taken[position] += occupied(os.lstat(self.page_path(identity + page_hash)).st_size)
                except FileNotFoundError:
                    continue
        return taken

    def count_occupied(self) -> int:
        """Bytes of disk of all pages and their directories; walks everything."""
        total = 0
        for identity in _directories(self.pages, _IDENTITY_NAME):
            total += BLOCK
            for fan_out in _directories(identity.path, _FANOUT_NAME):
                total += BLOCK
                total += sum(occupied(status.st_size) for _, status in self.page_files(fan_out.path))
        return total

    def detach_identity(self, identity: bytes) -> Path | None:
        """Take all pages of an identity out of sight at once; the tree to delete, None when there is none."""
        # The name says whose pages these were, so that whoever finds the tree can put a stranger's file back.
        moved = self.temporary / f"{self._temp_prefix}.{next(_TEMP_NUMBERS)}.{identity.hex()}.clear"
        home = self.pages / identity.hex()
        try:
            if not stat.S_ISDIR(os.lstat(home).st_mode):
                return None
            os.rename(home, moved)
        except FileNotFoundError:
            return None
        return moved

    def has_pages(self, tree: Path) -> bool:
        """Whether a detached tree holds a page, or cannot be read. Ends at the first page."""
        try:
            fan_outs = _directories(tree, _FANOUT_NAME)
            return any(next(self.page_files(fan_out.path), None) is not None for fan_out in fan_outs)
        except OSError:
            return True

    def delete_detached(self, tree: Path) -> int:
        """Delete the pages that ``detach_identity`` took out; bytes of disk freed. What is no page goes back."""
        home = self.pages / tree.name.split(".")[-2]
        freed = 0
        for fan_out in list(_directories(tree, _FANOUT_NAME)):
            for path, status in list(self.page_files(fan_out.path)):
                if not stat.S_ISDIR(status.st_mode) and _unlink_quietly(path):
                    freed += occupied(status.st_size)
            freed += _remove_directory(fan_out.path) or _put_back(fan_out.path, home / fan_out.name)
        return freed + (_remove_directory(tree) or _put_back(tree, home))

    def known_identities(self) -> list[bytes]:
        """Digests that have pages here."""
        return [bytes.fromhex(entry.name) for entry in _directories(self.pages, _IDENTITY_NAME)]

    def save_identity(self, digest: bytes, document: dict[str, Any]) -> None:
        self._create_file_once(self.identities / f"{digest.hex()}.json", json.dumps(document, indent=1, sort_keys=True))

    def load_identity(self, digest: bytes) -> dict[str, Any] | None:
        return load_document(self.path, digest)

    def remove_left_overs(self) -> int:
        """Delete what processes that no longer run have left in tmp/; the number of entries."""
        removed = 0
        for entry in list(_entries(self.temporary, re.compile(r".+"))):
            if entry.name.endswith(".clear"):
                writer = entry.name.rsplit(".", 3)[0]
            elif entry.name.endswith(".tmp"):
                writer = entry.name.rsplit(".", 2)[0]
            else:
                continue
            try:
                last_change = entry.stat(follow_symlinks=False).st_ctime
            except OSError:
                continue
            if writer_alive(writer, last_change):
                continue
            if entry.name.endswith(".clear"):
                self.delete_detached(Path(entry.path))
            else:
                _unlink_quietly(entry.path)
            removed += 1
        return removed

    def _adopt(self, tier: str) -> None:
        manifest = self.path / "hicache_ext.json"
        self._create_file_once(manifest, json.dumps({"format": FORMATS["pages"], "layout": "pages"}) + "\n")
        check_manifest(self.path, "pages", tier)

    def _create_file_once(self, path: Path, text: str) -> None:
        """Create ``path`` whole, unless it is there; safe between processes."""
        if path.exists():
            return
        temp_path = self._temp_path()
        try:
            Path(temp_path).write_text(text)
            _rename_without_replacing(temp_path, str(path))
        except FileExistsError:
            pass
        finally:
            _unlink_quietly(temp_path)

    def _temp_path(self) -> str:
        return f"{self.temporary}/{self._temp_prefix}.{next(_TEMP_NUMBERS)}.tmp"

    def _supports_unnamed_files(self) -> bool:
        """Whether O_TMPFILE and linkat work here: then a kill leaves nothing behind, not even a temp file."""
        probe = self._temp_path()
        try:
            fd = os.open(self.temporary, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o644)
        except OSError:
            return False
        try:
            os.link(f"/proc/self/fd/{fd}", probe, src_dir_fd=fd, follow_symlinks=True)
        except OSError:
            return False
        finally:
            os.close(fd)
            _unlink_quietly(probe)
        return True


def _entries(directory: str | Path, name: re.Pattern[str]) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as listing:
            yield from (entry for entry in listing if name.fullmatch(entry.name))
    except (FileNotFoundError, NotADirectoryError):
        return


def _directories(directory: str | Path, name: re.Pattern[str]) -> Iterator[os.DirEntry[str]]:
    """Real directories only: behind a symlink are somebody's files elsewhere."""
    return (entry for entry in _entries(directory, name) if entry.is_dir(follow_symlinks=False))


def _make_directory(path: str | Path) -> int:
    """Make one directory; the bytes of disk that took, 0 when it was there. FileNotFoundError without its parent."""
    try:
        os.mkdir(path)
    except FileExistsError:
        return 0
    return BLOCK


def _remove_directory(path: str | Path) -> int:
    """Remove an empty directory; the bytes of disk freed, 0 when it stays."""
    try:
        os.rmdir(path)
    except OSError:
        return 0
    return BLOCK


def _put_back(source: str | Path, target: Path) -> int:
    """Move strangers' entries from ``source`` to ``target``, never over what is there, and remove ``source``.

    The bytes of disk freed; negative where directories had to be made.
    """
    freed = 0
    with os.scandir(source) as listing:
        entries = list(listing)
    for entry in entries:
        # A page that could not be deleted, or a directory with such pages, must not come back into sight.
        if (_FANOUT_NAME if entry.is_dir(follow_symlinks=False) else _PAGE_NAME).fullmatch(entry.name):
            continue
        try:
            freed -= _make_directory(target.parent) + _make_directory(target)
            _rename_without_replacing(entry.path, f"{target}/{entry.name}")
        except OSError:
            # It stays where it is, under tmp/: moved, not lost.
            continue
    return freed + _remove_directory(source)


def _unlink_quietly(path: str) -> bool:
    try:
        os.unlink(path)
    except OSError:
        return False
    return True


def _rename_without_replacing(source: str, target: str) -> None:
    """Rename unless ``target`` exists (then FileExistsError and ``source`` stays).

    renameat2 does it in one step; file systems without it (NFS) get link + unlink, which is as atomic for readers.
    """
    result = _libc().renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE)
    if result == 0:
        return
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        os.link(source, target)
        # Published from here on; a second name left in tmp/ goes with the next start.
        _unlink_quietly(source)
        return
    raise OSError(code, os.strerror(code), target)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)

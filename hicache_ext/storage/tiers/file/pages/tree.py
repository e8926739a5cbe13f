"""Reads a directory of page files and packs: names, counts, identities. Changes are in directory.py.

Nothing here makes, changes or locks anything: read permission is enough.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hicache_ext.page.envelope import IDENTITY_LENGTH
from hicache_ext.page.transforms.forms import STORED_AS
from hicache_ext.runtime.whole_file import read_document, write_whole
from hicache_ext.storage.tiers.file.modes import FANOUT_NAME, IDENTITY_NAME, PAGE_NAME, TEMPORARY_FILE
from hicache_ext.storage.tiers.file.pages.pack_tree import PackTree
from hicache_ext.storage.tiers.file.pages.scanning import ABSENT, BLOCK, directories, entries, is_directory, occupied
from hicache_ext.storage.tiers.file.writers import Writers

FAN_OUTS = 256
"""Directories that the pages of one identity are spread over."""

_PARTS = ("model", "pool", "shard", STORED_AS)
"""Keys of an identity's document."""


def load_document(path: Path, digest: bytes) -> dict[str, Any] | None:
    """The facts behind an identity in the directory ``path``, None when they were not recorded.

    Also None for any other content: after a power loss, or written by others.
    """
    document = read_document(path / "identities" / f"{digest.hex()}.json")
    if document is None or not all(isinstance(document.get(part, {}), dict) for part in _PARTS):
        return None
    return document


def save_document(path: Path, digest: bytes, document: dict[str, Any]) -> None:
    """Record the facts behind an identity, if they are missing or spoilt by a power loss."""
    if load_document(path, digest) is None:
        text = json.dumps(document, indent=1, sort_keys=True)
        write_whole(path / "identities" / f"{digest.hex()}.json", text)


class PageTree:
    """The page files of one directory, and its packs. Thread-safe."""

    def __init__(self, path: Path) -> None:
        """Reads nothing yet."""
        self.path = path
        self.pages = path / "pages"
        self._pages_text = str(self.pages)
        self.packs = PackTree(path)
        self.identities = path / "identities"
        self.temporary = path / "tmp"
        self.members_path = path / "members"

    def page_path(self, key: bytes) -> str:
        """The path of the page with this 48-byte key."""
        text = key.hex()
        page_hash = text[2 * IDENTITY_LENGTH :]
        return f"{self._pages_text}/{text[: 2 * IDENTITY_LENGTH]}/{page_hash[:2]}/{page_hash}.page"

    def fan_out_directories(self) -> list[str]:
        """Paths of all directories that may hold page files."""
        found: list[str] = []
        for identity in directories(self.pages, IDENTITY_NAME):
            found += [entry.path for entry in directories(identity.path, FANOUT_NAME)]
        return found

    def count_pages(self, most: int) -> int:
        """The number of pages: estimated from ``most`` directories of page files, and as many of packs, if there are
        more."""
        everything = self.fan_out_directories()
        looked_at = everything if len(everything) <= most else random.sample(everything, most)
        found = sum(sum(1 for _ in entries(fan_out, PAGE_NAME)) for fan_out in looked_at)
        return found * len(everything) // max(1, len(looked_at)) + self.packs.count_pages(most)

    def files_in(self, directory: str) -> Iterator[tuple[str, os.stat_result]]:
        """(path, status) of the page files in a fan-out directory, or of the packs in a bucket."""
        name = os.path.basename(directory)
        return self.page_files(directory) if FANOUT_NAME.fullmatch(name) else self.packs.pack_files(directory)

    def page_files(self, fan_out_directory: str) -> Iterator[tuple[str, os.stat_result]]:
        """(path, status) of the page files in one fan-out directory; files that vanish meanwhile are left out."""
        for entry in entries(fan_out_directory, PAGE_NAME):
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            yield entry.path, status

    def occupied_by(self, hashes: Sequence[bytes]) -> list[int]:
        """Bytes of disk that the pages under each of these hashes take, over all identities; a pack counts whole, for
        the first of its pages."""
        identities = self._identities_of_page_files()
        taken = self.packs.occupied_by(hashes)
        for position, page_hash in enumerate(hashes):
            for identity in identities:
                try:
                    taken[position] += occupied(os.lstat(self.page_path(identity + page_hash)).st_size)
                except ABSENT:
                    continue
        return taken

    def count_occupied(self) -> int:
        """Bytes of disk of all pages, packs and their directories; walks everything."""
        return sum(found for _, found in self.occupied_parts())

    def occupied_parts(self) -> Iterator[tuple[float, int]]:
        """``count_occupied`` part by part: (share of the directory walked by now, bytes of disk in this part).

        A part is the fan-out directories of one name, which hashes fill evenly, and at times a part of the packs.
        """
        for number in range(FAN_OUTS):
            found = self.packs.occupied_part(number, FAN_OUTS)
            for identity in directories(self.pages, IDENTITY_NAME):
                fan_out = f"{identity.path}/{number:02x}"
                if number == 0:
                    found += BLOCK
                if is_directory(fan_out):
                    found += BLOCK + sum(occupied(status.st_size) for _, status in self.page_files(fan_out))
            yield (number + 1) / FAN_OUTS, found

    def known_identities(self) -> list[bytes]:
        """Digests that have pages here."""
        return list(dict.fromkeys([*self._identities_of_page_files(), *self.packs.known_identities()]))

    def _identities_of_page_files(self) -> list[bytes]:
        return [bytes.fromhex(entry.name) for entry in directories(self.pages, IDENTITY_NAME)]

    def left_overs(self, writers: Writers) -> Iterator[os.DirEntry[str]]:
        """Left-overs of dead processes in tmp/: half-written pages, trees being cleared."""
        for entry in list(entries(self.temporary, TEMPORARY_FILE)):
            writer = TEMPORARY_FILE.sub(r"\1", entry.name)
            try:
                last_change = entry.stat(follow_symlinks=False).st_ctime
            except OSError:
                continue
            if writers.is_gone(writer, last_change):
                yield entry

"""What commands find in a directory of the file tier: its pages by identity. They may look while servers run."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hicache_ext.errors import StoreError
from hicache_ext.storage.tiers.file.inspection import Inspector, open_inspector
from hicache_ext.storage.tiers.file.manifest import load_document


@dataclass(slots=True)
class Group:
    """The pages of one identity."""

    digest: bytes
    document: dict[str, Any] | None
    pages: int = 0
    size: int = 0
    hits: int | None = None
    written: float | None = None
    """When the newest page was written."""
    used: float | None = None

    @property
    def model(self) -> str:
        return str((self.document or {}).get("model", {}).get("id", "")) or "unknown"

    def together_with(self, other: Group) -> Group:
        """The pages of this identity in both."""
        return Group(
            self.digest,
            self.document or other.document,
            self.pages + other.pages,
            self.size + other.size,
            None if self.hits is None and other.hits is None else (self.hits or 0) + (other.hits or 0),
            _later(self.written, other.written),
            _later(self.used, other.used),
        )

    def document_for_json(self) -> dict[str, Any]:
        """Moments in seconds since 1970."""
        return {
            "identity": self.digest.hex(),
            "facts": self.document,
            "pages": self.pages,
            "bytes": self.size,
            "hits": self.hits,
            "last_written": self.written,
            "last_used": self.used,
        }


def opened(path: Path) -> Inspector:
    """An inspector of the directory; prints a warning if it cannot see everything. Raises StoreError."""
    inspector = open_inspector(path)
    if inspector.remark:
        print(f"{path}: {inspector.remark}", file=sys.stderr)
    return inspector


class Trouble:
    """One directory of several that cannot be read does not keep a command from the others."""

    def __init__(self) -> None:
        self._errors: list[StoreError] = []
        self._tried = 0

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Around what is done with one directory."""
        self._tried += 1
        try:
            yield
        except StoreError as error:
            self._errors.append(error)

    def told(self) -> int:
        """Print what was noted; the exit code. Raises the first StoreError where no directory could be read."""
        if self._errors and len(self._errors) == self._tried:
            raise self._errors[0]
        for error in self._errors:
            print(f"left out: {error}", file=sys.stderr)
        return 1 if self._errors else 0


def groups_of(directories: Sequence[Path], trouble: Trouble) -> list[Group]:
    """The pages of all of them by identity."""
    groups: dict[bytes, Group] = {}
    for directory in directories:
        with trouble.noted(), closing(opened(directory)) as inspector:
            for group in groups_in(inspector):
                known = groups.get(group.digest)
                groups[group.digest] = group if known is None else known.together_with(group)
    return list(groups.values())


def groups_in(inspector: Inspector) -> list[Group]:
    """The pages of one directory by identity."""
    groups: dict[bytes, Group] = {}
    for page in inspector.pages():
        group = groups.get(page.identity)
        if group is None:
            group = groups[page.identity] = Group(page.identity, load_document(inspector.path, page.identity))
        group.pages += 1
        group.size += page.size
        group.written = _later(page.written, group.written)
        group.used = _later(page.used, group.used)
    for group in groups.values():
        uses = inspector.uses(group.digest)
        if uses is not None:
            group.hits, group.used = uses
    return list(groups.values())


def _later(one: float | None, other: float | None) -> float | None:
    return max((moment for moment in (one, other) if moment), default=None)

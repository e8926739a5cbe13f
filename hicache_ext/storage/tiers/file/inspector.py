"""What tools see of a directory of the file tier, whatever its layout. Opened by inspection.py."""

from __future__ import annotations

import abc
import errno
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from hicache_ext.errors import FormatError
from hicache_ext.page import envelope
from hicache_ext.page.envelope import IDENTITY_LENGTH


@dataclass(frozen=True, slots=True)
class StoredPage:
    """One stored page. Times are wall-clock seconds, None where the layout does not have them."""

    key: bytes
    size: int
    used: float | None = None
    written: float | None = None
    place: Any = None
    """Where it is, as its layout says it."""
    seal: bytes = b""
    """That of the index; zeros, or nothing, without one."""

    @property
    def identity(self) -> bytes:
        return self.key[:IDENTITY_LENGTH]


_NOT_OF_THE_PAGE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM)
"""Errors of the reading process; all others are errors of the page."""


class Inspector(abc.ABC):
    """One directory, whatever its layout. Changes nothing. Not thread-safe."""

    layout: ClassVar[str]

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def remark(self) -> str:
        """A warning about what it lists; mostly empty."""
        return ""

    @property
    @abc.abstractmethod
    def no_space_since(self) -> int:
        """Since when writes have found no space on the disk (wall-clock seconds); 0 while they find some, and of slabs
        where no server says. Raises OSError."""

    @abc.abstractmethod
    def pages(self) -> Iterator[StoredPage]:
        """Every page, identity by identity."""

    def uses(self, digest: bytes) -> tuple[int, float] | None:
        """Hits of an identity's pages since it was last cleared, and when the last one was (wall-clock seconds); None
        where none were counted."""
        return None

    def tenant_pages(self, names: Sequence[str]) -> dict[str, int]:
        """The pages of these tenants, about; empty where no server says."""
        return {}

    def read(self, page: StoredPage) -> bytes | None:
        """Header and payload as they are on disk, nothing where what has the page's place cannot be read; None if it is
        gone. Raises OSError for errors that are not of the page (``_NOT_OF_THE_PAGE``)."""
        try:
            return self._content(page)
        except OSError as error:
            if error.errno in _NOT_OF_THE_PAGE:
                raise
            return b""

    @abc.abstractmethod
    def _content(self, page: StoredPage) -> bytes | None:
        """Header and payload; None if they are gone. Raises OSError."""

    def evicted(self, keys: Sequence[bytes]) -> list[bytes]:
        """Which of these pages, none of which is there, servers remember to have evicted."""
        return []

    @abc.abstractmethod
    def left_overs(self) -> int:
        """The number of left-overs of killed processes."""

    @abc.abstractmethod
    def occupied_by(self, hashes: Sequence[bytes]) -> list[int]:
        """Bytes of disk that the pages under each of these page hashes take, over all identities."""


def reason_it_is_bad(page: StoredPage, content: bytes) -> str | None:
    """Why what was read is not the page; None when it is."""
    try:
        header = envelope.decode_header(content)
    except FormatError as error:
        return error.reason
    payload = memoryview(content)[header.header_length :]
    reason = envelope.reason_to_refuse(content[: header.header_length], page.key, [payload])
    is_sealed = not any(page.seal) or page.seal == envelope.seal_of(content)
    return reason or (None if is_sealed else "seal")

"""Read-only view of a file tier's directory for tools, in either layout. Opened by inspection.py."""

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
    """One stored page. Times are wall-clock seconds; None if the layout does not record them."""

    key: bytes
    size: int
    used: float | None = None
    written: float | None = None
    place: Any = None
    """Location of the page, in the layout's own form."""
    seal: bytes = b""
    """Seal in the index; zeros or empty without one."""

    @property
    def identity(self) -> bytes:
        return self.key[:IDENTITY_LENGTH]


_READER_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM)
"""Errors of the reading process; all others are errors of the page."""


class Inspector(abc.ABC):
    """View of one directory in any layout. Changes nothing. Not thread-safe."""

    layout: ClassVar[str]

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def remark(self) -> str:
        """Warning about the listed pages; usually empty."""
        return ""

    @property
    @abc.abstractmethod
    def no_space_since(self) -> int:
        """Time since which writes have found no space on the disk (wall-clock seconds); 0 while they find some, and for
        slabs if no server tells. Raises OSError."""

    @abc.abstractmethod
    def pages(self) -> Iterator[StoredPage]:
        """Yield every page, identity by identity."""

    def uses(self, digest: bytes) -> tuple[int, float] | None:
        """Return the hits of an identity's pages since it was last cleared, and the time of the last one (wall-clock
        seconds); None if none were counted."""
        return None

    def tenant_pages(self, names: Sequence[str]) -> dict[str, int]:
        """Return the approximate numbers of pages of these tenants; empty if no server tells."""
        return {}

    def read(self, page: StoredPage) -> bytes | None:
        """Return header and payload as on disk: empty if what has the page's place cannot be read, None if the page is
        gone. Raises OSError for errors of the reading process (``_READER_ERRORS``)."""
        try:
            return self._content(page)
        except OSError as error:
            if error.errno in _READER_ERRORS:
                raise
            return b""

    @abc.abstractmethod
    def _content(self, page: StoredPage) -> bytes | None:
        """Return header and payload; None if they are gone. Raises OSError."""

    def evicted(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return those of these absent pages that servers remember having evicted."""
        return []

    @abc.abstractmethod
    def left_overs(self) -> int:
        """Return the number of left-overs of killed processes."""

    @abc.abstractmethod
    def occupied_by(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the bytes of disk that the pages under each of these page hashes take, over all identities."""


def reason_it_is_bad(page: StoredPage, content: bytes) -> str | None:
    """Return the reason why what was read is not the page; None if it is."""
    try:
        header = envelope.decode_header(content)
    except FormatError as error:
        return error.reason
    payload = memoryview(content)[header.header_length :]
    reason = envelope.reason_to_refuse(content[: header.header_length], page.key, [payload])
    is_sealed = not any(page.seal) or page.seal == envelope.seal_of(content)
    return reason or (None if is_sealed else "seal")

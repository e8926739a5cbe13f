"""What a codec is: pages as fewer bytes, for media whose bytes are dear.

A medium knows one length for each key, and takes a page of another one for damage. So encoded pages do not have any
length: a codec says beforehand which few lengths (*rooms*) those of an identity may have. An encoded page lies in the
smallest room that it fits into, with zeros behind it, and each room has keys of its own (forms.py). A page that fits
into none is stored as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

RAW = 0
"""The code of pages that no codec encoded."""

LOSSY_CODECS = ("int8", "fp8")
"""Of which pages do not come back as they were (lossy.py). Labels begin with these names."""


class PageCodec(Protocol):
    """A codec for the pages of one identity, all of one length. Threads: any."""

    @property
    def code(self) -> int:
        """1 to 255: which codec, in the header of the page."""

    @property
    def rooms(self) -> tuple[int, ...]:
        """Bytes that an encoded page may take, ascending, each less than a page; four at most, since a page that is
        absent is asked for in each. They follow from the codec's label, the identity's document and the length alone,
        so that all servers ask for the same."""

    def pays(self) -> bool:
        """Whether ``encode`` is to be called now. Asked before pages are brought into one piece; returns at once."""

    def encode(self, payload: memoryview, encoded: memoryview) -> int:
        """Encode into the leading bytes of ``encoded``, which has as many as the largest room; returns how many, 0
        where they do not fit or it does not pay. Equal payloads give equal bytes."""

    def decode(self, encoded: memoryview, payload: memoryview) -> None:
        """Decode all of ``encoded`` into all of ``payload``. Whatever ``encoded`` holds, nothing else is read or
        written. Raises FormatError where it is no page of this length."""


class Codec(Protocol):
    """A codec as it is configured for a tier. Threads: any."""

    @property
    def label(self) -> bytes:
        """Names the codec and everything that changes ``rooms`` or what encoded bytes mean. Part of the keys: servers
        find each other's pages only if their labels are equal."""

    def for_pages(self, document: Mapping[str, Any], payload: int) -> PageCodec | None:
        """For pages of ``payload`` bytes of the identity with this document; None where they are stored as they are.
        Asked once for each identity and length."""

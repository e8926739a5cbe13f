"""The forms that a page may have in a tier: sealed with which key, encoded into which room; and the keys of each form.

A medium knows one length for each key. So each form has an identity of its own, from which it follows: a page that is
absent in one form may be there in another, and who has a key looks for the forms of that key alone.

Pure; any thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hicache_ext.page.envelope import IDENTITY_LENGTH
from hicache_ext.page.transforms.header import FORMAT_VERSION, HEADER_LENGTH, TAG_LENGTH
from hicache_ext.page.transforms.sealing import Seal, SealKey, SealMode

if TYPE_CHECKING:
    from hicache_ext.page.transforms.codec import Codec, PageCodec

STORED_AS = "stored_as"
"""In the document of a stored identity: what its pages went through, and the identity of which they are (``of``)."""

_DOMAIN = b"hicache_ext/stored-identity\0"
_VERSION = b"%d\0" % FORMAT_VERSION
"""In all stored identities: pages of another version are not met, so not taken for damaged."""


@dataclass(frozen=True, slots=True)
class Form:
    """One form of the pages of one identity."""

    identity: bytes
    """The stored one."""
    key: SealKey | None = None
    hides: bool = False
    """Whether page hashes are stored as names that only holders of the key can tell."""
    codec: PageCodec | None = None
    room: int = 0
    """Bytes of the body of encoded pages; 0: of raw ones, whose bodies are as long as they."""
    block: int = 1
    """Bytes of which whole ones are stored."""

    @property
    def plain(self) -> bool:
        """Whether these are the pages themselves: as a tier without transforms stores them."""
        return self.key is None and self.codec is None

    def stored_length(self, payload: int) -> int:
        """Bytes that a medium stores of a page with so many."""
        if self.plain:
            return payload
        length = HEADER_LENGTH + (self.room or payload) + (0 if self.key is None else TAG_LENGTH)
        return -(-length // self.block) * self.block


@dataclass(frozen=True, slots=True)
class Forms:
    """Those of one identity that a tier looks for."""

    all: Sequence[Form]
    """Those that are written first, of these the raw one first."""
    written: Sequence[Form]
    """By this tier now: the raw one, then the rooms, the smallest first."""


class Transforms:
    """What a tier does to its pages, as configured: a codec, a seal, or both. Never changes. Threads: any."""

    def __init__(self, codec: Codec | None, seal: Seal | None, block: int) -> None:
        """``block``: stored pages are padded with zeros to so many bytes."""
        self.codec = codec
        self.seal = seal
        self.block = block

    def forms(self, identity: bytes, document: Mapping[str, Any] | None) -> Forms:
        """The forms of an identity; without its document, of raw pages alone."""
        payload = _payload_of(document)
        codec = None
        if self.codec is not None and document is not None and payload:
            codec = self.codec.for_pages(document, payload)
        keys: Sequence[SealKey | None] = [None] if self.seal is None else self.seal.keys
        rooms = [0] if codec is None else [0, *codec.rooms]
        found = [[self._form(identity, key, codec, room) for room in rooms] for key in keys]
        return Forms([form for of_key in found for form in of_key], found[0])

    def _form(self, identity: bytes, key: SealKey | None, codec: PageCodec | None, room: int) -> Form:
        coded = b"" if self.codec is None else self.codec.label + b"\0%d" % room
        hides = self.seal is not None and self.seal.mode is SealMode.ENCRYPT
        if key is None and not room:
            stored = identity
        elif key is None:
            stored = hashlib.sha256(_DOMAIN + identity + _VERSION + coded).digest()[:IDENTITY_LENGTH]
        else:
            stored = key.stored_identity(_VERSION + (b"encrypt\0" if hides else b"authenticate\0") + coded, identity)
        return Form(stored, key, hides, codec if room else None, room, self.block)

    def document(self, form: Form, identity: bytes, document: Mapping[str, Any]) -> dict[str, Any]:
        """What tools are told of a stored identity. It tells no secret."""
        stored: dict[str, Any] = {"of": identity.hex()}
        if self.seal is not None and form.key is not None:
            stored |= {"seal": self.seal.mode.name.lower(), "key": form.key.id}
        if self.codec is not None:
            stored |= {"codec": self.codec.label.decode("ascii", "replace"), "room": form.room}
        return {**document, STORED_AS: stored}


def stored_as(document: Mapping[str, Any], identity: bytes) -> bool:
    """Whether this is the document of pages of ``identity`` in some form."""
    found = document.get(STORED_AS)
    return isinstance(found, dict) and found.get("of") == identity.hex()


def _payload_of(document: Mapping[str, Any] | None) -> int:
    pool = {} if document is None else document.get("pool", {})
    segments = pool.get("segments") if isinstance(pool, Mapping) else None
    # Whatever somebody has written there.
    if not isinstance(segments, list | tuple) or not all(isinstance(size, int) for size in segments):
        return 0
    return sum(segments)

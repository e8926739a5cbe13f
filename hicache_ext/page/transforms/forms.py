"""The forms that a page may have in a tier, by sealing key and by the room it is encoded into; and the keys of each.

A medium expects one length for each key, so each form has a separate identity. As a consequence, a page that is absent
in one form may be present in another, and the holder of a key looks only for the forms of that key.

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
"""Field of a stored identity's document: the transforms of its pages, and their original identity (``of``)."""

_DOMAIN = b"hicache_ext/stored-identity\0"
_VERSION = b"%d\0" % FORMAT_VERSION
"""Part of all stored identities: pages of another version are not found, so not mistaken for damaged ones."""


@dataclass(frozen=True, slots=True)
class Form:
    """One form of the pages of one identity."""

    identity: bytes
    """The identity under which pages are stored."""
    key: SealKey | None = None
    hides: bool = False
    """Whether page hashes are stored as names that only holders of the key can compute."""
    codec: PageCodec | None = None
    room: int = 0
    """Bytes of the body of encoded pages; 0 for raw pages, whose bodies are as long as their payloads."""
    block: int = 1
    """Block size in bytes; stored lengths are multiples of it."""

    @property
    def plain(self) -> bool:
        """Return whether pages are stored unchanged, as in a tier without transforms."""
        return self.key is None and self.codec is None

    def stored_length(self, payload: int) -> int:
        """Return the bytes that a medium stores for a page of ``payload`` bytes."""
        if self.plain:
            return payload
        length = HEADER_LENGTH + (self.room or payload) + (0 if self.key is None else TAG_LENGTH)
        return -(-length // self.block) * self.block


@dataclass(frozen=True, slots=True)
class Forms:
    """The forms of one identity that a tier looks for."""

    all: Sequence[Form]
    """All forms; the written ones come first, and of these the raw one."""
    written: Sequence[Form]
    """The forms that this tier writes now: the raw one, then the rooms, smallest first."""


class Transforms:
    """The configured transforms of a tier's pages: a codec, a seal, or both. Immutable. Threads: any."""

    def __init__(self, codec: Codec | None, seal: Seal | None, block: int) -> None:
        """``block``: stored pages are padded with zeros to a multiple of this many bytes."""
        self.codec = codec
        self.seal = seal
        self.block = block

    def forms(self, identity: bytes, document: Mapping[str, Any] | None) -> Forms:
        """Return the forms of an identity; without its document, those of raw pages only."""
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
        """Return the document of a stored identity for tools. It contains no secrets."""
        stored: dict[str, Any] = {"of": identity.hex()}
        if self.seal is not None and form.key is not None:
            stored |= {"seal": self.seal.mode.name.lower(), "key": form.key.id}
        if self.codec is not None:
            stored |= {"codec": self.codec.label.decode("ascii", "replace"), "room": form.room}
        return {**document, STORED_AS: stored}


def stored_as(document: Mapping[str, Any], identity: bytes) -> bool:
    """Return whether this is the document of pages of ``identity`` in some form."""
    found = document.get(STORED_AS)
    return isinstance(found, dict) and found.get("of") == identity.hex()


def _payload_of(document: Mapping[str, Any] | None) -> int:
    pool = {} if document is None else document.get("pool", {})
    segments = pool.get("segments") if isinstance(pool, Mapping) else None
    # The document is untrusted and may contain anything.
    if not isinstance(segments, list | tuple) or not all(isinstance(size, int) for size in segments):
        return 0
    return sum(segments)

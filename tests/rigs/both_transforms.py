"""Stores of campaigns with everything on that is done to pages: ``codec: lossless`` and ``seal: {mode: encrypt}``."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from hicache_ext.page.transforms.codec import Codec
from hicache_ext.page.transforms.sealing import Seal, SealKey, SealMode
from hicache_ext.storage.contract.store import PageStore
from hicache_ext.storage.contract.transforming.store import TransformedStore
from hicache_ext.storage.tiers.file.config import FileTierConfig
from hicache_ext.testing.conformance.pages import payload_of

_SECRET = hashlib.sha256(b"campaigns").hexdigest()


def both(store: PageStore, identities: Iterable[bytes], encoded: int) -> PageStore:
    """``store`` with both around it; pages of ``encoded`` bytes are encoded where they shrink."""
    found = TransformedStore(
        store, Codec("lossless"), Seal(SealMode.ENCRYPT, (SealKey("one", _SECRET),)), block=FileTierConfig.block
    )
    for identity in identities:
        found.register_identity(identity, document_of(identity, encoded))
    return found


def both_configured(directory: Path) -> dict[str, Any]:
    """The same as keys of a tier; the key of the seal lies in ``directory``."""
    (directory / "seal-key").write_text(_SECRET)
    keys = [{"id": "one", "file": str(directory / "seal-key")}]
    return {"codec": "lossless", "seal": {"mode": "encrypt", "keys": keys}}


def document_of(identity: bytes, encoded: int) -> dict[str, Any]:
    """Of an identity whose pages of ``encoded`` bytes may be encoded."""
    return {"model": {"id": "example"}, "pool": {"name": identity.hex(), "dtype": "bfloat16", "segments": [encoded]}}


def numbers_of(key: bytes, size: int) -> bytes:
    """The content of a page, ``size`` bytes that follow from its key. Of half of the keys it is numbers of two bytes
    with one exponent, which a codec makes smaller."""
    content = np.frombuffer(payload_of(key, size), np.uint8).copy()
    if key[-1] & 1:
        content[1::2] = 0x3F
    return content.tobytes()

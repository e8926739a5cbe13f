"""What a page IS: every fact that shapes its bytes, in one digest.

Two deployments may share stored bytes only if all these facts agree. ``PageIdentity`` holds them; ``digest()`` is the
first half of every page key (envelope.py, docs/page-format.md) and is repeated inside the stored page. A fact that
differs gives another digest, hence a miss: never a wrong answer.

Why each fact is in it: docs/decisions/identity-of-a-page.md.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hicache_ext.page.envelope import PAGE_HASH_LENGTH

IDENTITY_SCHEMA = 2
"""Raised when the meaning of a field changes; part of the digest."""

_DIGEST_DOMAIN = b"hicache_ext/identity\0"
_TEXT_KEY_DOMAIN = b"hicache_ext/text-key\0"
_DIGITS = 2 * PAGE_HASH_LENGTH
"""Of a page hash, as SGLang writes it."""

DIGEST_LENGTH = 16


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Which weights computed the KV, and how.

    ``fingerprint`` is a digest of every byte of the weight files (equal for equal content under different paths) or ""
    when it is switched off, ``draft`` the same of draft models. ``weights_epoch`` is the configured epoch, extended
    when SGLang updates weights online. ``compute`` holds launch facts that change KV values without changing the
    weights (dtype, quantization, rope overrides, KV scales). LoRA adapters are part of the page hashes instead
    (sglang/adapters.py).
    """

    id: str
    revision: str = ""
    fingerprint: str = ""
    weights_epoch: str = "0"
    compute: str = ""
    draft: str = ""


@dataclass(frozen=True, slots=True)
class Shard:
    """The parallel coordinates of a page's bytes, each with its size: rank 0 of 2 is not rank 0 of 4.

    Replicated bytes (MLA latents) carry tp (0, 1). ``tp`` counts shards of the split-heads layout where SGLang is given
    ``tp_lcm_size``, so that deployments of different TP meet on the same objects.
    """

    tp: tuple[int, int] = (0, 1)
    pp: tuple[int, int] = (0, 1)
    cp: tuple[int, int] = (0, 1)
    dcp: tuple[int, int] = (0, 1)


@dataclass(frozen=True, slots=True)
class PoolIdentity:
    """One pool's page: logical dtype, byte order and geometry.

    ``dtype`` is logical ("float8_e4m3fn", not the uint8 it is stored as). ``layout`` names the host layout's byte
    order. ``segments`` are the sizes in bytes of the page's contiguous runs, in payload order. ``geometry`` holds
    whatever else shapes the bytes: layers, heads, head dims, scales.
    """

    name: str
    kind: str
    dtype: str
    layout: str
    page_size: int
    segments: tuple[int, ...]
    geometry: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class PageIdentity:
    """All facts of one pool of one shard of one model."""

    model: ModelIdentity
    pool: PoolIdentity
    shard: Shard

    def document(self) -> dict[str, Any]:
        """The facts as a JSON-able dict; what tools print and what tiers keep beside their pages."""
        document = dataclasses.asdict(self)
        document["pool"]["geometry"] = dict(self.pool.geometry)
        document["schema"] = IDENTITY_SCHEMA
        return document

    def canonical(self) -> bytes:
        """The one byte string that is digested: JSON, keys sorted, no blanks, UTF-8."""
        return _canonical(self.document())

    def digest(self) -> bytes:
        """16 bytes: the first half of SHA-256 over a domain prefix and ``canonical()``."""
        return digest_of_document(self.document())


def digest_of_document(document: Mapping[str, Any]) -> bytes:
    """The digest of the identity that ``PageIdentity.document()`` described, also after a way through JSON."""
    return hashlib.sha256(_DIGEST_DOMAIN + _canonical(document)).digest()[:DIGEST_LENGTH]


def _canonical(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def joined_page_hashes(keys: Sequence[str]) -> bytes:
    """``page_hash_bytes`` of each key, one behind the other; SGLang's page hashes are converted all at once."""
    text = " ".join(keys)
    try:
        # Skips the blanks.
        raw = bytes.fromhex(text)
    except ValueError:
        raw = b""
    # Every blank is one that was put between two keys, and stands behind 64 digits; none of them is a capital.
    are_hashes = len(text) == (_DIGITS + 1) * len(keys) - 1 and len(raw) == PAGE_HASH_LENGTH * len(keys)
    are_hashes = are_hashes and text[_DIGITS :: _DIGITS + 1] == " " * (len(keys) - 1)
    if are_hashes and not any(capital in text for capital in "ABCDEF"):
        return raw
    return b"".join([page_hash_bytes(key) for key in keys])


def page_hash_bytes(key: str) -> bytes:
    """The 32 bytes under which SGLang's key is stored.

    SGLang's page hashes are 64 lower-case hex digits of a SHA-256 chain: those are taken as they are. Any other string
    (the generic get/set calls allow it) is hashed in a domain of its own and so can never meet a page hash.
    """
    if len(key) == 64:
        try:
            raw = bytes.fromhex(key)
        except ValueError:
            raw = b""
        if len(raw) == 32 and raw.hex() == key:
            return raw
    return hashlib.sha256(_TEXT_KEY_DOMAIN + key.encode("utf-8", "surrogatepass")).digest()

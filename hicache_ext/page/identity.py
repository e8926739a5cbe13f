"""The identity: one digest of every fact that shapes the bytes of a page.

Two deployments may share stored bytes only if all these facts agree. ``PageIdentity`` holds them; ``digest()`` is the
first part of every page key (envelope.py, docs/page-format.md) and is repeated inside the stored page. A different fact
gives a different digest, hence a miss, never a wrong answer.

docs/decisions/weights-identity.md explains why each fact is included.
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
"""Incremented when the meaning of a field changes; part of the digest."""

_DIGEST_DOMAIN = b"hicache_ext/identity\0"
_TEXT_KEY_DOMAIN = b"hicache_ext/text-key\0"
_DIGITS = 2 * PAGE_HASH_LENGTH
"""Hexadecimal digits of a page hash, as SGLang writes it."""

DIGEST_LENGTH = 16
KV_POOL = "kv"
"""SGLang's name of the pool whose pages decide the length of a prefix."""


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """The weights that computed the KV, and how.

    ``fingerprint``: digest of every byte of the weight files, equal under any path; "" when it is switched off.
    ``draft``: the same for draft models. ``weights_epoch``: the configured epoch, extended when SGLang updates weights
    online. ``compute``: launch facts that change KV values without changing the weights (dtype, quantization, rope
    overrides, KV scales). LoRA adapters are part of the page hashes instead (sglang/model_weights.py).
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

    Replicated bytes (MLA latents) have tp (0, 1), and cp without dcp. With SGLang's ``tp_lcm_size``, ``tp`` counts
    shards of the split-heads layout, so that deployments with different TP share pages.
    """

    tp: tuple[int, int] = (0, 1)
    pp: tuple[int, int] = (0, 1)
    cp: tuple[int, int] = (0, 1)
    dcp: tuple[int, int] = (0, 1)


@dataclass(frozen=True, slots=True)
class PoolIdentity:
    """The page of one pool: logical dtype, byte order and geometry.

    ``dtype``: logical ("float8_e4m3fn", not the uint8 it is stored as). ``layout``: byte order of the host layout.
    ``segments``: bytes of each contiguous run of the page, in payload order. ``geometry``: whatever else shapes the
    bytes (layers, heads, head dims, scales).
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
        """Return the facts as JSON, which tools print and tiers keep with their pages."""
        document = dataclasses.asdict(self)
        document["pool"]["geometry"] = dict(self.pool.geometry)
        document["schema"] = IDENTITY_SCHEMA
        return document

    def digest(self) -> bytes:
        """Return 16 bytes: the first half of SHA-256 over a domain prefix and ``canonical``."""
        return digest_of_document(self.document())


def digest_of_document(document: Mapping[str, Any]) -> bytes:
    """Return the digest of the identity with this ``PageIdentity.document()``, even after a round trip through JSON."""
    return hashlib.sha256(_DIGEST_DOMAIN + canonical(document)).digest()[:DIGEST_LENGTH]


def canonical(document: Mapping[str, Any]) -> bytes:
    """Return the bytes to digest: JSON with sorted keys and without blanks, in UTF-8."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode(
        errors="surrogatepass"
    )


def joined_page_hashes(keys: Sequence[str]) -> bytes:
    """Return the concatenated ``page_hash_bytes`` of all keys; SGLang's page hashes are converted in one step."""
    text = " ".join(keys)
    try:
        # fromhex skips blanks.
        raw = bytes.fromhex(text)
    except ValueError:
        raw = b""
    # Check that each blank separates two keys of 64 digits, and that no digit is upper-case.
    are_hashes = len(text) == (_DIGITS + 1) * len(keys) - 1 and len(raw) == PAGE_HASH_LENGTH * len(keys)
    are_hashes = are_hashes and text[_DIGITS :: _DIGITS + 1] == " " * (len(keys) - 1)
    if are_hashes and not any(capital in text for capital in "ABCDEF"):
        return raw
    return b"".join([page_hash_bytes(key) for key in keys])


def page_hash_bytes(key: str) -> bytes:
    """Return the 32 bytes under which SGLang's key is stored.

    SGLang's page hashes are 64 lower-case hex digits and are used unchanged. Any other string (generic get and set
    allow it) is hashed in a separate domain, so it never equals a page hash.
    """
    if len(key) == 64:
        try:
            raw = bytes.fromhex(key)
        except ValueError:
            raw = b""
        if len(raw) == 32 and raw.hex() == key:
            return raw
    return hashlib.sha256(_TEXT_KEY_DOMAIN + key.encode("utf-8", "surrogatepass")).digest()

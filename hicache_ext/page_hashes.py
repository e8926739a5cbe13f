"""The page hashes that SGLang gives the pages of a prompt, computed from its tokens: for tools that name pages.

Page ``i`` is ``sha256(digest of page i - 1 || its tokens as little-endian uint32)``; the first page has no digest
before it, or that of the request's namespace (``extra_key``, ``cache_salt``). Source: SGLang 0.5.23,
``sglang.srt.mem_cache.utils.get_storage_hash_str``, against which the tests compare.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

_NAMESPACE = b"sglang-cache-namespace-v1"


def page_hashes(
    tokens: Sequence[int], page_size: int, *, extra_key: str | None = None, cache_salt: str | None = None
) -> list[bytes]:
    """The 32-byte hash of every whole page of ``tokens``; what is left over at the end is in no page.

    Raises ValueError for a token that is no uint32, or a page size under 1. Servers with EAGLE hash pairs of tokens and
    give other hashes.
    """
    if page_size < 1:
        raise ValueError(f"page size {page_size}: at least 1")
    if any(not 0 <= token < 1 << 32 for token in tokens):
        raise ValueError("a token id is a whole number from 0 to 4294967295")
    whole = np.asarray(tokens[: len(tokens) - len(tokens) % page_size], dtype="<u4").tobytes()
    digest = _namespace_digest(extra_key, cache_salt)
    hashes: list[bytes] = []
    for start in range(0, len(whole), 4 * page_size):
        digest = hashlib.sha256(digest + whole[start : start + 4 * page_size]).digest()
        hashes.append(digest)
    return hashes


def _namespace_digest(extra_key: str | None, cache_salt: str | None) -> bytes:
    if extra_key is None and cache_salt is None:
        return b""
    digest = hashlib.sha256(_NAMESPACE)
    for part in (extra_key, cache_salt):
        if part is None:
            digest.update(b"\x00")
        else:
            encoded = part.encode()
            digest.update(b"\x01" + len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()

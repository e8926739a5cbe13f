"""The page hashes of a prompt, as SGLang computes them: a SHA-256 chain over token ids, page by page.

A page's hash is SHA-256 over the hash of the preceding page (32 bytes; none for the first) and its token ids as
little-endian unsigned 32-bit numbers. Requests with an ``extra_key`` (LoRA) or a ``cache_salt`` start the chain with a
seed instead. Source: ``sglang.srt.mem_cache.utils`` (``get_storage_hash_str``, ``storage_namespace_seed``); tests
compare the two. This package passes ``namespaced_extra_key`` to SGLang as ``extra_key``. EAGLE's bigram chains are not
supported.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Sequence

from hicache_ext.errors import HicacheExtError

_NAMESPACE_DOMAIN = b"sglang-cache-namespace-v1"
_LARGEST_TOKEN = 2**32 - 1
_NO_ADAPTER = "-"
_LIKE_AN_ADAPTER = re.compile(r"[0-9a-f]{32}-*\Z")


def page_hashes(tokens: Sequence[int], page_size: int, seed: bytes = b"") -> list[bytes]:
    """Return 32 bytes per whole page of ``tokens``; a partial last page has no hash.

    Raises HicacheExtError for a number that cannot be a token id.
    """
    for position, token in enumerate(tokens):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token <= _LARGEST_TOKEN:
            raise HicacheExtError(f"number {position + 1} of the tokens is {token!r}, not a token id from 0 to 2^32-1")
    hashes: list[bytes] = []
    previous = seed
    for first in range(0, len(tokens) - page_size + 1, page_size):
        page = tokens[first : first + page_size]
        previous = hashlib.sha256(previous + struct.pack(f"<{page_size}I", *page)).digest()
        hashes.append(previous)
    return hashes


def namespace_seed(extra_key: str | None, cache_salt: str | None) -> bytes:
    """Return the start of a chain for requests with an extra key or a salt; empty if they have neither."""
    if extra_key is None and cache_salt is None:
        return b""
    digest = hashlib.sha256(_NAMESPACE_DOMAIN)
    for part in (extra_key, cache_salt):
        if part is None:
            digest.update(b"\x00")
        else:
            encoded = part.encode()
            digest.update(b"\x01" + len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()


def without_adapter(extra_key: str) -> str:
    """Return a request's own extra key, without what ``namespaced_extra_key`` or SGLang appended for a LoRA adapter."""
    own, digest = extra_key[:-32], extra_key[-32:]
    return own if _LIKE_AN_ADAPTER.fullmatch(digest) else extra_key


def namespaced_extra_key(extra_key: str | None, adapter: str = "") -> str | None:
    """Return the extra key under which the pages of a request are hashed if this package's plug-in is in force.

    ``adapter``: the digest of the LoRA adapter's content, "" without one; it replaces SGLang's own name of the adapter.
    A request without an adapter must neither read nor write an adapter's pages, so an extra key that ends like a digest
    is marked. Different pairs never give the same key.
    """
    if adapter:
        return (extra_key or "") + adapter
    if extra_key is not None and _LIKE_AN_ADAPTER.search(extra_key):
        return extra_key + _NO_ADAPTER
    return extra_key

"""The Redis keys of a tier, below its prefix: ``page:<identity>:<page hash>`` and ``identity:<identity>``, in hex."""

from __future__ import annotations

from binascii import hexlify
from collections.abc import Sequence

from hicache_ext.page.envelope import IDENTITY_LENGTH, KEY_LENGTH
from hicache_ext.storage.contract.store import key_words


def page_prefix(prefix: str) -> bytes:
    return prefix.encode() + b"page:"


def page_name(page_names: bytes, key: bytes) -> bytes:
    """The Redis key of a page; ``page_names`` is its ``page_prefix``. No hash tag, so that a cluster spreads the pages
    of one conversation over all nodes."""
    (name,) = page_names_of(page_names, [key])
    return name


def page_names_of(page_names: bytes, keys: Sequence[bytes]) -> list[bytes]:
    """``page_name`` of each key."""
    text = hexlify(key_words(keys).tobytes())
    length, split = 2 * KEY_LENGTH, 2 * IDENTITY_LENGTH
    return [
        page_names + text[first : first + split] + b":" + text[first + split : first + length]
        for first in range(0, len(text), length)
    ]


def page_key(page_names: bytes, name: bytes) -> bytes | None:
    """The key of a page of ours; None for any other Redis key."""
    rest = name.removeprefix(page_names)
    if rest == name or rest[32:33] != b":" or not is_hex(rest[:32], 32) or not is_hex(rest[33:], 64):
        return None
    return bytes.fromhex((rest[:32] + rest[33:]).decode())


def identity_name(prefix: str, digest: bytes) -> bytes:
    return b"%bidentity:%b" % (prefix.encode(), digest.hex().encode())


def is_hex(text: bytes, length: int) -> bool:
    """Whether ``text`` is that many lower-case hex digits."""
    return len(text) == length and not text.strip(b"0123456789abcdef")

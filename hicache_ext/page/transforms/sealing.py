"""Seals: pages that only who has the key can make, or read.

Of each configured key, its id and its secret, two things are derived that its holders alone have:

- a key for each page: HMAC-SHA-256 of a random salt of 192 bits and the page's stored key. So a cipher is used with it
  once, and its nonce may be constant. That two pages share one takes two equal salts for one stored key, and no counter
  is relied on that a fork, a restart, another machine or a restored snapshot could set back (``new_salts``);
- the names under which its pages are stored (``stored_identity``, ``hidden_hashes``). So who has another key, or none,
  does not find them, and takes none of them for damaged.

Pure; any thread. ``cryptography`` is imported by ``SealKey`` alone.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import hmac
import itertools
import os
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NoReturn

import numpy as np
import numpy.typing as npt

from hicache_ext.page.envelope import IDENTITY_LENGTH
from hicache_ext.page.transforms.header import HEADER_LENGTH, SALT_LENGTH, TAG_LENGTH, Header

SEAL_CIPHER: Final = "seal_cipher"
"""Why a page is not served that may be good: its cipher cannot be had here, for whatever reason (FIPS)."""

_DOMAIN = b"hicache_ext/seal/1"
_NONCE = bytes(12)
_ROUNDS = 4


class SealMode(enum.IntEnum):
    """What a seal does; the number stands in the header of a page."""

    AUTHENTICATE = 1
    """Pages can be read by all who reach them, and made by holders of the key."""
    ENCRYPT = 2
    """Pages can be made and read by holders of the key."""


class CipherKind(enum.IntEnum):
    AES_256_GCM = 1
    CHACHA20_POLY1305 = 2


_sealed_before = itertools.count()


def new_salts(count: int) -> bytes:
    """So many salts, joined, that nobody has used before.

    The kernel's random bits alone would do, unless a machine was copied or restored while it ran and its kernel does
    not notice: both machines then have the same bits for a while. So the moment is mixed in, too, and what differs
    between processes.
    """
    moment = struct.pack("<4Q", time.time_ns(), time.monotonic_ns(), os.getpid(), next(_sealed_before))
    return hashlib.shake_256(os.urandom(32) + moment).digest(count * SALT_LENGTH)


class SealKey:
    """One key of a tier. Never shows its secret."""

    __slots__ = ("_hashes", "_identities", "_invalid_tag", "_kinds", "_pages", "id")

    def __init__(self, id: str, secret: str) -> None:
        """``id``: at most 16 bytes of ASCII. Raises ImportError where ``cryptography`` is not there."""
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

        self.id = id
        # With the id: what is sealed under one id is of no use under another, so its names must not meet the other's.
        root = hmac.digest(_DOMAIN, id.encode() + b"\0" + secret.encode(), hashlib.sha256)
        self._pages = hmac.digest(root, b"pages", hashlib.sha256)
        self._identities = hmac.digest(root, b"identities", hashlib.sha256)
        rounds = [hmac.digest(root, b"hashes %d" % number, hashlib.sha256) for number in range(_ROUNDS)]
        self._hashes = [Cipher(algorithms.AES(key), modes.ECB()) for key in rounds]
        self._kinds: dict[int, Any] = {
            CipherKind.AES_256_GCM: AESGCM,
            CipherKind.CHACHA20_POLY1305: ChaCha20Poly1305,
        }
        self._invalid_tag = InvalidTag

    def __repr__(self) -> str:
        return f"SealKey({self.id!r})"

    def is_same(self, other: SealKey) -> bool:
        """Whether both seal alike: of one id, and of one secret."""
        return hmac.compare_digest(self._identities, other._identities)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a key of a seal is never written anywhere")

    # -- names -----------------------------------------------------------------------------------------------------

    def stored_identity(self, label: bytes, identity: bytes) -> bytes:
        """The identity under which the pages of ``identity`` are stored; ``label``: what else makes them differ."""
        return hmac.digest(self._identities, identity + label, hashlib.sha256)[:IDENTITY_LENGTH]

    def hidden_hashes(self, hashes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Page hashes, rows of four words, as names from which nobody without the key can tell what they were. No two
        have the same name: it is a permutation (Luby and Rackoff's, of AES-256 in four rounds)."""
        halves = hashes.astype(np.int64, copy=False).reshape(-1, 2, 2)
        left, right = halves[:, 0], halves[:, 1]
        for cipher in self._hashes:
            mixed = cipher.encryptor().update(right.tobytes())
            left, right = right, left ^ np.frombuffer(mixed, np.int64).reshape(-1, 2)
        hidden: npt.NDArray[np.int64] = np.ascontiguousarray(np.concatenate([left, right], axis=1))
        return hidden

    # -- pages -----------------------------------------------------------------------------------------------------

    def seal(self, head: Header, stored_key: bytes, stored: memoryview, body: memoryview | None) -> None:
        """Seal a page. ``stored`` begins with the memory of header, body and tag, the header written. ENCRYPT takes the
        body from ``body``, which is other memory; AUTHENTICATE finds it in ``stored``."""
        cipher, sealed = self._cipher(head, stored_key), stored[: head.end]
        if head.seal == SealMode.ENCRYPT:
            cipher.encrypt_into(_NONCE, body, sealed[:HEADER_LENGTH], sealed[HEADER_LENGTH:])
        else:
            sealed[-TAG_LENGTH:] = cipher.encrypt(_NONCE, b"", sealed[:-TAG_LENGTH])

    def unseal(
        self, head: Header, stored_key: bytes, stored: memoryview, body: memoryview | None = None
    ) -> Literal["seal_form", "seal_tag", "seal_cipher"] | None:
        """Why a page is not as it was sealed (``body.read``); None where it is. ENCRYPT writes the body into ``body``,
        where it is wanted: it may hold anything where the page is refused."""
        if head.cipher not in self._kinds:
            return "seal_form"
        sealed = stored[: head.end]
        try:
            cipher = self._cipher(head, stored_key)
            if head.seal == SealMode.ENCRYPT:
                # Its length is not more than what is stored.
                body = np.empty(head.body_length, np.uint8).data if body is None else body
                cipher.decrypt_into(_NONCE, sealed[HEADER_LENGTH:], sealed[:HEADER_LENGTH], body)
            else:
                cipher.decrypt(_NONCE, sealed[-TAG_LENGTH:], sealed[:-TAG_LENGTH])
        except self._invalid_tag:
            return "seal_tag"
        except Exception:  # noqa: BLE001 - a cryptographic library's errors end here: they are of this page alone
            return SEAL_CIPHER
        return None

    def _cipher(self, head: Header, stored_key: bytes) -> Any:
        """With the key of one page."""
        return self._kinds[head.cipher](hmac.digest(self._pages, head.salt + stored_key, hashlib.sha256))


@dataclass(frozen=True, slots=True)
class Seal:
    """The seal of a tier."""

    mode: SealMode
    keys: Sequence[SealKey]
    """Pages of these are read; the first one writes."""

    def names_of(self, hashes: Sequence[bytes]) -> list[bytes]:
        """The page hashes under which pages with these may be stored: hidden by each of the keys, or as they are."""
        if self.mode is not SealMode.ENCRYPT:
            return list(hashes)
        words = np.frombuffer(b"".join(hashes), np.int64).reshape(len(hashes), -1)
        return [row.tobytes() for key in self.keys for row in key.hidden_hashes(words)]


@functools.cache
def fastest_cipher() -> CipherKind:
    """AES where the processor has instructions for it; without them it is slow, and its time tells of the key."""
    try:
        words = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        words = []
    return CipherKind.AES_256_GCM if "aes" in words else CipherKind.CHACHA20_POLY1305

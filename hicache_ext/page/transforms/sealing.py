"""Seals: pages that only holders of the key can make, or also read.

From each configured key, i.e. its id and its secret, two things are derived that only its holders can compute:

- a key for each page: HMAC-SHA-256 of a random 192-bit salt and the page's stored key. A cipher is used with it only
  once, so its nonce may be constant. Two pages share a key only if two salts for one stored key are equal, and no
  counter is involved that a fork, a restart, another machine or a restored snapshot could reset (``new_salts``);
- the names under which its pages are stored (``stored_identity``, ``hidden_hashes``). So a reader with another key, or
  none, does not find these pages and does not mistake them for damaged ones.

Pure; any thread. Only ``SealKey`` imports ``cryptography``.
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
"""Reason for not serving a page that may be good: its cipher is unavailable here, for whatever reason (FIPS)."""

_DOMAIN = b"hicache_ext/seal/1"
_NONCE = bytes(12)
_ROUNDS = 4


class SealMode(enum.IntEnum):
    """The protection that a seal gives; the number is stored in the header of a page."""

    AUTHENTICATE = 1
    """Anybody with access can read pages, but only holders of the key can make them."""
    ENCRYPT = 2
    """Only holders of the key can make and read pages."""


class CipherKind(enum.IntEnum):
    AES_256_GCM = 1
    CHACHA20_POLY1305 = 2


_sealed_before = itertools.count()


def new_salts(count: int) -> bytes:
    """Return ``count`` concatenated salts that were never used before.

    The kernel's random bits alone would suffice, unless a machine was copied or restored while it ran and its kernel
    does not notice: both machines then have the same bits for a while. So the current time is mixed in, and values that
    differ between processes.
    """
    moment = struct.pack("<4Q", time.time_ns(), time.monotonic_ns(), os.getpid(), next(_sealed_before))
    return hashlib.shake_256(os.urandom(32) + moment).digest(count * SALT_LENGTH)


class SealKey:
    """One key of a tier. Never reveals its secret."""

    __slots__ = ("_hashes", "_identities", "_invalid_tag", "_kinds", "_pages", "id")

    def __init__(self, id: str, secret: str) -> None:
        """``id``: at most 16 bytes of ASCII. Raises ImportError if ``cryptography`` is missing."""
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

        self.id = id
        # Includes the id: pages sealed under one id are useless under another, so their names must not collide.
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
        """Return whether both keys have the same id and the same secret."""
        return hmac.compare_digest(self._identities, other._identities)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a key of a seal is never written anywhere")

    # -- names -----------------------------------------------------------------------------------------------------

    def stored_identity(self, label: bytes, identity: bytes) -> bytes:
        """Return the identity under which pages of ``identity`` are stored; ``label``: what else distinguishes it."""
        return hmac.digest(self._identities, identity + label, hashlib.sha256)[:IDENTITY_LENGTH]

    def hidden_hashes(self, hashes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Convert page hashes, rows of four words, to names that cannot be inverted without the key. Names are unique,
        because this is a permutation (Luby-Rackoff, with AES-256 in four rounds)."""
        halves = hashes.astype(np.int64, copy=False).reshape(-1, 2, 2)
        left, right = halves[:, 0], halves[:, 1]
        for cipher in self._hashes:
            mixed = cipher.encryptor().update(right.tobytes())
            left, right = right, left ^ np.frombuffer(mixed, np.int64).reshape(-1, 2)
        hidden: npt.NDArray[np.int64] = np.ascontiguousarray(np.concatenate([left, right], axis=1))
        return hidden

    # -- pages -----------------------------------------------------------------------------------------------------

    def seal(self, head: Header, stored_key: bytes, stored: memoryview, body: memoryview | None) -> None:
        """Seal a page. ``stored`` begins with header, body and tag; the header is already written. ENCRYPT takes the
        body from ``body``, which is separate memory; AUTHENTICATE finds it in ``stored``."""
        cipher, sealed = self._cipher(head, stored_key), stored[: head.end]
        if head.seal == SealMode.ENCRYPT:
            cipher.encrypt_into(_NONCE, body, sealed[:HEADER_LENGTH], sealed[HEADER_LENGTH:])
        else:
            sealed[-TAG_LENGTH:] = cipher.encrypt(_NONCE, b"", sealed[:-TAG_LENGTH])

    def unseal(
        self, head: Header, stored_key: bytes, stored: memoryview, body: memoryview | None = None
    ) -> Literal["seal_form", "seal_tag", "seal_cipher"] | None:
        """Return why a page does not match its seal (``body.read``), or None if it does. ENCRYPT writes the body into
        ``body``, if given, which may hold anything if the page is refused."""
        if head.cipher not in self._kinds:
            return "seal_form"
        sealed = stored[: head.end]
        try:
            cipher = self._cipher(head, stored_key)
            if head.seal == SealMode.ENCRYPT:
                # The length was checked: it is at most that of the stored page.
                body = np.empty(head.body_length, np.uint8).data if body is None else body
                cipher.decrypt_into(_NONCE, sealed[HEADER_LENGTH:], sealed[:HEADER_LENGTH], body)
            else:
                cipher.decrypt(_NONCE, sealed[-TAG_LENGTH:], sealed[:-TAG_LENGTH])
        except self._invalid_tag:
            return "seal_tag"
        except Exception:  # noqa: BLE001 - errors of the cryptographic library concern this page alone
            return SEAL_CIPHER
        return None

    def _cipher(self, head: Header, stored_key: bytes) -> Any:
        """Return the cipher with the key of one page."""
        return self._kinds[head.cipher](hmac.digest(self._pages, head.salt + stored_key, hashlib.sha256))


@dataclass(frozen=True, slots=True)
class Seal:
    """The seal of a tier."""

    mode: SealMode
    keys: Sequence[SealKey]
    """Keys whose pages are read; the first one seals new pages."""

    def names_of(self, hashes: Sequence[bytes]) -> list[bytes]:
        """Return the page hashes under which these pages may be stored: hidden by each key, or unchanged."""
        if self.mode is not SealMode.ENCRYPT:
            return list(hashes)
        words = np.frombuffer(b"".join(hashes), np.int64).reshape(len(hashes), -1)
        return [row.tobytes() for key in self.keys for row in key.hidden_hashes(words)]


@functools.cache
def fastest_cipher() -> CipherKind:
    """Return AES if the CPU has instructions for it; without them it is slow, and its timing leaks the key."""
    try:
        words = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        words = []
    return CipherKind.AES_256_GCM if "aes" in words else CipherKind.CHACHA20_POLY1305

"""Addresses, logins and certificates of the servers of a tier, as its configuration says, and the names of its keys."""

from __future__ import annotations

import logging
import socket
import ssl
from binascii import hexlify
from collections.abc import Sequence

from hicache_ext.page.envelope import IDENTITY_LENGTH, KEY_LENGTH
from hicache_ext.runtime.file_signature import FileSignature, file_signature
from hicache_ext.runtime.log_limit import LimitedLog
from hicache_ext.storage.contract.store import key_words
from hicache_ext.storage.tiers.redis.config import Endpoint, RedisTierConfig

logger = logging.getLogger(__name__)

Address = tuple[int, tuple[str, int] | str]
"""Address family, and host and port or the path of a Unix socket."""

SHORT_CALL = 1.0
"""Seconds one administrative request may take (topology, probes of a node that is down), or the tier's timeout."""


def short_call(tier: RedisTierConfig) -> float:
    return min(SHORT_CALL, tier.longest_call)


def login_arguments(tier: RedisTierConfig) -> list[bytes]:
    """AUTH and its arguments; empty without a password. The secret is revealed for each login, so that a changed one is
    found. Raises ConfigError when it cannot be read."""
    if tier.password is None:
        return []
    user = [] if tier.username is None else [tier.username.encode()]
    return [b"AUTH", *user, tier.password.reveal().encode()]


_UNUSABLE_SAID = 60.0
"""Seconds between two lines of the log about TLS files that cannot be used."""


class TlsSettings:
    """Certificates and key of a tier for its next connection: made anew when one of their files was exchanged.

    Threads: any.
    """

    def __init__(self, tier: RedisTierConfig) -> None:
        """Raises OSError (ssl.SSLError is one) for files that cannot be used."""
        self._tier = tier
        self._log = LimitedLog(logger, _UNUSABLE_SAID)
        self._made = self._signature(), _tls_context(tier)

    def context(self) -> ssl.SSLContext:
        """What the files say; what they said before where they cannot be used, as amid an exchange."""
        signature = self._signature()
        before, context = self._made
        if signature == before:
            return context
        try:
            made = _tls_context(self._tier)
        except OSError as error:
            words = "tier redis: the exchanged TLS files cannot be used (%s); going on with those that were there"
            self._log.log(logging.WARNING, "tls", words, error.strerror or error)
            return context
        self._made = signature, made
        return made

    def _signature(self) -> tuple[FileSignature | None, ...]:
        files = (self._tier.tls_ca, self._tier.tls_certificate, self._tier.tls_key)
        return tuple(None if file is None else file_signature(file) for file in files)


def _tls_context(tier: RedisTierConfig) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=tier.tls_ca)
    context.check_hostname = tier.tls_verify == "full"
    context.verify_mode = ssl.CERT_NONE if tier.tls_verify == "none" else ssl.CERT_REQUIRED
    if tier.tls_certificate is not None:
        context.load_cert_chain(tier.tls_certificate, tier.tls_key)
    return context


def resolve(endpoint: Endpoint) -> list[Address]:
    """The addresses of an endpoint, IPv6 and IPv4, in the order of the resolver. Raises OSError.

    Name servers keep no deadline: never called on a thread that a store's caller waits for.
    """
    if endpoint.is_path:
        return [(socket.AF_UNIX, endpoint.host)]
    try:
        found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    except (UnicodeError, OverflowError):
        raise OSError(f"{endpoint.host!r} is not the name of a host") from None
    return list(dict.fromkeys((int(family), (str(host), int(port))) for family, _, _, _, (host, port, *_) in found))


# -- names -------------------------------------------------------------------------------------------------------------
#
# The Redis keys of a tier, below its prefix: ``page:<identity>:<page hash>`` and ``identity:<identity>``, in hex.


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

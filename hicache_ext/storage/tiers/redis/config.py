"""``type: redis``: a Redis or Valkey server, or a cluster of them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal, NamedTuple, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from hicache_ext.config.problems import quoted, refuse
from hicache_ext.config.schema import Allowed
from hicache_ext.config.secrets import SecretOrNone
from hicache_ext.config.tier import RemoteTierConfig
from hicache_ext.config.values import (
    absolute_path,
    duration,
    expand_templates,
    one_or_more,
    or_auto,
    or_word,
    whole_number,
)
from hicache_ext.errors import ConfigError

MOST_CONNECTIONS = 64
LONGEST_PREFIX = 64
LONGEST_TTL = 365 * 86400
DEFAULT_PORT = 6379
SENTINEL_PORT = 26379
SENTINEL = "+sentinel"

_URL_ALLOWED = (
    "redis://HOST:PORT, rediss://HOST:PORT (TLS), unix:///PATH, or a list of nodes of one cluster, or of Sentinels: "
    "redis+sentinel://HOST:PORT/SERVICE, rediss+sentinel://HOST:PORT/SERVICE"
)
_PREFIX_ALLOWED = f"1 to {LONGEST_PREFIX} of the characters A-Z a-z 0-9 _ . : / -"
_TTL_ALLOWED = "a duration of whole seconds from 1s to a year, such as 24h, or none"
_FILE_ALLOWED = "an absolute path"
_NAME_ALLOWED = "text"
# Braces would form a hash tag and put all pages on one node of a cluster. Blanks and wildcards have no use in a prefix.
_PREFIX = rf"^[A-Za-z0-9_.:/-]{{1,{LONGEST_PREFIX}}}$"

_NAMED_HOST = re.compile(r"[A-Za-z0-9._:%-]{1,253}")


class Endpoint(NamedTuple):
    """The address one server listens on: host and port, or the path of a Unix socket."""

    host: str
    port: int = 0

    @classmethod
    def named(cls, host: object, port: object) -> Endpoint:
        """Return the endpoint that a server names. Raise ValueError for a path: a local socket would receive the
        password without TLS."""
        text, number = (str(word, "ascii") if isinstance(word, bytes) else str(word) for word in (host, port))
        if not _NAMED_HOST.fullmatch(text) or not 0 < int(number) < 65536:
            raise ValueError("no host and port")
        return cls(text, int(number))

    @property
    def is_path(self) -> bool:
        return self.host.startswith("/")

    def __str__(self) -> str:
        return self.host if self.is_path else f"{self.host}:{self.port}"


def _url(text: object, place: str, others: Sequence[str]) -> str:
    """Expand the templates in an address and check the result."""
    if not isinstance(text, str):
        raise refuse(text, _URL_ALLOWED, place)
    url = expand_templates(text, place)
    _parse_url(url, text, place)
    scheme, schemes = urlsplit(url).scheme, {urlsplit(other).scheme for other in others}
    if url in others:
        raise ConfigError(place, f"{quoted(text)} is there twice", "distinct addresses")
    if schemes and ({scheme} != schemes or scheme == "unix"):
        raise ConfigError(place, "nodes of one cluster are all redis:// or all rediss://", _URL_ALLOWED)
    if scheme.endswith(SENTINEL) and others and urlsplit(url).path != urlsplit(others[0]).path:
        raise ConfigError(place, "the Sentinels of one tier are asked for one service", _URL_ALLOWED)
    return url


def _parse_url(url: str, written: str, place: str) -> Endpoint:
    """Parse ``url``. Errors show ``written`` instead, so as not to reveal values from environment variables."""

    def wrong(problem: str) -> ConfigError:
        return ConfigError(place, problem, _URL_ALLOWED)

    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise wrong(f"{quoted(written)} is not an address") from None
    if parts.scheme.startswith("valkey"):
        raise wrong(f"{quoted(written)}: Valkey speaks Redis' protocol, and is written redis:// or rediss://")
    sentinel = parts.scheme.endswith(SENTINEL)
    if parts.scheme.removesuffix(SENTINEL) not in ("redis", "rediss") and parts.scheme != "unix":
        raise wrong(f"{quoted(written)} is not an address of redis")
    # Every tool displays the address, and SGLang sends it over HTTP.
    if "@" in parts.netloc:
        raise ConfigError(place, "an address holds no login: use username and password", _URL_ALLOWED)
    if parts.query or parts.fragment:
        raise wrong(f"{quoted(written)} has options; they are keys of the tier")
    if parts.scheme == "unix":
        if parts.netloc or not os.path.isabs(parts.path) or "\0" in parts.path:
            raise wrong(f"{quoted(written)} does not name the absolute path of a socket")
        return Endpoint(parts.path)
    if sentinel and (not parts.path.strip("/") or "/" in parts.path.strip("/")):
        raise wrong(f"{quoted(written)} does not end with the name of a service (mymaster)")
    if not sentinel and parts.path not in ("", "/"):
        raise wrong(f"{quoted(written)} has a path; the database is the key database")
    if not parts.hostname or port == 0 or any(character.isspace() for character in url):
        raise wrong(f"{quoted(written)} is not an address")
    return Endpoint(parts.hostname, port or (SENTINEL_PORT if sentinel else DEFAULT_PORT))


def _ttl(value: object) -> int:
    seconds = duration(1, LONGEST_TTL)(value)
    if seconds != int(seconds):
        raise refuse(value, _TTL_ALLOWED)
    return int(seconds)


def parse_username(value: object) -> str:
    if not isinstance(value, str) or not value or not value.isprintable():
        raise refuse(value, _NAME_ALLOWED)
    return value


_File = Annotated[str | None, Allowed(_FILE_ALLOWED, absolute_path)]


class RedisTierConfig(RemoteTierConfig):
    """Redis or Valkey, one server or a cluster."""

    keeps_timeout: ClassVar[bool] = True
    carries_hints: ClassVar[bool] = True
    keeps_identities: ClassVar[bool] = True
    removed: ClassVar[Mapping[str, str]] = {
        "client_name": "CLIENT LIST shows hicache_ext",
        "in_flight": "the round trip of a connection decides, up to 8MiB",
        "read_replicas": "pages are read where they are written; spread them over a cluster",
    }

    type: Literal["redis"] = "redis"
    url: Annotated[tuple[str, ...], Allowed(_URL_ALLOWED, one_or_more(_url))]
    """the server, or some nodes of the cluster; the others are found"""
    cluster: Annotated[bool | None, Allowed("true, false, or auto", or_auto())] = None
    """auto: as the server says"""
    password: SecretOrNone = None
    """of the user, by reference"""
    username: Annotated[str | None, Allowed(_NAME_ALLOWED, parse_username)] = None
    """ACL user; left out: the default user"""
    sentinel_password: SecretOrNone = None
    """of the Sentinels, by reference; the servers' is password"""
    sentinel_username: Annotated[str | None, Allowed(_NAME_ALLOWED, parse_username)] = None
    """ACL user of the Sentinels"""
    database: Annotated[int, Allowed("a whole number from 0 to 65535", whole_number(0, 65535))] = 0
    """a cluster has only 0"""
    prefix: Annotated[str, Field(pattern=_PREFIX), Allowed(_PREFIX_ALLOWED)] = "hicache_ext:"
    """what every key of this tier begins with"""
    connections: Annotated[int, Allowed(f"1 to {MOST_CONNECTIONS}", whole_number(1, MOST_CONNECTIONS))] = 4
    """connections that carry pages, per node and rank"""
    ttl: Annotated[int | None, Allowed(_TTL_ALLOWED, or_word("none", None, _ttl))] = None
    """how long a page is kept after it was written; none: the server decides"""
    tls_ca: _File = None
    """certificates of the authorities to trust; left out: the system's"""
    tls_certificate: _File = None
    """this client's certificate"""
    tls_key: _File = None
    """its private key"""
    tls_verify: Literal["full", "ca", "none"] = "full"
    """the server's certificate: its authority and name, its authority, or nothing"""

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        return tuple(_parse_url(url, url, "") for url in self.url)

    @property
    def tls(self) -> bool:
        return self.url[0].startswith("rediss")

    @property
    def service(self) -> str | None:
        """The service name by which Sentinels know the primary; None without Sentinels."""
        parts = urlsplit(self.url[0])
        return parts.path.strip("/") if parts.scheme.endswith(SENTINEL) else None

    def summary(self) -> str:
        limits = "" if self.ttl is None else f", ttl {self.ttl}s"
        return f"redis{limits}, {', '.join(self.url)}"

    @model_validator(mode="after")
    def _keys_fit_together(self) -> Self:
        sentinels = self.service is not None
        if self.cluster is False and len(self.url) > 1 and not sentinels:
            raise ConfigError(".cluster", "several addresses are nodes of a cluster", "auto, true")
        if self.cluster is True and sentinels:
            raise ConfigError(".cluster", "a cluster has no Sentinels", "auto, false")
        if self.cluster is True and self.database:
            raise ConfigError(".database", "a cluster has only database 0", "0")
        for user, password in (("username", "password"), ("sentinel_username", "sentinel_password")):
            if getattr(self, user) is not None and getattr(self, password) is None:
                raise ConfigError(f".{user}", f"a user needs the key {password}", _NAME_ALLOWED)
        if self.sentinel_password is not None and not sentinels:
            allowed = "an address redis+sentinel:// or rediss+sentinel://"
            raise ConfigError(".sentinel_password", "there are no Sentinels", allowed)
        for key in ("tls_ca", "tls_certificate", "tls_key", "tls_verify"):
            if key in self.model_fields_set and not self.tls:
                raise ConfigError(f".{key}", "TLS is used only with rediss://", "a rediss:// address")
        if self.tls_key is not None and self.tls_certificate is None:
            raise ConfigError(".tls_key", "a key needs the key tls_certificate", _FILE_ALLOWED)
        return self

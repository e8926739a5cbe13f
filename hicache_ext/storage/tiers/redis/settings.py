"""What a Redis tier is opened with: endpoints, login, TLS, limits; the clients and addresses that follow from them."""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import redis

    from hicache_ext.config.secrets import Secret
    from hicache_ext.storage.tiers.redis.config import RedisTierConfig

SHORT_CALL = 1.0
"""Seconds one administrative request may take (topology, probes of a node that is down), or the tier's timeout."""


class Endpoint(NamedTuple):
    """Where one server listens: host and port, or the path of a Unix socket."""

    host: str
    port: int = 0

    @property
    def is_path(self) -> bool:
        return self.host.startswith("/")

    def __str__(self) -> str:
        return self.host if self.is_path else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class TlsSettings:
    ca: str | None = None
    certificate: str | None = None
    key: str | None = None
    verify: Literal["full", "ca", "none"] = "full"

    def context(self) -> ssl.SSLContext:
        """Raises OSError (ssl.SSLError is one) for files that cannot be used."""
        context = ssl.create_default_context(cafile=self.ca)
        context.check_hostname = self.verify == "full"
        context.verify_mode = ssl.CERT_NONE if self.verify == "none" else ssl.CERT_REQUIRED
        if self.certificate is not None:
            context.load_cert_chain(self.certificate, self.key)
        return context


@dataclass(frozen=True, slots=True)
class RedisSettings:
    """Sizes in bytes, times in seconds. The secret is revealed for each login, so that a changed one is found."""

    endpoints: tuple[Endpoint, ...]
    cluster: bool | None = None
    """None: as the server says."""
    username: str | None = None
    password: Secret | None = field(default=None, repr=False)
    database: int = 0
    prefix: str = "hicache_ext:"
    connections: int = 4
    in_flight: int = 8 << 20
    ttl: int | None = None
    timeout: float = 5.0
    tls: TlsSettings | None = None

    @classmethod
    def of(cls, tier: RedisTierConfig) -> RedisSettings:
        return cls(
            endpoints=tuple(Endpoint(host, port) for _, host, port in tier.servers),
            cluster=None if tier.cluster == "auto" else tier.cluster,
            username=tier.username,
            password=tier.password,
            database=tier.database,
            prefix=tier.prefix,
            connections=tier.connections,
            in_flight=tier.in_flight,
            ttl=tier.ttl,
            timeout=tier.longest_call,
            tls=TlsSettings(tier.tls_ca, tier.tls_certificate, tier.tls_key, tier.tls_verify) if tier.tls else None,
        )

    @property
    def short_call(self) -> float:
        return min(SHORT_CALL, self.timeout)

    def login_arguments(self) -> list[bytes]:
        """AUTH and its arguments; empty without a password. Raises ConfigError when the secret cannot be read."""
        if self.password is None:
            return []
        user = [] if self.username is None else [self.username.encode()]
        return [b"AUTH", *user, self.password.reveal().encode()]

    def admin_client(
        self, endpoint: Endpoint, timeout: float | None = None, *, database: int | None = None
    ) -> redis.Redis:
        """redis-py's client of this one server: no retries, no cluster logic, at most ``timeout`` per operation.

        Nothing is sent until it is used. Raises ConfigError when the secret cannot be read.
        """
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        limit = self.short_call if timeout is None else timeout
        options: dict[str, Any] = {
            "db": self.database if database is None else database,
            "username": self.username,
            "password": None if self.password is None else self.password.reveal(),
            "socket_timeout": limit,
            "socket_connect_timeout": limit,
            "retry": Retry(NoBackoff(), 0),
        }
        if endpoint.is_path:
            return redis.Redis(unix_socket_path=endpoint.host, **options)
        if self.tls is not None:
            options.update(
                ssl=True,
                ssl_ca_certs=self.tls.ca,
                ssl_certfile=self.tls.certificate,
                ssl_keyfile=self.tls.key,
                ssl_cert_reqs="none" if self.tls.verify == "none" else "required",
                ssl_check_hostname=self.tls.verify == "full",
            )
        return redis.Redis(host=endpoint.host, port=endpoint.port, **options)


def resolve(endpoint: Endpoint) -> tuple[int, tuple[str, int] | str]:
    """The address family and address of an endpoint. Raises OSError.

    Name servers keep no deadline: never called on a thread that a store's caller waits for.
    """
    if endpoint.is_path:
        return socket.AF_UNIX, endpoint.host
    try:
        family, _, _, _, address = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)[0]
    except (UnicodeError, OverflowError):
        raise OSError(f"{endpoint.host!r} is not the name of a host") from None
    return family, (str(address[0]), int(address[1]))

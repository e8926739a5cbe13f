"""The section ``tracing``: a span for each call of a tier, through OpenTelemetry. See docs/plan.md."""

from __future__ import annotations

import urllib.parse
from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field

from hicache_ext.config.problems import refuse, shown
from hicache_ext.config.schema import Allowed, ConfigModel, checked
from hicache_ext.errors import ConfigError

SGLANG = "sglang"
ENDPOINT_ALLOWED = (
    "sglang, for the collector of --enable-trace, or the address of an OTLP/HTTP collector, such as"
    " http://127.0.0.1:4318/v1/traces"
)


def _endpoint(value: object) -> str:
    if value == SGLANG:
        return SGLANG
    if isinstance(value, str) and any(sign in value for sign in "@?#"):
        # Not shown: it may be a secret.
        problem = "has more in it than host, port and path: a user, a password, a query"
        raise ConfigError("", problem, "credentials in the environment variable OTEL_EXPORTER_OTLP_HEADERS")
    if not isinstance(value, str) or not value.isascii() or not value.isprintable() or " " in value:
        raise refuse(value, ENDPOINT_ALLOWED)
    try:
        parts = urllib.parse.urlsplit(value)
        port_is_sound = parts.port != 0
    except ValueError:
        raise refuse(value, ENDPOINT_ALLOWED) from None
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_sound:
        raise refuse(value, ENDPOINT_ALLOWED)
    if parts.path in ("", "/"):
        raise ConfigError("", f"{shown(value)} has no path", f"such as {value.rstrip('/')}/v1/traces")
    return value


class TracingConfig(ConfigModel):
    """``tracing``: on where it is there."""

    required_because: ClassVar[Mapping[str, str]] = {"endpoint": "required: where spans go"}

    endpoint: Annotated[
        str,
        Field(description="where spans go: the collector of SGLang's --enable-trace, or one of your own"),
        Allowed(ENDPOINT_ALLOWED),
        checked(_endpoint),
    ]

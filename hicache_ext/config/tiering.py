"""How the tiers work together: what is written in the background, what is fetched ahead, what differs per role."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from hicache_ext.config.problems import did_you_mean, listed, quoted, refuse, shown
from hicache_ext.config.schema import Allowed, ConfigModel, checked
from hicache_ext.config.values import NO_LIMIT, duration, size, whole_number
from hicache_ext.errors import ConfigError

StorePolicy = Literal["sync", "async"]

SMALLEST_BUFFER = 1024 * 1024
MOST_STREAMS = 64

BUFFER_ALLOWED = "a size such as 256MiB, at least 1MiB, or 0 for none"
POLICIES_ALLOWED = "a mapping of tier names to sync or async, such as {pool: async}"
_DURATION_ALLOWED = "a duration from 10ms to 1h, such as 5s"
_STREAMS_ALLOWED = f"1 to {MOST_STREAMS}"
_SIZE_SCHEMA = WithJsonSchema({"type": ["integer", "string"]})
_DURATION_SCHEMA = WithJsonSchema({"type": ["number", "string"]})


_buffer_size = size(SMALLEST_BUFFER, NO_LIMIT, BUFFER_ALLOWED, or_none=True)
_streams = whole_number(1, MOST_STREAMS, _STREAMS_ALLOWED)
_duration = duration(0.01, 3600, _DURATION_ALLOWED)


def parse_policies(value: object) -> dict[str, str]:
    """Tier name -> sync or async; whether the tiers exist is the caller's to check."""
    if not isinstance(value, Mapping):
        raise refuse(value, POLICIES_ALLOWED)
    for name, policy in value.items():
        if policy not in ("sync", "async"):
            word = f"{shown(policy)} is not accepted"
            if isinstance(policy, str):
                word += did_you_mean(policy, ("sync", "async"))
            raise ConfigError(f".{name}", word, "sync, async")
    return dict(value)


def refuse_unknown_tiers(policies: Mapping[str, Any], tiers: tuple[str, ...]) -> ConfigError | None:
    """The error for the first name in ``policies`` that is no tier."""
    for name in policies:
        if tiers and name not in tiers:
            return ConfigError("", f"no tier is named {quoted(name)}{did_you_mean(name, tiers)}", listed(tiers))
    return None


class PrefetchConfig(ConfigModel):
    """Pages fetched from outer tiers while SGLang allocates and queues; per rank."""

    buffer: Annotated[
        int,
        Field(description="bytes of host memory that fetched pages may take until they are read; 0: no prefetch"),
        Allowed(BUFFER_ALLOWED),
        checked(_buffer_size),
        _SIZE_SCHEMA,
    ] = 256 * 1024 * 1024
    lifetime: Annotated[
        float,
        Field(description="how long a page that nobody reads is kept"),
        Allowed(_DURATION_ALLOWED),
        checked(_duration),
        _DURATION_SCHEMA,
    ] = 30.0
    streams: Annotated[
        int,
        Field(description="calls on outer tiers at once"),
        Allowed(_STREAMS_ALLOWED),
        checked(_streams),
    ] = 4


class BackgroundConfig(ConfigModel):
    """Writes that no request waits for; per rank."""

    store_buffer: Annotated[
        int,
        Field(
            description="bytes waiting for each tier with the policy async; what does not fit is dropped and counted"
        ),
        Allowed(BUFFER_ALLOWED),
        checked(_buffer_size),
        _SIZE_SCHEMA,
    ] = 256 * 1024 * 1024
    promotion_buffer: Annotated[
        int,
        Field(description="bytes waiting to be promoted; what does not fit is dropped and counted"),
        Allowed(BUFFER_ALLOWED),
        checked(_buffer_size),
        _SIZE_SCHEMA,
    ] = 128 * 1024 * 1024
    drain: Annotated[
        float,
        Field(description="how long the server waits at its end for what is still to be written"),
        Allowed(_DURATION_ALLOWED),
        checked(_duration),
        _DURATION_SCHEMA,
    ] = 5.0

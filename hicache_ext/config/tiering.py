"""How the tiers work together: what is written in the background, what is fetched ahead, what differs per role."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, WithJsonSchema

from hicache_ext.config.problems import did_you_mean, refuse, shown
from hicache_ext.config.schema import Allowed, ConfigModel, checked
from hicache_ext.config.values import NO_LIMIT, duration, size, whole_number
from hicache_ext.errors import ConfigError

StorePolicy = Literal["sync", "async"]

SMALLEST_BUFFER = 1024 * 1024
MOST_STREAMS = 64

_BUFFER_ALLOWED = "a size such as 256MiB, at least 1MiB, or 0 for none"
POLICIES_ALLOWED = "a mapping of tier names to sync or async, such as {pool: async}"
_DURATION_ALLOWED = "a duration from 10ms to 1h, such as 5s"
_STREAMS_ALLOWED = f"1 to {MOST_STREAMS}"

_BufferSize = Annotated[
    int,
    Allowed(_BUFFER_ALLOWED),
    checked(size(SMALLEST_BUFFER, NO_LIMIT, _BUFFER_ALLOWED, or_none=True)),
    WithJsonSchema({"type": ["integer", "string"]}),
]
_Duration = Annotated[
    float,
    Allowed(_DURATION_ALLOWED),
    checked(duration(0.01, 3600, _DURATION_ALLOWED)),
    WithJsonSchema({"type": ["number", "string"]}),
]


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


class PrefetchConfig(ConfigModel):
    """Pages fetched from outer tiers while SGLang allocates and queues; per rank."""

    buffer: Annotated[
        _BufferSize,
        Field(description="bytes of host memory that fetched pages may take until they are read; 0: no prefetch"),
    ] = 256 * 1024 * 1024
    lifetime: Annotated[_Duration, Field(description="how long a page that nobody reads is kept")] = 30.0
    streams: Annotated[
        int,
        Field(description="calls on outer tiers at once"),
        Allowed(_STREAMS_ALLOWED),
        checked(whole_number(1, MOST_STREAMS, _STREAMS_ALLOWED)),
    ] = 4


class BackgroundConfig(ConfigModel):
    """Writes that no request waits for; per rank."""

    store_buffer: Annotated[
        _BufferSize,
        Field(
            description="bytes waiting for each tier with the policy async; what does not fit is dropped and counted"
        ),
    ] = 256 * 1024 * 1024
    promotion_buffer: Annotated[
        _BufferSize, Field(description="bytes waiting to be promoted; what does not fit is dropped and counted")
    ] = 128 * 1024 * 1024
    drain: Annotated[
        _Duration, Field(description="how long the server waits at its end for what is still to be written")
    ] = 5.0

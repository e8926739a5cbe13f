"""The section ``linker``: what the external linker takes of host memory, and how long a request waits for a load."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, WithJsonSchema

from hicache_ext.config.schema import Allowed, ConfigModel, checked
from hicache_ext.config.values import NO_LIMIT, duration, size

SMALLEST_STAGING = 1024 * 1024

_STAGING_ALLOWED = "a size such as 2GiB, at least 1MiB"
_DURATION_ALLOWED = "a duration from 10ms to 1h, such as 5s"


class LinkerConfig(ConfigModel):
    """``linker``: only where SGLang moves pages through its external linker, without a host cache; per rank."""

    staging: Annotated[
        int,
        Field(description="bytes of page-locked host memory through which pages pass, half of it for each direction"),
        Allowed(_STAGING_ALLOWED),
        checked(size(SMALLEST_STAGING, NO_LIMIT, _STAGING_ALLOWED)),
        WithJsonSchema({"type": ["integer", "string"]}),
    ] = 2 * 1024 * 1024 * 1024
    load_timeout: Annotated[
        float,
        Field(description="how long a request waits for its stored pages; then it is computed"),
        Allowed(_DURATION_ALLOWED),
        checked(duration(0.01, 3600, _DURATION_ALLOWED)),
        WithJsonSchema({"type": ["number", "string"]}),
    ] = 5.0

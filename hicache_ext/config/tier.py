"""What every type of tier has in the configuration."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, WithJsonSchema

from hicache_ext.config.problems import refuse
from hicache_ext.config.schema import Allowed, ConfigModel, checked, true_or_false
from hicache_ext.config.units import parse_duration
from hicache_ext.errors import ConfigError


class TierConfig(ConfigModel):
    """What every type of tier has. ``type`` picks the class; the tier's name is its key in ``tiers``."""

    type: Annotated[str, Allowed("the type of a tier")]
    required: Annotated[
        bool,
        Field(description="false: the server starts even if this tier cannot"),
        Allowed("true or false"),
        checked(true_or_false),
    ] = True

    def directories(self) -> tuple[str, ...]:
        """The local directories this tier owns; no two tiers may share one."""
        return ()

    def summary(self) -> str:
        """One line for ``hicache-ext config check``; secrets never appear in it."""
        return self.type


_TIMEOUT_ALLOWED = "a duration from 1ms to 1h, such as 2s"


def parse_timeout(value: object) -> float:
    """Seconds."""
    if value is None or isinstance(value, bool):
        raise refuse(value, _TIMEOUT_ALLOWED)
    try:
        seconds = parse_duration(value)
    except ConfigError as error:
        raise ConfigError("", error.problem, _TIMEOUT_ALLOWED) from None
    if not 0.001 <= seconds <= 3600:
        raise refuse(value, _TIMEOUT_ALLOWED)
    return seconds


class RemoteTierConfig(TierConfig):
    """A tier that is reached over the network."""

    timeout: Annotated[
        float,
        Field(
            description="the longest one call may take; pages not done by then are misses"
        ),
        Allowed(_TIMEOUT_ALLOWED),
        checked(parse_timeout),
        WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string"}]}),
    ] = 5.0

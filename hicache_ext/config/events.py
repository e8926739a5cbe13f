"""The section ``events``: what changes in the tiers, told to KV-aware routers. See docs/pd.md."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from hicache_ext.config.problems import refuse, shown
from hicache_ext.config.schema import DURATION_SCHEMA, Allowed, ConfigModel, as_pydantic_error, checked
from hicache_ext.config.values import duration
from hicache_ext.errors import ConfigError

ENDPOINT_ALLOWED = "tcp://ADDRESS:PORT with an address of this machine, or * for all of them, such as tcp://*:5657"
_ENDPOINT = re.compile(r"tcp://(?:\*|[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})", re.ASCII)
_INTERVAL_ALLOWED = "a duration from 50ms to 1h, such as 1s"
_TOPIC_ALLOWED = "text without line breaks"


def _endpoint(value: object) -> str:
    found = _ENDPOINT.fullmatch(value) if isinstance(value, str) else None
    if not isinstance(value, str) or found is None or not 0 < int(found[1]) < 1 << 16:
        raise refuse(value, ENDPOINT_ALLOWED)
    return value


def _topic(value: object) -> str:
    if not isinstance(value, str) or (value and not value.isprintable()):
        raise ConfigError("", f"{shown(value)} is not accepted", _TOPIC_ALLOWED)
    return value


_Endpoint = Annotated[str, Allowed(ENDPOINT_ALLOWED), checked(_endpoint)]


class EventsConfig(ConfigModel):
    """``events``: on where it is there."""

    required_because: ClassVar[Mapping[str, str]] = {
        "endpoint": "required: where routers subscribe",
        "replay_endpoint": "required: a router that missed an event could never be right again without it",
    }

    endpoint: Annotated[_Endpoint, Field(description="where routers subscribe; each DP replica takes the next port")]
    replay_endpoint: Annotated[
        _Endpoint, Field(description="where routers ask for what they missed; each DP replica takes the next port")
    ]
    topic: Annotated[
        str, Field(description="the first frame of every message"), Allowed(_TOPIC_ALLOWED), checked(_topic)
    ] = ""
    interval: Annotated[
        float,
        Field(description="how often the tiers are looked at; rarer by itself where a look takes long"),
        Allowed(_INTERVAL_ALLOWED),
        checked(duration(0.05, 3600, _INTERVAL_ALLOWED)),
        DURATION_SCHEMA,
    ] = 1.0

    @model_validator(mode="after")
    def _two_ports(self) -> Self:
        if self.endpoint.rpartition(":")[2] == self.replay_endpoint.rpartition(":")[2]:
            problem = "has the port of endpoint"
            raise as_pydantic_error(ConfigError(".replay_endpoint", problem, "another port"))
        return self

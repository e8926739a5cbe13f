"""What stands between SGLang and a tier that is slow, dead or failing: the mapping ``guards`` of a tier.

``None`` is "auto": chosen by the kind of tier in storage/guards/composition.py.
"""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field, WithJsonSchema

from hicache_ext.config.problems import refuse
from hicache_ext.config.schema import DURATION_SCHEMA, Allowed, ConfigModel, checked
from hicache_ext.config.values import NO_LIMIT, duration, or_auto, or_off, size, whole_number

MOST_RETRIES = 10
MOST_CALLS = 1024
SMALLEST_BOUNCE_MEMORY = 1024 * 1024

_RETRIES_ALLOWED = f"0 to {MOST_RETRIES}, or auto"
_SWITCH_ALLOWED = "true, false, or auto"
_CONCURRENCY_ALLOWED = f"1 to {MOST_CALLS}, or auto"
_BOUNCE_ALLOWED = "a size of at least 1MiB, such as 256MiB"


def _switch(value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise refuse(value, _SWITCH_ALLOWED)


_SLOW_ALLOWED = "a duration from 1ms to 1h, such as 500ms"
_PROBE_ALLOWED = "a duration from 10ms to 1h, such as 1s"
_SLOW_START_ALLOWED = "a duration up to 1h, such as 5s"
_NEGATIVE_ALLOWED = "a duration from 1ms to 1m, such as 1s, or off, or auto"
_BUDGET_ALLOWED = "a duration from 1ms to 1s, such as 5ms, or off, or auto"


class GuardsConfig(ConfigModel):
    """Guards of one tier; docs/guards.md says what each does."""

    retries: Annotated[
        int | None,
        Field(
            description="how often a page whose transfer failed is tried again within the timeout",
            json_schema_extra={"default": "auto"},
        ),
        Allowed(_RETRIES_ALLOWED),
        checked(or_auto(whole_number(0, MOST_RETRIES, _RETRIES_ALLOWED))),
        WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0, "maximum": MOST_RETRIES}, {"const": "auto"}]}),
    ] = None
    breaker: Annotated[
        bool | None,
        Field(description="stop asking a tier that does not answer", json_schema_extra={"default": "auto"}),
        Allowed(_SWITCH_ALLOWED),
        checked(or_auto(_switch)),
        WithJsonSchema({"anyOf": [{"type": "boolean"}, {"const": "auto"}]}),
    ] = None
    slow_call: Annotated[
        float,
        Field(description="a call that takes longer counts as bad; its bytes at 100 MB/s come on top"),
        Allowed(_SLOW_ALLOWED),
        checked(duration(0.001, 3600, _SLOW_ALLOWED)),
        DURATION_SCHEMA,
    ] = 0.5
    probe_interval: Annotated[
        float,
        Field(description="how soon a tier that was given up is tried again; doubles up to 30s"),
        Allowed(_PROBE_ALLOWED),
        checked(duration(0.01, 3600, _PROBE_ALLOWED)),
        DURATION_SCHEMA,
    ] = 1.0
    slow_start: Annotated[
        float,
        Field(description="how long a tier that came back gets only a growing share of the calls"),
        Allowed(_SLOW_START_ALLOWED),
        checked(duration(0, 3600, _SLOW_START_ALLOWED)),
        DURATION_SCHEMA,
    ] = 5.0
    negative_cache: Annotated[
        float | None,
        Field(description="how long a page that was not there is not asked for", json_schema_extra={"default": "auto"}),
        Allowed(_NEGATIVE_ALLOWED),
        checked(or_auto(or_off(0.0, duration(0.001, 60, _NEGATIVE_ALLOWED)))),
        DURATION_SCHEMA,
    ] = None
    concurrency: Annotated[
        int | None,
        Field(description="calls at once", json_schema_extra={"default": "auto"}),
        Allowed(_CONCURRENCY_ALLOWED),
        checked(or_auto(whole_number(1, MOST_CALLS, _CONCURRENCY_ALLOWED))),
        WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1, "maximum": MOST_CALLS}, {"const": "auto"}]}),
    ] = None
    exists_budget: Annotated[
        float | None,
        Field(
            description="the longest that SGLang's scheduler waits for a look-up", json_schema_extra={"default": "auto"}
        ),
        Allowed(_BUDGET_ALLOWED),
        checked(or_auto(or_off(math.inf, duration(0.001, 1, _BUDGET_ALLOWED)))),
        DURATION_SCHEMA,
    ] = None
    bounce_memory: Annotated[
        int,
        Field(description="host memory for calls with a deadline, where the store cannot keep one itself"),
        Allowed(_BOUNCE_ALLOWED),
        checked(size(SMALLEST_BOUNCE_MEMORY, NO_LIMIT, _BOUNCE_ALLOWED)),
        WithJsonSchema({"anyOf": [{"type": "integer", "minimum": SMALLEST_BOUNCE_MEMORY}, {"type": "string"}]}),
    ] = 256 * 1024 * 1024

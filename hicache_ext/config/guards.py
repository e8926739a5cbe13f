"""What stands between SGLang and a tier that is slow, dead or failing: the mapping ``guards`` of a tier.

``None`` is "auto": chosen by the kind of tier in storage/guards/pipeline.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field, WithJsonSchema

from hicache_ext.config.problems import refuse
from hicache_ext.config.schema import DURATION_SCHEMA, Allowed, ConfigModel, checked
from hicache_ext.config.values import duration, or_auto, or_off, whole_number

MOST_RETRIES = 10
MOST_CALLS = 1024

_RETRIES_ALLOWED = f"0 to {MOST_RETRIES}, or auto"
_SWITCH_ALLOWED = "true, false, or auto"
_CONCURRENCY_ALLOWED = f"1 to {MOST_CALLS}, or auto"


def _switch(value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise refuse(value, _SWITCH_ALLOWED)


_BUDGET_ALLOWED = "a duration from 1ms to 1s, such as 5ms, or off, or auto"


class GuardsConfig(ConfigModel):
    """Guards of one tier; docs/guards.md says what each does."""

    removed: ClassVar[Mapping[str, str]] = {
        "slow_call": "a call is slow after half of the tier's timeout, and after 500ms at the earliest",
        "probe_interval": "a tier that was given up is tried again after 1s, then more and more seldom",
        "slow_start": "a tier that came back gets all calls after 5s",
        "negative_cache": "every look-up asks the tier",
        "bounce_memory": "calls with a timeout have up to 256MiB of memory for pages",
    }

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

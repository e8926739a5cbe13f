"""Options of a request for its own KV, in ``sampling_params.custom_params``.

::

    {"sampling_params": {"custom_params": {"hicache_ext": {"store": false, "priority": 2}}}, ...}

This field is the only free mapping that SGLang carries from every entry point (/generate and the OpenAI calls, which
have it at the top level) to the scheduler's Req; otherwise only custom logit processors read it. extra_key and
cache_salt change the page hashes, and ``priority`` changes the scheduling.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FIELD = "hicache_ext"


@dataclass(frozen=True, slots=True)
class RequestOptions:
    store: bool = True
    """False: nothing this request generates is written."""
    priority: int = 0
    """When host memory is full, the lowest priority is dropped first."""


def options_of(request: Any) -> RequestOptions:
    """The options of SGLang's ``Req``; absent or invalid ones have their defaults."""
    parameters = getattr(getattr(request, "sampling_params", None), "custom_params", None)
    ours = parameters.get(FIELD) if isinstance(parameters, Mapping) else None
    if not isinstance(ours, Mapping):
        return RequestOptions()
    priority = ours.get("priority", 0)
    return RequestOptions(
        store=ours.get("store") is not False,
        priority=priority if isinstance(priority, int) and not isinstance(priority, bool) else 0,
    )

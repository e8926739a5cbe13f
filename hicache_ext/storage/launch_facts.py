"""What SGLang's storage config does not carry, read from the launch arguments of the running server.

One of the rooms that know SGLang: ``sglang.srt.runtime_context`` holds the resolved arguments in every scheduler.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from hicache_ext.config import ServerRole

logger = logging.getLogger(__name__)

_ROLES: dict[str, ServerRole] = {"prefill": "prefill", "decode": "decode"}
"""SGLang's ``--disaggregation-mode``; "null" is a server that is not disaggregated."""

_COMPUTE_ARGUMENTS = (
    "dtype",
    "quantization",
    "quantization_param_path",
    "json_model_override_args",
    "torchao_config",
)
"""Launch arguments that change KV values although the weights are the same (rope overrides, quantised compute)."""


@dataclass(frozen=True, slots=True)
class LaunchFacts:
    """``kv_cache_dtype`` is the argument as resolved by SGLang ("auto", "fp8_e4m3", ...), None outside a server.

    ``role`` is what the server does in a disaggregated pair; ``metrics`` whether it has a Prometheus endpoint.
    """

    model_path: str | None = None
    revision: str | None = None
    kv_cache_dtype: str | None = None
    compute: str = ""
    role: ServerRole = "both"
    metrics: bool = False
    config_file: str | None = None
    """The file behind ``--hicache-storage-backend-extra-config @FILE``; None where it was given inline."""


def read_launch_facts() -> LaunchFacts:
    """The facts of this process's server; empty outside one (tests, tools). Never raises."""
    try:
        from sglang.srt.runtime_context import get_server_args

        arguments: Any = get_server_args()
    except Exception as error:  # noqa: BLE001 - outside a server SGLang raises whatever it likes here
        logger.debug("no server arguments: %s", error)
        return LaunchFacts()
    compute = {}
    for name in _COMPUTE_ARGUMENTS:
        value = getattr(arguments, name, None)
        if value not in (None, "", "{}", "auto"):
            compute[name] = str(value)
    return LaunchFacts(
        model_path=getattr(arguments, "model_path", None),
        revision=getattr(arguments, "revision", None),
        kv_cache_dtype=getattr(arguments, "kv_cache_dtype", None),
        compute=json.dumps(compute, sort_keys=True) if compute else "",
        role=_ROLES.get(str(getattr(arguments, "disaggregation_mode", "")), "both"),
        metrics=bool(getattr(arguments, "enable_metrics", False)),
        config_file=_config_file(),
    )


_given_as: ContextVar[str | None] = ContextVar("_given_as", default=None)


@contextmanager
def configuration_given_as(argument: str | None) -> Iterator[None]:
    """What ``--hicache-storage-backend-extra-config`` was, while SGLang is made to see something else there (pd/)."""
    token = _given_as.set(argument)
    try:
        yield
    finally:
        _given_as.reset(token)


def _config_file() -> str | None:
    try:
        from sglang.srt.runtime_context import get_memory

        given = _given_as.get() or get_memory().hicache_storage_backend_extra_config
    except Exception as error:  # noqa: BLE001 - as above
        logger.debug("no storage configuration among the server arguments: %s", error)
        return None
    return os.path.abspath(given[1:]) if isinstance(given, str) and given.startswith("@") else None


def logical_dtype(stored: str, kv_cache_dtype: str | None, override: str | None) -> str | None:
    """The dtype the bytes mean; None when it cannot be known.

    SGLang keeps fp8 KV in uint8 tensors: e4m3 and e5m2 look alike there, and only the launch argument tells.
    ``stored`` is the pool's torch dtype without "torch.", ``override`` the configured ``kv_dtype``.
    """
    known = override or kv_cache_dtype
    if stored in ("uint8", "int8"):
        return f"{known}/{stored}" if known else None
    # An override never hides what the tensor itself says: bf16 and fp16 pages are equally long.
    return f"{override}/{stored}" if override else stored

"""What SGLang's storage config does not carry, read from the launch arguments of the running server.

``sglang.srt.runtime_context`` holds arguments and what they were resolved to, in
every scheduler, and the runner of the model what it found out while it loaded it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hicache_ext.config import ServerRole
from hicache_ext.errors import UnsupportedError
from hicache_ext.sglang import launch_arguments, process

logger = logging.getLogger(__name__)

_ROLES: dict[str, ServerRole] = {"prefill": "prefill", "decode": "decode"}
"""SGLang's ``--disaggregation-mode``; "null" is a server that is not disaggregated."""

_NAMES_OF_DTYPES = ("auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2")
"""Values of ``--kv-cache-dtype`` that say no more than the dtype they stand for."""

_STORAGE_ARGUMENTS = (
    *("enable_hierarchical_cache", "hicache_storage_backend"),
    *("disaggregation_decode_enable_offload_kvcache", "enable_unified_cache_external_linker"),
)


@dataclass(frozen=True, slots=True)
class LaunchFacts:
    """``kv_cache_dtype`` is what the KV pools hold ("float8_e4m3fn", "bfloat16", ...), None outside a server.

    ``role`` is what the server does in a disaggregated pair; ``metrics`` whether it has a Prometheus endpoint.
    ``drafts`` are model path and revision of draft models; ``lora`` whether requests may name an adapter.
    """

    model_path: str | None = None
    revision: str | None = None
    load_format: str = "auto"
    draft_load_format: str | None = None
    weights_from_elsewhere: tuple[str, ...] = ()
    """Launch arguments with which the weights are not those in the files at the model's path."""
    drafts: tuple[tuple[str, str | None], ...] = ()
    lora: bool = False
    kv_cache_dtype: str | None = None
    compute: str = ""
    unknown_arguments: tuple[str, ...] = ()
    """Launch arguments that were given and that this package does not know: ``compute`` has a digest of each."""
    role: ServerRole = "both"
    parts_of_pages: bool = False
    """Whether ranks that otherwise hold the same KV hold stripes or layers of it."""
    role_may_change: bool = False
    """Whether SGLang may turn a prefill into a decode server while it runs, or the other way round."""
    metrics: bool = False
    port: int | None = None
    config_file: str | None = None
    """The file behind ``--hicache-storage-backend-extra-config @FILE``; None where it was given inline."""
    prefetch_policy: str | None = None
    """What ends SGLang's wait for pages from storage."""


def read_launch_facts() -> LaunchFacts:
    """The facts of this process's server; empty outside one (tests, tools).

    Raises UnsupportedError for a server whose arguments cannot be read: it must not pass for none.
    """
    try:
        from sglang.srt.runtime_context import get_server_args

        if get_server_args() is None:
            return LaunchFacts()
    except Exception as error:  # noqa: BLE001 - outside a server SGLang raises whatever it likes here
        logger.debug("no server arguments: %s", error)
        return LaunchFacts()
    try:
        return _facts_of_server()
    except Exception as error:
        raise UnsupportedError("this SGLang", f"its launch arguments cannot be read ({error})") from error


def _facts_of_server() -> LaunchFacts:
    draft = resolved("speculative_draft_model_path")
    from sglang.srt.runtime_context import get_server_args

    given = launch_arguments.given_arguments(get_server_args())
    return LaunchFacts(
        model_path=resolved("model_path"),
        revision=resolved("revision"),
        load_format=str(resolved("load_format") or "auto"),
        draft_load_format=resolved("speculative_draft_load_format"),
        weights_from_elsewhere=tuple(_weights_from_elsewhere(resolved("model_path"), draft)),
        drafts=((draft, resolved("speculative_draft_model_revision")),) if draft else (),
        lora=bool(resolved("enable_lora")),
        kv_cache_dtype=_kv_cache_dtype(_target_runner()) or resolved("kv_cache_dtype"),
        compute=_compute(given),
        unknown_arguments=launch_arguments.unknown(given),
        role=_ROLES.get(str(resolved("disaggregation_mode")), "both"),
        parts_of_pages=bool(resolved("enable_kv_cache_sharding") or resolved("enable_dsa_cache_layer_split")),
        role_may_change=bool(resolved("enable_pd_role_switch")),
        metrics=bool(resolved("enable_metrics")),
        port=resolved("port"),
        config_file=_config_file(),
        prefetch_policy=resolved("hicache_storage_prefetch_policy"),
    )


def uses_storage() -> bool:
    """Whether SGLang may ever call a storage backend in this process; true where it is not known (tests)."""
    return any(resolved_or(argument, True) for argument in _STORAGE_ARGUMENTS)


def resolved_or(argument: str, otherwise: Any) -> Any:
    """``resolved``, and ``otherwise`` where that is not known."""
    try:
        return resolved(argument)
    except Exception as error:  # noqa: BLE001 - outside a server SGLang raises whatever it likes here
        logger.debug("--%s is not known: %s", argument, error)
        return otherwise


def resolved(argument: str) -> Any:
    """What SGLang made of a launch argument; None for one that it does not have. Raises outside a server.

    ``get_server_args()`` is what was typed: "auto" and the like. What it means lies in SGLang's namespaces.
    """
    from sglang.srt import runtime_context
    from sglang.srt.arg_groups.arg_utils import namespace_of

    arguments: Any = runtime_context.get_server_args()
    path = namespace_of(type(arguments)).get(argument)
    if path is None:
        return getattr(arguments, argument, None)
    first, *others = path.split(".")
    bag = getattr(runtime_context, f"get_{first}")()
    for name in others:
        bag = getattr(bag, name)
    return getattr(bag, argument)


def unicode_text(name: str) -> str:
    """``name``, which may be a path, so that every encoder takes it: bytes that are no UTF-8 become ``\\udcXX``."""
    return name.encode("utf-8", "backslashreplace").decode()


def longest_prompt() -> int | None:
    """Tokens that a prompt may have: the context of the model, or what the device holds. None where that is not known.

    Only warned about, so that a release without these names costs the warning."""
    runner = _target_runner()
    known = (
        getattr(getattr(runner, "model_config", None), "context_len", None),
        getattr(runner, "max_total_num_tokens", None),
    )
    return min((tokens for tokens in known if isinstance(tokens, int)), default=None)


def _target_runner() -> Any:
    target = process.target()
    return target and target.runner


def _kv_cache_dtype(runner: Any) -> str | None:
    """What the pools of a runner hold: the tensors' dtype, and the name of its encoding where that says more."""
    dtype = getattr(runner, "kv_cache_dtype", None)
    if dtype is None:
        return None
    name, stored = str(getattr(runner, "kv_cache_dtype_str", "auto")), str(dtype).removeprefix("torch.")
    return stored if name in _NAMES_OF_DTYPES else f"{name}/{stored}"


def _weights_from_elsewhere(*models: str | None) -> Iterator[str]:
    for name in launch_arguments.WEIGHTS:
        if resolved(name) in (None, "", "off") or (
            name == "download_dir" and all(map(os.path.exists, filter(None, models)))
        ):
            continue
        yield name.replace("_", "-")
    if "qlora_adapter_name_or_path" in str(resolved("model_loader_extra_config")):
        yield "model-loader-extra-config"


def _compute(given: Mapping[str, Any]) -> str:
    compute = launch_arguments.shaping(given)
    as_resolved = {name: resolved(name) for name in launch_arguments.SHAPING_AS_RESOLVED}
    compute |= {name: str(value) for name, value in as_resolved.items() if value and value != "{}"}
    compute |= {name: value for name, value in launch_arguments.SHAPING_VALUES if resolved(name) == value}
    for name in launch_arguments.SHAPING_FILES:
        if path := resolved(name):
            compute[name] = _digest_of_small_file(path)
    target = _target_runner()
    if target is None:
        computed = {"dtype": resolved("dtype"), "quantization": resolved("quantization")}
    else:
        computed = _computed_as(target)
    compute |= {name: value for name, value in computed.items() if value is not None}
    # Drafts may be kept and computed in another dtype, in pools that look like the target's.
    if drafts := sorted({json.dumps(_computed_as(model.runner), sort_keys=True) for model in process.drafts()}):
        compute["drafts"] = ",".join(drafts)
    return json.dumps(compute, sort_keys=True)


def _computed_as(runner: Any) -> dict[str, str | None]:
    """dtype and quantisation of a model's layers, as its loader resolved them, and what its KV is kept in."""
    config = getattr(runner, "model_config", None)
    dtype, quantization = getattr(config, "dtype", None), getattr(config, "quantization", None)
    return {
        "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        "quantization": None if quantization is None else str(quantization),
        "kv": _kv_cache_dtype(runner),
    }


def _digest_of_small_file(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:32]
    except OSError:
        return path


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
    given = _given_as.get() or resolved_or("hicache_storage_backend_extra_config", None)
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

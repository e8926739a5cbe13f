"""All differences between releases of SGLang. Imports neither torch nor SGLang before it has to.

used_names.py lists the names that a release must have. Where a fact moved from one object to another, a function here
finds it in every release.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import re
from typing import Any, Literal

from hicache_ext.errors import UnsupportedError
from hicache_ext.packages import how_to_install

TESTED = ("0.5.21", "0.5.22", "0.5.23")
"""The releases that the tests run with, oldest first."""

_VERSION = re.compile(r"(\d+)\.(\d+)\.?(\d*)")


def installed_release() -> str:
    """Return the version of SGLang in this environment. Raises UnsupportedError without one."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise UnsupportedError("this environment", "SGLang is not installed in it", how_to_install("sglang")) from None


def is_tested(release: str) -> bool:
    """Return whether the tests run with exactly this release; a suffix after "+" only names a build."""
    return release.split("+")[0] in TESTED


def comes_with(release: str, since: str) -> bool:
    """Return whether ``release`` is ``since`` or newer."""
    return _numbers(release) >= _numbers(since)


def refuse_old_release(release: str | None = None) -> None:
    """Raise UnsupportedError for a release that is older than the oldest tested one.

    Earlier releases lack calls that this package implements, left LoRA and cache_salt out of some page hashes, and
    freed memory that a decode node's copy was still reading.
    """
    release = installed_release() if release is None else release
    if not comes_with(release, TESTED[0]):
        raise UnsupportedError(f"SGLang {release}", f"this package needs {TESTED[0]} or newer", other_release())


def untested(release: str) -> str | None:
    """Return the warning for an untested release; None for a tested one."""
    if is_tested(release):
        return None
    return (
        f"hicache_ext was tested with SGLang {', '.join(TESTED)}; this is {release}. It has all that storage needs."
        " Parameters that are new in it are ignored, and its pages are kept apart from those of other releases"
    )


def _numbers(release: str) -> tuple[int, ...]:
    found = _VERSION.match(release)
    return tuple(int(number or 0) for number in found.groups()) if found else (0, 0, 0)


def other_release() -> str:
    """Return the remedy for an unsupported release; the choice among the tested ones is the user's."""
    return f"tested are {', '.join(TESTED)}"


# -- arguments of storage calls ----------------------------------------------------------------------------------------


def hit_policy(policy: Any) -> Literal["all_pages", "trailing_pages", "none", "unknown"]:
    """Return which of a pool's pages must be present for a prefix to be restored.

    "none" stands for BLOCK_GROUPS, since 0.5.22, which never gates a hit; "unknown" for a policy of a later release.
    """
    value = getattr(policy, "value", policy)
    if value == "all_pages" or value == "trailing_pages":
        return "all_pages" if value == "all_pages" else "trailing_pages"
    return "none" if value == "block_groups" else "unknown"


def rank_replicated(config: Any) -> bool:
    """Return whether all tensor-parallel ranks hold the same KV (``is_mla_model``, which SGLang means to rename)."""
    return bool(config.is_rank_replicated if hasattr(config, "is_rank_replicated") else config.is_mla_model)


def dcp_shard(config: Any, pool: Any) -> tuple[int, int]:
    """Return (rank, size) under decode context parallelism. Until 0.5.22 only the host pool knows them, and SGLang
    refuses to start with both it and a storage backend."""
    if hasattr(config, "dcp_size"):
        return config.dcp_rank, config.dcp_size
    return getattr(pool, "dcp_rank", 0), getattr(pool, "dcp_size", 1)


# -- requests ----------------------------------------------------------------------------------------------------------


def release_request(request: Any, tree_cache: Any) -> None:
    """Free all device memory of a finished request; SGLang's tree keeps none of its KV."""
    from sglang.srt.mem_cache.common import release_kv_cache

    until_0_5_21 = "is_insert" in inspect.signature(release_kv_cache).parameters
    release_kv_cache(request, tree_cache, **{"is_insert" if until_0_5_21 else "checkpoint": False})


# -- host pools --------------------------------------------------------------------------------------------------------


def pool_fact(pool: Any, name: str) -> Any:
    """Return an attribute of a host pool; in 0.5.21 only a plain MHA pool's device pool has ``v_head_dim``."""
    value = getattr(pool, name, None)
    if value is None and name == "v_head_dim" and getattr(pool, "head_dim", None) is not None:
        return getattr(getattr(pool, "device_pool", None), name, None)
    return value


def kv_layout_facts(runner: Any) -> list[tuple[str, str]]:
    """Return facts that distinguish the layouts of DeepSeek V4.1, whose pages have equal sizes; [] for other models.
    ``runner`` is the target's."""
    pool = getattr(runner, "token_to_kv_pool", None)
    layout = getattr(getattr(pool, "kv_layout", None), "value", "v4")
    compressed = getattr(pool, "compressed_kv_layout_option", None)
    return [] if (layout, compressed) == ("v4", None) else [("kv_layout", f"{layout},{compressed}")]


def left_out_of_host_memory(runner: Any, release: str | None = None) -> str | None:
    """Return which state of a hybrid model a release's host pools lack, so that restored prompts get wrong answers;
    None if they lack nothing. ``runner`` is the target's.

    According to the source of SGLang 0.5.21, MambaPoolHost copies only ``conv`` and ``temporal``, and
    build_hybrid_mamba_stack registers only KV and MAMBA. 0.5.22 and 0.5.23 have host pools for each of these.
    """
    if comes_with(installed_release() if release is None else release, "0.5.22"):
        return None
    tokens, requests = (getattr(runner, name, None) for name in ("token_to_kv_pool", "req_to_token_pool"))
    if getattr(getattr(requests, "mamba_pool", None), "_slot_siblings", ()):
        return "the states beside its Mamba slots (issue 39830 of SGLang)"
    if any(kind.__name__ == "QSATokenToKVPool" for kind in type(tokens).__mro__):
        return "the index keys of its sparse attention (QSA, issue 39830 of SGLang)"
    if getattr(tokens, "full_attention_layer_id_mapping", None) and getattr(tokens, "use_dsa", False):
        return "the index keys of its sparse attention (DSA, issue 38031 of SGLang)"
    return None


def format_facts(pool: Any, release: str | None = None) -> list[tuple[str, str]]:
    """Return facts that distinguish packed, scaled or reordered formats of a host pool's pages, besides its attributes.

    All tested releases give equal facts for equal bytes. An untested release adds its own name, because its bytes were
    never compared with those of other releases.
    """
    if hasattr(pool, "_buffer_infos"):
        texts = [_facts_of_info(info) for info in pool._buffer_infos or ()]
    else:
        is_mha = any(kind.__name__ == "MHATokenToKVPoolHost" for kind in type(pool).__mro__)
        texts = [_facts_of_device_pool(device_pool) for device_pool in _device_pools(pool)] if is_mha else []
    facts = [(f"buffer{number}", text) for number, text in enumerate(texts)]
    release = installed_release() if release is None else release
    return facts if is_tested(release) else [*facts, ("sglang", release)]


def _facts_of_info(info: Any) -> str:
    """Describe SGLang's MHABufferInfo, which exists since 0.5.23."""
    facts = []
    for attribute in ("head_dim", "v_head_dim", "kv_cache_dim", "packed_fp8", "dtype"):
        value = getattr(info, attribute, None)
        if value is not None:
            facts.append(f"{attribute}={value}")
    layout = getattr(getattr(info, "buffers", None), "layout", None)
    if layout is not None:
        facts.append(f"layout={getattr(layout, 'value', layout)}")
    scales = getattr(info, "scales", None)
    if scales is not None:
        facts.append(f"scales={getattr(scales.layout, 'value', scales.layout)}")
    return ",".join(facts)


def _facts_of_device_pool(device_pool: Any) -> str:
    """Describe the device pool of an MHA host pool, until 0.5.22; the text of a plain one equals that of 0.5.23."""
    facts = [
        *(f"{name}={getattr(device_pool, name, None)}" for name in ("head_dim", "v_head_dim")),
        f"dtype={getattr(device_pool, 'store_dtype', None)}",
        f"layout={getattr(device_pool, 'kv_cache_layout', 'nhd')}",
    ]
    kind = type(device_pool).__name__
    if kind != "MHATokenToKVPool" or _is_quantized(device_pool):
        facts.append(f"pool={kind},quantized={_is_quantized(device_pool)}")
    return ",".join(facts)


def _device_pools(pool: Any) -> tuple[Any, ...]:
    """Return the device pools behind a host pool, the target's first; until 0.5.22."""
    target = getattr(pool, "device_pool", None)
    return () if target is None else (target, *getattr(pool, "mtp_draft_device_pools", ()))


def _is_quantized(device_pool: Any) -> bool:
    is_quantized = getattr(device_pool, "is_quantized_kv_cache", None)
    return bool(is_quantized()) if callable(is_quantized) else False


# -- device buffers, for copy engines ----------------------------------------------------------------------------------


def device_buffers(pool: Any, component: str) -> tuple[Any, ...]:
    """Return the device buffers of "k", "v" or, for latents, "kv", layer by layer, those of drafts last."""
    buffers = getattr(pool, f"device_{component}_buffers", None)
    if buffers is None:
        buffers = (buffer for source in _device_pools(pool) for buffer in getattr(source, f"{component}_buffer"))
    return tuple(buffers)


def mla_layers(pool: Any) -> tuple[list[int], dict[int, int], dict[int, int]]:
    """Return the controller's numbers of the target layers that this rank owns; then, for these and the draft layers
    after them, the layer in the host pool and the number of the device buffer."""
    if hasattr(pool, "_host_layer_by_controller"):
        return list(pool._target_layer_indices), pool._host_layer_by_controller, pool._buffer_index_by_layer
    identity = {layer: layer for layer in range(pool.layer_num)}
    return list(range(pool.target_layer_num)), identity, identity


def device_row_stride(pool: Any) -> int:
    """Return the bytes from a token's row on the device to the next token's row."""
    stride = getattr(pool, "device_row_stride_bytes", None)
    return int(pool.token_stride_size if stride is None else stride)


def foreign_device_layout(pool: Any) -> str | None:
    """Return why the device buffers are not rows of tokens, as a metric label; None if they are."""
    if hasattr(pool, "_buffer_infos"):
        for info in pool._buffer_infos:
            if info.scales is not None:
                return "scales"
            if info.transfer_buffers is not None or info.buffers.layout.value not in ("nhd", "paged_nhd"):
                return "device_layout"
        return None
    if hasattr(pool, "_native_buffers"):
        return None if pool._native_buffers is None else "device_layout"
    for part in _device_pools(pool):
        if _is_quantized(part):
            return "scales"
        if getattr(part, "layer_shard_enabled", False):
            return "layer_shard"
        buffers = part.kv_buffer if hasattr(part, "kv_buffer") else (*part.k_buffer, *part.v_buffer)
        if getattr(part, "kv_cache_layout", "nhd") != "nhd" or any(b.dim() != 3 or b.stride(-1) != 1 for b in buffers):
            return "device_layout"
        if not hasattr(pool, "device_row_stride_bytes") and not all(b.is_contiguous() for b in buffers):
            return "device_layout"
    return None


# -- what SGLang does with host pools, for tests -----------------------------------------------------------------------


def end_registration(backend: Any) -> None:
    """Notify a storage backend that all host pools are registered, as SGLang does since 0.5.23."""
    notify = getattr(backend, "on_host_pools_registered", None)
    if notify is not None:
        notify()


def mha_host_arguments(device_pool: Any, tokens: int) -> tuple[Any, dict[str, Any]]:
    """Return the constructor arguments of MHATokenToKVPoolHost for a device pool: first argument and keywords."""
    if not hasattr(device_pool, "_mha_buffer_info"):
        return device_pool, {}
    return device_pool._mha_buffer_info(), host_range(device_pool, tokens)


def host_range(device_pool: Any, tokens: int) -> dict[str, Any]:
    """Return the keywords for a device pool that the constructors of all host pools take."""
    return {
        "device_capacity_tokens": tokens,
        "start_layer": device_pool.start_layer,
        "end_layer": device_pool.end_layer,
    }

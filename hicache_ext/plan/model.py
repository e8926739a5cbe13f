"""Bytes that a token of a model takes in storage, in the layout of SGLang's host pools, and the speed of prefill."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hicache_ext.errors import ConfigError
from hicache_ext.runtime.whole_file import json_in

DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8_e4m3": 1, "fp8_e5m2": 1}
"""Logical dtype of the KV cache -> bytes per number."""
_DSA_FP8_ROW = 656
"""Bytes per token and layer of a DSA model's fp8 latents: 512 numbers, 4 scales of 4 bytes, 64 rotary bfloat16 numbers
(SGLang's override of kv_cache_dim)."""
_INDEX_BLOCK = 128
"""How many numbers of an index key share one 4-byte scale."""
_LARGEST = 1 << 24
"""An upper bound for every number read from a model's configuration."""
_FILE_ALLOWED = "a config.json, or the directory of a model"
_MODEL_ALLOWED = "the config.json of a language model, or --token-bytes"
_STATES = ("linear_attention", "mamba", "recurrent")


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Storage size of one token, over all ranks and per rank."""

    name: str
    kind: str
    """MHA, GQA, MLA or "MLA with DSA"."""
    layers: int
    token_bytes: int
    rank_token_bytes: int
    """Bytes per token on each rank that writes."""
    writing_ranks: int
    active_parameters: int
    """Parameters that a token passes through, which decide the cost of prefill; 0 if the file does not say."""
    remarks: tuple[str, ...] = ()

    def page_bytes(self, page_size: int) -> int:
        """Return the bytes of one stored page of a rank."""
        return self.rank_token_bytes * page_size


def read_model(path: Path, *, tp: int = 1, dtype: str | None = None) -> ModelSize:
    """Read ``config.json`` or the directory of a model. Raises ConfigError with one sentence."""
    file = path / "config.json" if path.is_dir() else path
    try:
        # The files of models with recurrent states contain Infinity; the numbers that matter are checked below.
        document = json_in(file.read_bytes(), number=float)
        if not isinstance(document, dict):
            raise ValueError
    except OSError as error:
        raise ConfigError("--model", f"{file}: {error.strerror}", _FILE_ALLOWED) from None
    except ValueError:
        raise ConfigError("--model", f"{file} is no JSON object", _FILE_ALLOWED) from None
    inner = next((document[key] for key in ("text_config", "llm_config") if isinstance(document.get(key), dict)), None)
    name = str(document.get("_name_or_path") or "") or file.resolve().parent.name
    return size_of({**document, **inner} if inner else document, name, tp=tp, dtype=dtype)


def size_of(config: Mapping[str, Any], name: str, *, tp: int = 1, dtype: str | None = None) -> ModelSize:
    """Compute the sizes. Raises ConfigError if the configuration does not determine them."""
    layers = _number(config, "num_hidden_layers")
    kinds = config.get("layer_types") or config.get("layers_block_type") or []
    if not isinstance(kinds, list):
        raise ConfigError("--model", "layer_types is no list in the model's configuration", _MODEL_ALLOWED)
    states = [kind for kind in kinds if any(word in str(kind) for word in _STATES)]
    if states or any(key in config for key in ("full_attention_interval", "hybrid_override_pattern", "mamba_d_state")):
        problem = f"{name} has layers with states (linear attention, Mamba), which a plan does not count"
        raise ConfigError("--model", problem, "--token-bytes with the bytes that a server's log says")
    chosen = dtype or str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")
    if chosen not in DTYPES:
        raise ConfigError("--dtype", f"{chosen!r} is no dtype of a KV cache", ", ".join(DTYPES))
    size, remarks = DTYPES[chosen], []
    if "kv_lora_rank" in config:
        rank, rotary = _number(config, "kv_lora_rank"), _number(config, "qk_rope_head_dim")
        row, kind = (rank + rotary) * size, "MLA"
        if "index_topk" in config:
            index = _number(config, "index_head_dim")
            row = (_DSA_FP8_ROW if size == 1 else row) + index + -(-index // _INDEX_BLOCK) * 4
            kind = "MLA with DSA"
        if tp > 1:
            remarks.append("all ranks hold the same latents, and rank 0 alone writes them")
        return ModelSize(name, kind, layers, row * layers, row * layers, 1, _parameters(config, layers), tuple(remarks))
    heads = _number(config, "num_attention_heads")
    kv_heads = _number(config, "num_key_value_heads", heads)
    head = _number(config, "head_dim", 0) or _number(config, "hidden_size") // heads
    if not head:
        raise ConfigError("--model", "hidden_size is less than num_attention_heads", _MODEL_ALLOWED)
    if kv_heads % tp and tp % kv_heads:
        raise ConfigError("--tp", f"{kv_heads} KV heads cannot be split among {tp} ranks", "a divisor or a multiple")
    rank_heads = max(1, kv_heads // tp)
    if tp > kv_heads:
        remarks.append(f"{tp} ranks share {kv_heads} KV heads, so that each head is stored {tp // kv_heads} times")
    if any("sliding" in str(kind) for kind in kinds):
        remarks.append("layers with a sliding window are counted whole: SGLang may keep less of them")
    per_rank = (head + _number(config, "v_head_dim", head)) * rank_heads * layers * size
    kind = "MHA" if kv_heads == heads else "GQA"
    return ModelSize(name, kind, layers, per_rank * tp, per_rank, tp, _parameters(config, layers), tuple(remarks))


def given_size(token_bytes: int, tp: int) -> ModelSize:
    """Return the size of a model of which only the bytes per token over all ranks are known."""
    return ModelSize("a model", "as given", 0, token_bytes, -(-token_bytes // tp), tp, 0)


def _number(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return a positive integer, or ``default`` if the key is missing, null or 0."""
    value = config.get(key) or default
    if default is not None and value == default:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LARGEST:
        found = "missing" if value is None else f"no whole number from 1 to {_LARGEST}"
        raise ConfigError("--model", f"{key} is {found} in the model's configuration", _MODEL_ALLOWED)
    return value


def _parameters(config: Mapping[str, Any], layers: int) -> int:
    """Count the parameters of the layers that a token passes through; 0 if the file does not say."""
    try:
        hidden, heads = _number(config, "hidden_size"), _number(config, "num_attention_heads")
        if "kv_lora_rank" in config:
            parts = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
            nope, rope, value = (_number(config, key) for key in parts)
            rank, query = _number(config, "kv_lora_rank"), _number(config, "q_lora_rank", 0)
            q = query * (hidden + heads * (nope + rope)) if query else hidden * heads * (nope + rope)
            attention = q + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden
        else:
            head, kv_heads = _number(config, "head_dim", hidden // heads), _number(config, "num_key_value_heads", heads)
            attention = 2 * hidden * head * (heads + kv_heads)
        dense = 3 * hidden * _number(config, "intermediate_size")
        experts = _number(config, "num_experts_per_tok", 0)
        if not experts:
            return layers * (attention + dense)
        expert_width = _number(config, "moe_intermediate_size", _number(config, "intermediate_size"))
        active = experts + _number(config, "n_shared_experts", 0)
        first = min(layers, _number(config, "first_k_dense_replace", 0))
        return layers * attention + first * dense + (layers - first) * active * 3 * hidden * expert_width
    except ConfigError:
        return 0


# -- prefill -----------------------------------------------------------------------------------------------------------

UTILISATION = 0.4
"""Share of the peak that prefill reaches: an assumption, and the plan says so."""

PEAK_TFLOPS = {
    # 624 with sparsity
    "a100": (312.0, "NVIDIA A100 data sheet, dense BF16"),
    # The data sheets of both print 1,979 with sparsity, the white paper 989.4 without.
    "h100": (989.4, "NVIDIA H100 SXM data sheet, dense BF16"),
    "h200": (989.4, "NVIDIA H200 SXM data sheet, dense BF16"),
    # 733 with sparsity
    "l40s": (362.05, "NVIDIA L40S data sheet, dense BF16"),
    # 2,614.9 with sparsity
    "mi300x": (1307.4, "AMD Instinct MI300X data sheet, dense BF16"),
}
"""GPU -> 10^12 operations per second and the source of the figure, all without sparsity, since prefill has none."""


def estimated(gpu: str, gpus: int, model: ModelSize) -> tuple[float, str]:
    """Estimate a node's tokens per second, and describe the estimate: two operations for each parameter that a token
    passes through. Attention to earlier tokens is left out, so long prompts take longer. Raises ConfigError if the GPU
    or the parameters are unknown."""
    if gpu.lower() not in PEAK_TFLOPS:
        raise ConfigError("--gpu", f"{gpu!r} is not in the table", f"{', '.join(PEAK_TFLOPS)}, or --prefill-rate")
    if not model.active_parameters:
        raise ConfigError("--gpu", "the parameters of the model are not known", "--prefill-rate in tokens per second")
    peak, source = PEAK_TFLOPS[gpu.lower()]
    rate = gpus * peak * 1e12 * UTILISATION / (2 * model.active_parameters)
    return rate, f"estimate: {gpus} x {peak:g} TFLOPS ({source}), {UTILISATION:.0%} of it assumed"

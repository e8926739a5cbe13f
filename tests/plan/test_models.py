"""What a token takes: three real models by hand, and SGLang's own host pools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hicache_ext.errors import ConfigError
from hicache_ext.plan.model import PEAK_TFLOPS, ModelSize, estimated, read_model, size_of

LLAMA_8B = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "torch_dtype": "bfloat16",
}
"""Llama-3.1-8B."""
LLAMA_70B = {
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "torch_dtype": "bfloat16",
}
"""Llama-3.1-70B."""
DEEPSEEK_V3 = {
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "torch_dtype": "bfloat16",
}
"""DeepSeek-V3."""


@pytest.mark.parametrize(
    ("config", "tp", "dtype", "kind", "token", "rank", "ranks"),
    [
        # 2 x 8 heads x 128 x 32 layers x 2 bytes
        (LLAMA_8B, 1, None, "GQA", 131_072, 131_072, 1),
        (LLAMA_8B, 1, "fp8_e4m3", "GQA", 65_536, 65_536, 1),
        # 2 x 8 x 128 x 80 x 2, an eighth of it on each rank
        (LLAMA_70B, 8, None, "GQA", 327_680, 40_960, 8),
        # 16 ranks for 8 heads: each head twice
        (LLAMA_70B, 16, None, "GQA", 655_360, 40_960, 16),
        # (512 + 64) x 61 layers x 2 bytes, on one rank
        (DEEPSEEK_V3, 8, None, "MLA", 70_272, 70_272, 1),
        # DeepSeek-V3.2: as SGLang's index keys, 128 of one byte and a scale of four, in each layer
        ({**DEEPSEEK_V3, "index_topk": 2048, "index_head_dim": 128}, 8, None, "MLA with DSA", 78_324, 78_324, 1),
    ],
)
def test_bytes_of_a_token_are_those_of_a_calculation_by_hand(
    config: dict[str, Any], tp: int, dtype: str | None, kind: str, token: int, rank: int, ranks: int
) -> None:
    size = size_of(config, "m", tp=tp, dtype=dtype)
    assert (size.kind, size.token_bytes, size.rank_token_bytes, size.writing_ranks) == (kind, token, rank, ranks)
    assert size.page_bytes(64) == 64 * rank


@pytest.mark.sglang
@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_bytes_of_a_page_are_those_of_sglangs_host_pools(layout: str) -> None:
    from hicache_ext.testing.sglang_cpu import prepare_process

    prepare_process()
    from hicache_ext.sglang.host_pool import HostPages
    from hicache_ext.testing.host_pools import mha_pools
    from tests.rigs.host_pool_kinds import dsa_hosts, mha_host, mla_pools

    def pages(host: Any) -> int:
        return HostPages(host, "kv").page_bytes

    gqa = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "hidden_size": 1}
    host = mha_pools(layout=layout, layers=4, heads=2, head_dim=32, page_size=16, pages=4).host
    assert pages(host) == size_of(gqa, "m", tp=2).page_bytes(16)
    mla = {"num_hidden_layers": 2, "kv_lora_rank": 64, "qk_rope_head_dim": 16}
    assert pages(mla_pools(layout=layout, pages=4, page_size=16).host) == size_of(mla, "m").page_bytes(16)
    if layout != "page_first":
        # SGLang has neither of these in other layouts.
        return
    uneven = {**gqa, "num_hidden_layers": 3, "num_key_value_heads": 2, "v_head_dim": 64}
    assert pages(mha_host(layout, v_head_dim=64)) == size_of(uneven, "m").page_bytes(16)
    latents, index = dsa_hosts(layout)
    dsa = {"num_hidden_layers": 3, "kv_lora_rank": 64, "qk_rope_head_dim": 16}
    assert pages(latents) == size_of(dsa, "m").page_bytes(64)
    with_index = size_of({**dsa, "index_topk": 8, "index_head_dim": 128}, "m")
    # In this model two of the three layers have index keys of their own.
    assert pages(index) * 3 == (with_index.page_bytes(64) - pages(latents)) * 2


def test_the_estimate_of_a_prefill_goes_by_the_parameters_that_a_token_passes_through() -> None:
    sizes: dict[str, ModelSize] = {
        "8b": size_of(LLAMA_8B, "m"),
        "70b": size_of(LLAMA_70B, "m"),
        "v3": size_of(DEEPSEEK_V3, "m"),
    }
    # Layers alone, without embeddings: 6.98, 68.5 and 35.6 of the published 8.03, 70.6 and 37 billion.
    assert [round(size.active_parameters / 1e9, 1) for size in sizes.values()] == [7.0, 68.5, 35.6]
    rate, source = estimated("H100", 8, sizes["70b"])
    assert rate == pytest.approx(8 * 989.4e12 * 0.4 / (2 * sizes["70b"].active_parameters))
    assert "data sheet" in source and "assumed" in source


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({}, "--model: num_hidden_layers is missing in the model's configuration; allowed: the config.json"),
        ({**LLAMA_8B, "num_hidden_layers": "x"}, "--model: num_hidden_layers is no whole number from 1 to 16777216"),
        *(
            ({**LLAMA_8B, key: value}, f"--model: {key} is no ")
            for key in ("num_hidden_layers", "num_key_value_heads", "head_dim", "v_head_dim", "layer_types")
            for value in ("abc", [1] if key != "layer_types" else 5, {"a": 1}, 1.5, float("inf"), -64, 2**63, True)
        ),
        ({**LLAMA_8B, "num_attention_heads": 8192}, "--model: hidden_size is less than num_attention_heads"),
        ({**LLAMA_8B, "torch_dtype": "int3"}, "--dtype: 'int3' is no dtype of a KV cache; allowed: bfloat16"),
        ({**LLAMA_8B, "layer_types": ["linear_attention"]}, "--model: m has layers with states"),
        ({**LLAMA_8B, "full_attention_interval": 4}, "--model: m has layers with states"),
    ],
)
def test_a_model_that_says_too_little_is_one_sentence(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        size_of(config, "m")
    assert str(refused.value).startswith(sentence) and "\n" not in str(refused.value)


def test_heads_that_cannot_be_split_and_files_that_are_none_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--tp: 8 KV heads cannot be split among 3 ranks"):
        size_of(LLAMA_8B, "m", tp=3)
    with pytest.raises(ConfigError, match=r"--model: .*config\.json: No such file"):
        read_model(tmp_path)
    for text, problem in (
        ("[]", "is no JSON object"),
        ("{", "is no JSON object;"),
        ("[" * 200_000, "is no JSON object;"),
        ('{"num_hidden_layers": Infinity}', "num_hidden_layers"),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=problem):
            read_model(tmp_path)


def test_an_infinite_limit_that_is_none_of_the_sizes_is_no_fault_of_a_model(tmp_path: Path) -> None:
    """Those with states have one: ``time_step_limit``."""
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_8B, "time_step_limit": [0.0, float("inf")]}))
    assert read_model(tmp_path).token_bytes == 131_072


def test_the_language_model_inside_another_one_counts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": LLAMA_8B, "vision_config": {}}))
    assert read_model(tmp_path).token_bytes == 131_072


@pytest.mark.parametrize(
    ("gpu", "cores", "operations", "gigahertz"),
    [
        ("a100", 108, 2048, 1.41),
        ("h100", 132, 4096, 1.83),
        ("h200", 132, 4096, 1.83),
        ("l40s", 142, 1024, 2.49),
        ("mi300x", 304, 2048, 2.1),
    ],
)
def test_peaks_are_those_of_dense_matrices(gpu: str, cores: int, operations: int, gigahertz: float) -> None:
    """Multiprocessors (compute units), their dense BF16 operations in a clock, and the clock that the peak is for."""
    assert PEAK_TFLOPS[gpu][0] == pytest.approx(cores * operations * gigahertz / 1000, rel=0.005)

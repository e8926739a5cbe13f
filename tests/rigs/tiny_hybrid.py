"""Tiny hybrid models made on the spot: seeded random weights, no download; for caches of more than one pool.

The weights are those of transformers' own classes, so that transformers can say what a model answers.

| kind | layers |
|---|---|
| ``gemma4`` | Gemma 4's text model: 3 layers of sliding-window attention, 1 of full attention |
| ``qwen3_next`` | Qwen3-Next: 3 layers of Gated DeltaNet, 1 of full attention, experts with a shared one in all |
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from hicache_ext.testing.sglang_cpu import declare_torchvision_operators
from tests.rigs.tiny_model import VOCABULARY_SIZE, make_directory, write_tokenizer

Kind = Literal["gemma4", "qwen3_next"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""Every kind of model that can be made."""

WINDOW = 96
"""Tokens that a layer of sliding-window attention sees; no multiple of most page sizes."""

CHUNK = 64
"""Tokens from one state of Gated DeltaNet that SGLang keeps to the next."""

ARGUMENTS: dict[str, tuple[str, ...]] = {
    # What SGLang 0.5.23 asks for on CPUs; without AMX it falls back to torch_native itself.
    "gemma4": ("--attention-backend", "intel_amx"),
}
"""Of every server of a kind."""
DECODE_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "qwen3_next": (
        *("--disaggregation-decode-enable-radix-cache", "--mamba-radix-cache-strategy", "extra_buffer"),
        *("--mamba-track-interval", str(CHUNK)),
    )
}
"""Of a decode node that writes, besides."""

# Raised when the files written for the same recipe change.
_RECIPE_VERSION = 2


def make_tiny_hybrid(path: str | os.PathLike[str], kind: Kind, *, seed: int = 0) -> Path:
    """Make the model in directory ``path`` and return that path; a directory that already holds it is left alone.

    Raises ``FileExistsError`` when ``path`` holds something else.
    """
    recipe = {"kind": kind, "seed": seed, "version": _RECIPE_VERSION}
    return make_directory(Path(path), recipe, lambda directory: _write(directory, kind, seed))


def load_reference(path: str | os.PathLike[str]) -> Any:
    """The model as transformers has it, on the CPU, in evaluation mode."""
    declare_torchvision_operators()  # transformers imports torchvision for some models
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def _write(directory: Path, kind: Kind, seed: int) -> None:
    declare_torchvision_operators()
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(_config(kind), dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.dim() > 1:
                # Wide enough a spread that the answer depends on the whole prompt, see tiny_model.py.
                spread = 2.0 / parameter.shape[-1] ** 0.5
                if kind == "gemma4" and name.endswith("embed_tokens.weight"):
                    spread /= 20  # the same matrix makes the logits: the last token would only ever repeat itself
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
            elif name.endswith(("dt_bias", "A_log")):
                # Decays between one that forgets within tokens and one that remembers the whole prompt.
                parameter.copy_(torch.linspace(-6.0, 0.0, parameter.numel()))
            elif kind == "qwen3_next" and name.endswith(("q_norm.weight", "k_norm.weight")):
                # Attention to few tokens: the mean of hundreds of random ones would be next to nothing, and a state
                # of Gated DeltaNet has forgotten them.
                parameter.fill_(1.5)
    model.save_pretrained(directory)
    write_tokenizer(directory)


def _config(kind: Kind) -> Any:
    from transformers import Gemma4TextConfig, Qwen3NextConfig

    common: dict[str, Any] = {
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "pad_token_id": 258,
    }
    if kind == "gemma4":
        return Gemma4TextConfig(
            **common,
            head_dim=32,
            global_head_dim=32,
            sliding_window=WINDOW,
            layer_types=["sliding_attention"] * 3 + ["full_attention"],
            hidden_size_per_layer_input=0,
            vocab_size_per_layer_input=VOCABULARY_SIZE,
            swa_num_key_value_heads=common["num_key_value_heads"],  # SGLang's name; it asks for it
        )
    return Qwen3NextConfig(
        **common,
        head_dim=32,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        full_attention_interval=4,  # the same for SGLang
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    )

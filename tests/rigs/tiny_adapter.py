"""A LoRA adapter for the tiny model."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from tests.rigs.tiny_model import TinyModelRecipe


def make_tiny_adapter(
    path: str | os.PathLike[str], *, seed: int = 0, recipe: TinyModelRecipe | None = None, rank: int = 4
) -> Path:
    """Make a LoRA adapter for the tiny model of ``recipe`` in directory ``path``; what lies there is overwritten.

    Strong enough to change answers, and on layers that shape KV (k, v) and layers that SGLang keeps as they are loaded
    (o, down).
    """
    from safetensors.torch import save_file

    recipe = recipe or TinyModelRecipe()
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = recipe.hidden_size, 2 * recipe.hidden_size
    query, key_value = recipe.heads * recipe.head_dim, recipe.kv_heads * recipe.head_dim
    modules = {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (key_value, hidden),
        "self_attn.v_proj": (key_value, hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.down_proj": (hidden, inner),
    }
    weights: dict[str, torch.Tensor] = {}
    for layer in range(recipe.layers):
        for module, (rows, columns) in modules.items():
            prefix = f"base_model.model.model.layers.{layer}.{module}"
            for part, shape in (("lora_A", (rank, columns)), ("lora_B", (rows, rank))):
                values = torch.randn(shape, generator=generator) / columns**0.25
                weights[f"{prefix}.{part}.weight"] = values.to(torch.bfloat16)
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": str(path),
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": sorted(module.rpartition(".")[2] for module in modules),
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return directory

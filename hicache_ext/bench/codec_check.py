"""What a codec does to the answers of a model: the KV of a prefix goes through it as pages, and the model goes on.

Each text is cut into pieces. The model reads the first half of a piece, and predicts every token of the second one
twice: with its KV as computed, and as it comes back from the codec. Both runs have equal shapes, so that whatever
differs comes from the codec: with a lossless one nothing does. A third run computes the whole piece at once, without a
cache. It is exact, but rounds otherwise, and so shows what rounding alone does to this model in this dtype.

The pages are those of SGLang's MHA pools (``page_first``), made of the cache of transformers.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hicache_ext.errors import UnsupportedError
from hicache_ext.page.transforms.codec import Codec
from hicache_ext.page.transforms.lossy import LOSSY_MODEL

PIECE = 896
"""Tokens of a piece at most: its prefix fits the sliding windows of today's models."""
_ROWS_AT_ONCE = 64
"""Predictions whose probabilities are compared at once; each is a row over the vocabulary."""


@dataclass(slots=True)
class Agreement:
    """How predictions agree: those of one kind of text, or all."""

    predictions: int = 0
    same: int = 0
    """Whose most likely token stayed the same."""
    kl: float = 0.0
    """Sum of the Kullback-Leibler divergences from what was computed, nats."""
    worst_kl: float = 0.0
    worst_at: int = 0
    """The token of the worst prediction, counted from the beginning of the text."""

    def add(self, other: Agreement) -> None:
        if other.worst_kl > self.worst_kl:
            self.worst_kl, self.worst_at = other.worst_kl, other.worst_at
        self.predictions += other.predictions
        self.same += other.same
        self.kl += other.kl

    @property
    def mean_kl(self) -> float:
        return self.kl / max(1, self.predictions)

    @property
    def agreement(self) -> float:
        return self.same / max(1, self.predictions)


@dataclass(slots=True)
class Checked:
    """What was found out."""

    dtype: str
    device: str
    texts: dict[str, Agreement] = field(default_factory=dict)
    rounding: Agreement = field(default_factory=Agreement)
    """Of all texts: with the run that only rounds otherwise."""
    page_bytes: int = 0
    encoded_bytes: int = 0
    stored_bytes: int = 0
    """With the room that each page lies in."""
    inexact_bytes: int = 0
    """Of the pages: those that went through a codec that does not give them back to the bit."""
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0

    def total(self) -> Agreement:
        all_of_them = Agreement()
        for agreement in self.texts.values():
            all_of_them.add(agreement)
        return all_of_them

    def worst_text(self) -> str:
        return max(self.texts, key=lambda name: self.texts[name].worst_kl)


class ModelUnderTest:
    """A causal model of transformers with its tokenizer."""

    def __init__(self, path: str, device: str | None = None, *, float32: bool = False) -> None:
        """``float32``: compute in 32 bits, with KV as its own dtype keeps it: nothing but the codec matters then.

        Raises UnsupportedError where it cannot be loaded, or has no KV by head.
        """
        import torch

        from hicache_ext.testing.sglang_cpu import declare_torchvision_operators

        declare_torchvision_operators()  # transformers imports torchvision for some models
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(path)
            self._model = AutoModelForCausalLM.from_pretrained(path, dtype="auto").to(self.device).eval()
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise UnsupportedError(f"the model {path!r}", f"transformers cannot load it ({error})") from error
        if getattr(self._model.config.get_text_config(), "kv_lora_rank", None):
            raise UnsupportedError(
                f"the model {path!r}", "its KV are latents of MLA, which are never encoded with loss"
            )
        self.kv_dtype = self._model.dtype
        """torch's."""
        if float32:
            self._model = self._model.to(torch.float32)

    def tokens(self, text: str) -> list[int]:
        return list(self._tokenizer(text)["input_ids"])

    def empty_cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self._model.config)

    def cache_of(self, tokens: Sequence[int]) -> Any:
        """The cache of transformers after these tokens."""
        cache = self.empty_cache()
        self._run(tokens, cache)
        return cache

    def predictions(self, tokens: Sequence[int], cache: Any) -> Any:
        """Logits behind each of these tokens, which follow those of the cache: the cache grows."""
        return self._run(tokens, cache)[0]

    def _run(self, tokens: Sequence[int], cache: Any) -> Any:
        import torch

        ids = torch.tensor([list(tokens)], device=self.device)
        with torch.inference_mode():
            return self._model(ids, past_key_values=cache, use_cache=True).logits


def check(model: ModelUnderTest, codec: Codec, texts: Mapping[str, str], *, page_tokens: int) -> Checked:
    """Raises UnsupportedError where a model keeps no KV by head."""
    checked = Checked(str(model.kv_dtype).removeprefix("torch."), model.device)
    for name, text in texts.items():
        agreement = Agreement()
        for begin, tokens in _pieces(model.tokens(text), page_tokens):
            prefix = len(tokens) // 2 // page_tokens * page_tokens
            cache = model.cache_of(tokens[:prefix])
            restored = copy.deepcopy(cache)
            _through_pages(cache, model.kv_dtype, lambda _, page: page, page_tokens)
            trip = _Trip(codec, checked)
            _through_pages(restored, model.kv_dtype, trip.there_and_back, page_tokens)
            computed = model.predictions(tokens[prefix:], cache)
            again = model.predictions(tokens[prefix:], restored)
            agreement.add(_agreement(computed, again, begin + prefix))
            del again
            at_once = model.predictions(tokens, model.empty_cache())[prefix:]
            checked.rounding.add(_agreement(computed, at_once, begin + prefix))
        if agreement.predictions:
            checked.texts[name] = agreement
    return checked


def _pieces(tokens: Sequence[int], page_tokens: int) -> Iterator[tuple[int, Sequence[int]]]:
    """Where each begins, and its tokens; what is left at the end is dropped where it is short."""
    count = max(1, math.ceil(len(tokens) / PIECE))
    size = math.ceil(len(tokens) / count)
    for begin in range(0, len(tokens), size):
        piece = tokens[begin : begin + size]
        if len(piece) >= 2 * page_tokens:
            yield begin, piece


def _agreement(computed: Any, again: Any, begin: int) -> Agreement:
    import torch

    found = Agreement()
    for at in range(0, computed.shape[0], _ROWS_AT_ONCE):
        first, second = (logits[at : at + _ROWS_AT_ONCE].float().log_softmax(-1) for logits in (computed, again))
        if any(bool(numbers.isnan().any()) for numbers in (first, second)):
            raise UnsupportedError("this model", "it predicts NaN")
        # What is impossible by the first (-inf) adds nothing.
        divergence = (first.exp() * (first - second)).masked_fill(first == -math.inf, 0.0).sum(-1).clamp(min=0)
        worst = int(divergence.argmax())
        same = int((first.argmax(-1) == second.argmax(-1)).sum())
        part = Agreement(len(first), same, float(divergence.sum(dtype=torch.float64)))
        part.worst_kl, part.worst_at = float(divergence[worst]), begin + at + worst
        found.add(part)
    return found


def _through_pages(cache: Any, dtype: Any, back: Callable[[dict[str, Any], bytes], bytes], page_tokens: int) -> None:
    """Replace what the layers of the cache hold by what comes ``back``, given a pool and a page. ``dtype``: of pages.

    Layers of equal heads share pages.
    """
    import torch

    layers = [layer for layer in cache.layers if torch.is_tensor(getattr(layer, "keys", None))]
    if not layers or any(layer.keys.dim() != 4 for layer in layers):
        raise UnsupportedError("this model", "it keeps no keys and values by head")
    groups: dict[tuple[int, ...], list[Any]] = {}
    for layer in layers:
        groups.setdefault((*layer.keys.shape[1:], *layer.values.shape[1:]), []).append(layer)
    for group in groups.values():
        keys, values = (_by_token(group, name, dtype) for name in ("keys", "values"))
        pool = {
            "name": "kv",
            "kind": "MHATokenToKVPoolHost",
            "dtype": str(dtype).removeprefix("torch."),
            "geometry": {"head_dim": str(keys.shape[-1]), "v_head_dim": str(values.shape[-1])},
        }
        for begin in range(0, keys.shape[0], page_tokens):
            parts = [numbers[begin : begin + page_tokens] for numbers in (keys, values)]
            page = back(pool, b"".join(_bytes_of(part) for part in parts))
            at = parts[0].numel() * parts[0].element_size()
            for part, piece in zip(parts, (page[:at], page[at:]), strict=True):
                part.copy_(torch.frombuffer(bytearray(piece), dtype=dtype).view(part.shape))
        for number, layer in enumerate(group):
            for name, numbers in (("keys", keys), ("values", values)):
                restored = numbers[:, number].transpose(0, 1).unsqueeze(0).contiguous()
                setattr(layer, name, restored.to(getattr(layer, name)))


def _by_token(layers: Sequence[Any], name: str, dtype: Any) -> Any:
    """[tokens, layers, heads, numbers], in memory of the host."""
    import torch

    return torch.stack([getattr(layer, name)[0].transpose(0, 1) for layer in layers], dim=1).to("cpu", dtype)


def _bytes_of(numbers: Any) -> bytes:
    import torch

    content: bytes = numbers.contiguous().view(torch.uint8).numpy().tobytes()
    return content


@dataclass(frozen=True, slots=True)
class _Trip:
    """Pages to a medium and back."""

    codec: Codec
    checked: Checked

    def there_and_back(self, pool: dict[str, Any], payload: bytes) -> bytes:
        pages, checked = self.codec.for_pages({"model": LOSSY_MODEL, "pool": pool}, len(payload)), self.checked
        encoded = memoryview(bytearray(0 if pages is None else pages.rooms[-1]))
        if pages is not None and not checked.page_bytes:
            # Once before anything is timed.
            pages.encode(memoryview(payload), encoded)
        checked.page_bytes += len(payload)
        began = time.perf_counter()
        length = 0 if pages is None else pages.encode(memoryview(payload), encoded)
        checked.encode_seconds += time.perf_counter() - began
        if pages is None or not length:
            checked.encoded_bytes += len(payload)
            checked.stored_bytes += len(payload)
            return payload
        page = bytearray(len(payload))
        began = time.perf_counter()
        pages.decode(encoded[:length], memoryview(page))
        checked.decode_seconds += time.perf_counter() - began
        checked.encoded_bytes += length
        checked.stored_bytes += min(room for room in pages.rooms if room >= length)
        checked.inexact_bytes += len(payload) if page != payload else 0
        return bytes(page)

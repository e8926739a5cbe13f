"""``hicache-ext codec-check``: what a codec does to the answers of your model, before a tier is configured with it."""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hicache_ext.cli.inputs import our_texts, read_input
from hicache_ext.cli.output import describe, fitted, show
from hicache_ext.errors import ConfigError, HicacheExtError, UnsupportedError
from hicache_ext.packages import need
from hicache_ext.page.transforms.codec import LOSSY_CODECS, Codec
from hicache_ext.page.transforms.lossy import LOSSY_MODEL

FEWEST = 2000
"""Predictions that are needed to say something about one in a thousand."""
_BOUNDS = ("--max-kl", "--min-agreement")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="directory or name of the model, as transformers takes it")
    parser.add_argument("--codec", choices=("int8", "fp8", "lossless"), default="int8", help="default: %(default)s")
    parser.add_argument("--prompts", metavar="FILE", help="your own text in place of ours; '-': standard input")
    parser.add_argument("--max-kl", metavar="X", help="bound: the mean KL divergence of a prediction, in nats")
    parser.add_argument("--min-agreement", metavar="Y", help="bound: the share of equal most likely tokens, 0 to 1")
    parser.add_argument("--page-size", metavar="N", default="64", help="tokens of a page (default 64)")
    describe(
        parser,
        run=run,
        examples=[
            "hicache-ext codec-check /models/llama --codec int8 --max-kl 0.005 --min-agreement 0.97",
            "hicache-ext codec-check /models/llama --codec fp8 --prompts prompts.txt --json",
        ],
        success="measured, and within the bounds",
        problem="a bound is missed, or there are too few predictions to tell",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print what was measured. Raises ConfigError, UnsupportedError, MissingPackageError."""
    max_kl, min_agreement = _bound(arguments, "--max-kl", math.inf), _bound(arguments, "--min-agreement", 1)
    size = arguments.page_size
    if not size.isascii() or not size.isdigit() or not 1 <= int(size) <= 256:
        raise ConfigError("--page-size", f"{size!r} is not accepted", "a whole number from 1 to 256")
    page_tokens = int(size)
    texts = our_texts() if arguments.prompts is None else _prompts(arguments.prompts)
    need("torch", "transformers", "zstandard")
    report = _measured(arguments, texts, page_tokens)
    report["bounds"] = {"max_kl": max_kl, "min_agreement": min_agreement}
    report["problem"] = problem = _problem(report)
    named = arguments.codec not in LOSSY_CODECS or any((arguments.max_kl, arguments.min_agreement))
    snippet = {"tiers": {"NAME": {"codec": arguments.codec}}}
    report["configuration"] = snippet if problem is None and named else None
    show(arguments, report, _lines(report))
    if problem is not None:
        raise HicacheExtError(problem)
    return 0


def _measured(arguments: argparse.Namespace, texts: Mapping[str, str], page_tokens: int) -> dict[str, Any]:
    from hicache_ext.page.transforms import numbers
    from hicache_ext.page.transforms.lossless import LosslessCodec
    from hicache_ext.page.transforms.lossy import LossyCodec

    codec = LossyCodec(numbers.Code(arguments.codec)) if arguments.codec in LOSSY_CODECS else LosslessCodec()
    model = ModelUnderTest(arguments.model)
    checked = check(model, codec, texts, page_tokens=page_tokens)
    total = sum(checked.texts.values(), Agreement())
    if not total.predictions:
        raise ConfigError("--prompts", "no text is long enough", f"texts of {2 * page_tokens} tokens and more")

    def speed(seconds: float) -> float | None:
        return round(checked.page_bytes / seconds / 1e9, 3) if seconds else None

    return {
        "model": arguments.model,
        "codec": arguments.codec,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": model.device,
        "page_tokens": page_tokens,
        **total.document(),
        "rounding": checked.rounding.document(),
        "ratio": round(checked.page_bytes / checked.encoded_bytes, 3),
        "ratio_stored": round(checked.page_bytes / checked.stored_bytes, 3),
        "encode_gb_per_second": speed(checked.encode_seconds),
        "decode_gb_per_second": speed(checked.decode_seconds),
        "texts": [{"text": name, **found.document()} for name, found in checked.texts.items()],
    }


def _problem(report: Mapping[str, Any]) -> str | None:
    """Why no configuration is rendered, in one sentence; None where nothing speaks against it."""
    bounds = report["bounds"]
    if bounds["max_kl"] is not None and report["mean_kl"] > bounds["max_kl"]:
        return f"{report['codec']} misses --max-kl {bounds['max_kl']:g}: the mean KL is {report['mean_kl']:.3g}"
    if bounds["min_agreement"] is not None and report["agreement"] < bounds["min_agreement"]:
        return (
            f"{report['codec']} misses --min-agreement {bounds['min_agreement']:g}: "
            f"{report['agreement']:.4f} of the predictions agree"
        )
    if report["predictions"] < FEWEST and any(bound is not None for bound in bounds.values()):
        return f"{report['predictions']} predictions are too few to tell, {FEWEST} are needed: give --prompts more text"
    return None


def _lines(report: Mapping[str, Any]) -> list[str]:
    rows = [("text", "predictions", "mean KL", "worst KL", "agree")]
    for text in (*report["texts"], {"text": "all", **report}, {"text": "rounding alone", **report["rounding"]}):
        figures = (f"{text['predictions']:,}", f"{text['mean_kl']:.2g}", f"{text['worst_kl']:.2g}")
        rows.append((text["text"], *figures, f"{text['agreement']:.4f}"))
    encode, decode = (f"{report[f'{what}_gb_per_second'] or math.nan:.2f}" for what in ("encode", "decode"))
    lines = [
        f"{report['model']}, KV in {report['dtype']}, pages of {report['page_tokens']} tokens, {report['codec']}, "
        f"{report['device']}",
        "",
        *fitted(rows),
        "",
        f"ratio {report['ratio']:.3f}, {report['ratio_stored']:.3f} as stored; {encode} GB/s to encode, {decode} to "
        "decode, one thread",
    ]
    if report["configuration"] is not None:
        reason = f"mean KL {report['mean_kl']:.2g}, {report['agreement']:.2%} of {report['predictions']:,} agree"
        lines += ["", "tiers:", "  NAME:  # the tier whose bytes are dear", f"    codec: {report['codec']}  # {reason}"]
    elif report["problem"] is None:
        lines += ["", f"{' or '.join(_BOUNDS)}: name what you bear, and you are given a configuration"]
    return lines


def _bound(arguments: argparse.Namespace, option: str, largest: float) -> float | None:
    given = getattr(arguments, option[2:].replace("-", "_"))
    if given is None:
        return None
    try:
        bound = float(given)
    except ValueError:
        bound = math.nan
    if not 0 <= bound <= largest or math.isinf(bound):
        allowed = "a number from 0 to 1" if largest == 1 else "a number from 0 on, such as 0.005"
        raise ConfigError(option, f"{given!r} is not accepted", allowed)
    return bound


def _prompts(file: str) -> dict[str, str]:
    text = read_input(file, "--prompts")
    if not text.strip():
        raise ConfigError("--prompts", "the file is empty", "texts of some thousand tokens")
    return {"text": text}


# -- measuring ---------------------------------------------------------------------------------------------------------

PIECE = 896
"""Tokens of a piece at most: its prefix fits the sliding windows of today's models."""
_ROWS_AT_ONCE = 64
"""Predictions whose probabilities are compared at once; each is a row over the vocabulary."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """How predictions agree: those of one kind of text, or all."""

    predictions: int = 0
    same: int = 0
    """Whose most likely token stayed the same."""
    kl: float = 0.0
    """Sum of the Kullback-Leibler divergences from what was computed, nats."""
    worst_kl: float = 0.0

    def __add__(self, other: Agreement) -> Agreement:
        worst = max(self.worst_kl, other.worst_kl)
        return Agreement(self.predictions + other.predictions, self.same + other.same, self.kl + other.kl, worst)

    def document(self) -> dict[str, float]:
        """Return what ``--json`` has of it."""
        count = max(1, self.predictions)
        shares = {"mean_kl": self.kl / count, "agreement": self.same / count, "worst_kl": self.worst_kl}
        return {"predictions": self.predictions, **shares}


@dataclass(slots=True)
class Checked:
    """What was found out, and the codec's work on the pages."""

    codec: Codec
    texts: dict[str, Agreement] = field(default_factory=dict)
    rounding: Agreement = Agreement()
    """Of all texts: with the run that only rounds otherwise."""
    page_bytes: int = 0
    encoded_bytes: int = 0
    stored_bytes: int = 0
    """With the room that each page lies in."""
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0

    def there_and_back(self, pool: dict[str, Any], payload: bytes) -> bytes:
        """Encode and decode a page, as a tier does."""
        pages = self.codec.for_pages({"model": LOSSY_MODEL, "pool": pool}, len(payload))
        encoded = memoryview(bytearray(0 if pages is None else pages.rooms[-1]))
        if pages is not None and not self.page_bytes:
            # Once before anything is timed.
            pages.encode(memoryview(payload), encoded)
        self.page_bytes += len(payload)
        began = time.perf_counter()
        length = 0 if pages is None else pages.encode(memoryview(payload), encoded)
        self.encode_seconds += time.perf_counter() - began
        if pages is None or not length:
            self.encoded_bytes += len(payload)
            self.stored_bytes += len(payload)
            return payload
        page = bytearray(len(payload))
        began = time.perf_counter()
        pages.decode(encoded[:length], memoryview(page))
        self.decode_seconds += time.perf_counter() - began
        self.encoded_bytes += length
        self.stored_bytes += min(room for room in pages.rooms if room >= length)
        return bytes(page)


class ModelUnderTest:
    """A causal model of transformers with its tokenizer."""

    def __init__(self, path: str) -> None:
        """Raises UnsupportedError where it cannot be loaded, or has no KV by head."""
        import torch

        from hicache_ext.testing.sglang_cpu import declare_torchvision_operators

        declare_torchvision_operators()  # transformers imports torchvision for some models
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(path)
            self._model = AutoModelForCausalLM.from_pretrained(path, dtype="auto").to(self.device).eval()
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise UnsupportedError(f"the model {path!r}", f"transformers cannot load it ({error})") from error
        if getattr(self._model.config.get_text_config(), "kv_lora_rank", None):
            raise UnsupportedError(
                f"the model {path!r}", "its KV are latents of MLA, which are never encoded with loss"
            )
        self.dtype = self._model.dtype
        """torch's."""

    def tokens(self, text: str) -> list[int]:
        return list(self._tokenizer(text)["input_ids"])

    def empty_cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self._model.config)

    def predictions(self, tokens: Sequence[int], cache: Any) -> Any:
        """Return the logits behind each of these tokens, which follow those of the cache: the cache grows."""
        import torch

        ids = torch.tensor([list(tokens)], device=self.device)
        with torch.inference_mode():
            return self._model(ids, past_key_values=cache, use_cache=True).logits[0]


def check(model: ModelUnderTest, codec: Codec, texts: Mapping[str, str], *, page_tokens: int) -> Checked:
    """Raises UnsupportedError where a model keeps no KV by head."""
    checked = Checked(codec)
    for name, text in texts.items():
        agreement = Agreement()
        for tokens in _pieces(model.tokens(text), page_tokens):
            prefix = len(tokens) // 2 // page_tokens * page_tokens
            cache = model.empty_cache()
            model.predictions(tokens[:prefix], cache)
            restored = copy.deepcopy(cache)
            _through_pages(restored, checked.there_and_back, page_tokens)
            computed = model.predictions(tokens[prefix:], cache)
            again = model.predictions(tokens[prefix:], restored)
            agreement += _agreement(computed, again)
            del again
            checked.rounding += _agreement(computed, model.predictions(tokens, model.empty_cache())[prefix:])
        if agreement.predictions:
            checked.texts[name] = agreement
    return checked


def _pieces(tokens: Sequence[int], page_tokens: int) -> Iterator[Sequence[int]]:
    """Yield parts of the text; what is left at the end is dropped where it is short."""
    count = max(1, math.ceil(len(tokens) / PIECE))
    size = math.ceil(len(tokens) / count)
    for begin in range(0, len(tokens), size):
        piece = tokens[begin : begin + size]
        if len(piece) >= 2 * page_tokens:
            yield piece


def _agreement(computed: Any, again: Any) -> Agreement:
    import torch

    found = Agreement()
    for at in range(0, computed.shape[0], _ROWS_AT_ONCE):
        first, second = (logits[at : at + _ROWS_AT_ONCE].float().log_softmax(-1) for logits in (computed, again))
        if any(bool(numbers.isnan().any()) for numbers in (first, second)):
            raise UnsupportedError("this model", "it predicts NaN")
        # What is impossible by the first (-inf) adds nothing.
        divergence = (first.exp() * (first - second)).masked_fill(first == -math.inf, 0.0).sum(-1).clamp(min=0)
        same = int((first.argmax(-1) == second.argmax(-1)).sum())
        found += Agreement(len(first), same, float(divergence.sum(dtype=torch.float64)), float(divergence.max()))
    return found


def _through_pages(cache: Any, back: Callable[[dict[str, Any], bytes], bytes], page_tokens: int) -> None:
    """Replace what the layers of the cache hold by what comes ``back``, given a pool and a page.

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
        # [tokens, layers, heads, numbers], in memory of the host
        keys, values = (
            torch.stack([getattr(layer, name)[0].transpose(0, 1) for layer in group], dim=1).to("cpu")
            for name in ("keys", "values")
        )
        pool = {
            "name": "kv",
            "kind": "MHATokenToKVPoolHost",
            "dtype": str(keys.dtype).removeprefix("torch."),
            "geometry": {"head_dim": str(keys.shape[-1]), "v_head_dim": str(values.shape[-1])},
        }
        for begin in range(0, keys.shape[0], page_tokens):
            parts = [numbers[begin : begin + page_tokens] for numbers in (keys, values)]
            page = back(pool, b"".join(part.contiguous().view(torch.uint8).numpy().tobytes() for part in parts))
            at = parts[0].numel() * parts[0].element_size()
            for part, piece in zip(parts, (page[:at], page[at:]), strict=True):
                part.copy_(torch.frombuffer(bytearray(piece), dtype=part.dtype).view(part.shape))
        for number, layer in enumerate(group):
            for name, numbers in (("keys", keys), ("values", values)):
                restored = numbers[:, number].transpose(0, 1).unsqueeze(0).contiguous()
                setattr(layer, name, restored.to(getattr(layer, name)))

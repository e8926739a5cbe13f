"""``hicache-ext codec-check``: what a codec does to the answers of your model, before a tier is configured with it."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from typing import Any

from hicache_ext.bench.codec_texts import texts as texts_of_ours
from hicache_ext.cli.inputs import read_input
from hicache_ext.cli.usage import describe, show
from hicache_ext.errors import ConfigError, HicacheExtError
from hicache_ext.packages import need
from hicache_ext.page.transforms.codec import LOSSY_CODECS
from hicache_ext.runtime.whole_file import json_in

FEWEST = 2000
"""Predictions that are needed to say something about one in a thousand."""
_BOUNDS = ("--max-kl", "--min-agreement")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="directory or name of the model, as transformers takes it")
    parser.add_argument("--codec", choices=("int8", "fp8", "lossless"), default="int8", help="default: %(default)s")
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="your own texts in place of ours: plain text, '-' for standard input, or a .jsonl file of strings or "
        "objects with text",
    )
    parser.add_argument("--max-kl", metavar="X", help="bound: the mean KL divergence of a prediction, in nats")
    parser.add_argument("--min-agreement", metavar="Y", help="bound: the share of equal most likely tokens, 0 to 1")
    parser.add_argument("--page-size", metavar="N", default="64", help="tokens of a page (default 64)")
    parser.add_argument(
        "--float32", action="store_true", help="compute in 32 bits, KV as it is: what the codec does without rounding"
    )
    parser.add_argument("--device", metavar="DEVICE", help="cpu, cuda, ... (default: a GPU where there is one)")
    describe(
        parser,
        run=run,
        examples=[
            "hicache-ext codec-check /models/llama --codec int8 --max-kl 0.005 --min-agreement 0.97",
            "hicache-ext codec-check /models/llama --codec fp8 --prompts prompts.jsonl --json",
        ],
        success="measured, and within the bounds",
        problem="a bound is missed, or there are too few predictions to tell",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print what was measured. Raises ConfigError, UnsupportedError, MissingPackageError."""
    max_kl, min_agreement = _bound(arguments, "--max-kl", math.inf), _bound(arguments, "--min-agreement", 1)
    page_tokens = _page_tokens(arguments.page_size)
    texts = texts_of_ours() if arguments.prompts is None else _prompts(arguments.prompts)
    need("torch", "transformers", "zstandard")
    report = _measured(arguments, texts, page_tokens)
    report["bounds"] = {"max_kl": max_kl, "min_agreement": min_agreement}
    report["problem"] = problem = _problem(report)
    report["configuration"] = None if problem is not None or not _may_render(arguments) else _snippet(arguments.codec)
    show(arguments, report, _lines(report))
    if problem is not None:
        raise HicacheExtError(problem)
    return 0


def _measured(arguments: argparse.Namespace, texts: Mapping[str, str], page_tokens: int) -> dict[str, Any]:
    from hicache_ext.bench.codec_check import ModelUnderTest, check
    from hicache_ext.page.transforms import planes, rows
    from hicache_ext.page.transforms.lossless import LosslessCodec
    from hicache_ext.page.transforms.lossy import LossyCodec

    lossy = arguments.codec in LOSSY_CODECS
    codec = LossyCodec(rows.Code(arguments.codec)) if lossy else LosslessCodec()
    compiled = all(part.wait() is not None for part in (planes.part, rows.part))
    model = ModelUnderTest(arguments.model, arguments.device, float32=arguments.float32)
    checked = check(model, codec, texts, page_tokens=page_tokens)
    total = checked.total()
    if not total.predictions:
        raise ConfigError("--prompts", "no text is long enough", f"texts of {2 * page_tokens} tokens and more")
    worst = checked.worst_text()

    def speed(seconds: float) -> float | None:
        return round(checked.page_bytes / seconds / 1e9, 3) if seconds else None

    return {
        "model": arguments.model,
        "codec": arguments.codec,
        "dtype": checked.dtype,
        "device": checked.device,
        "float32": arguments.float32,
        "page_tokens": page_tokens,
        "compiled": compiled,
        "predictions": total.predictions,
        "mean_kl": total.mean_kl,
        "agreement": total.agreement,
        "worst": {"kl": total.worst_kl, "text": worst, "token": checked.texts[worst].worst_at},
        "rounding": {"mean_kl": checked.rounding.mean_kl, "agreement": checked.rounding.agreement},
        "ratio": round(checked.page_bytes / checked.encoded_bytes, 3),
        "ratio_stored": round(checked.page_bytes / checked.stored_bytes, 3),
        "inexact_share": round(checked.inexact_bytes / checked.page_bytes, 4),
        "encode_gb_per_second": speed(checked.encode_seconds),
        "decode_gb_per_second": speed(checked.decode_seconds),
        "texts": [
            {
                "text": name,
                "predictions": found.predictions,
                "mean_kl": found.mean_kl,
                "agreement": found.agreement,
                "worst_kl": found.worst_kl,
            }
            for name, found in checked.texts.items()
        ],
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


def _may_render(arguments: argparse.Namespace) -> bool:
    return arguments.codec not in LOSSY_CODECS or any((arguments.max_kl, arguments.min_agreement))


def _snippet(codec: str) -> dict[str, Any]:
    return {"tiers": {"NAME": {"codec": codec}}}


def _lines(report: Mapping[str, Any]) -> list[str]:
    codec, worst, rounding = report["codec"], report["worst"], report["rounding"]
    speeds = [f"{report[f'{what}_gb_per_second'] or math.nan:.2f}" for what in ("encode", "decode")]
    width = max(len("rounding alone"), *(len(text["text"]) for text in report["texts"]))
    lines = [
        f"{report['model']}, KV in {report['dtype']}, pages of {report['page_tokens']} tokens, {codec}, "
        f"{report['device']}{', computed in float32' if report['float32'] else ''}",
        "",
        f"  {'text':{width}}  predictions  mean KL   agree   worst KL",
    ]
    lines += [
        f"  {text['text']:{width}}  {text['predictions']:>11,}  {text['mean_kl']:<8.2g}  {text['agreement']:.4f}  "
        f"{text['worst_kl']:.2g}"
        for text in report["texts"]
    ]
    lines += [
        f"  {'all':{width}}  {report['predictions']:>11,}  {report['mean_kl']:<8.2g}  {report['agreement']:.4f}  "
        f"{worst['kl']:.2g}, token {worst['token']:,} of {worst['text']}",
        f"  {'rounding alone':{width}}  {'':>11}  {rounding['mean_kl']:<8.2g}  {rounding['agreement']:.4f}",
        "",
        f"  ratio {report['ratio']:.3f}, {report['ratio_stored']:.3f} as stored; {speeds[0]} GB/s to encode, "
        f"{speeds[1]} to decode, one thread{'' if report['compiled'] else ', without compiled code'}",
    ]
    if report["inexact_share"] < 1 and codec in LOSSY_CODECS:
        lines.append(f"  {1 - report['inexact_share']:.2%} of the bytes came back to the bit")
    if report["configuration"] is not None:
        reason = f"mean KL {report['mean_kl']:.2g}, {report['agreement']:.2%} of {report['predictions']:,} agree"
        lines += ["", "tiers:", "  NAME:  # the tier whose bytes are dear", f"    codec: {codec}  # {reason}"]
    elif report["problem"] is None:
        lines += ["", f"  {' or '.join(_BOUNDS)}: name what you bear, and you are given a configuration"]
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


def _page_tokens(given: str) -> int:
    if not given.isascii() or not given.isdigit() or not 1 <= int(given) <= 256:
        raise ConfigError("--page-size", f"{given!r} is not accepted", "a whole number from 1 to 256")
    return int(given)


def _prompts(file: str) -> dict[str, str]:
    text = read_input(file, "--prompts")
    if not text.strip():
        raise ConfigError("--prompts", "the file is empty", "texts of some thousand tokens")
    if not file.endswith(".jsonl"):
        return {"text": text}
    prompts = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            value = json_in(line)
        except ValueError:
            value = None
        content = value.get("text") if isinstance(value, dict) else value
        if not isinstance(content, str):
            allowed = "in each line a JSON string, or an object with text"
            raise ConfigError("--prompts", f"line {number} is no text", allowed)
        prompts[f"line {number}"] = content
    return prompts

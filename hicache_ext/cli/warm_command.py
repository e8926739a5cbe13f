"""``hicache-ext warm``: copy the pages of a prompt from the pool to this node's disk before any request."""

from __future__ import annotations

import argparse
import time

from hicache_ext.cli.inputs import add_namespace_arguments, parse_tokens, read_input, seed_of
from hicache_ext.cli.terminal import Progress
from hicache_ext.config import load_config, rounded_size
from hicache_ext.errors import ConfigError
from hicache_ext.storage.serving.warming import read_identities, warm_prompts


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="the configuration file that the server is given")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--tokens", metavar="FILE", help="token ids: numbers, or JSON (a list, or a list of lists); '-': standard input"
    )
    what.add_argument(
        "--prompt",
        metavar="FILE",
        help="text as the server gets it; needs --model and the package transformers",
    )
    parser.add_argument("--model", metavar="PATH", help="whose tokenizer makes token ids of the prompt")
    parser.add_argument("--served-name", metavar="NAME", help="of the model, where the tiers hold several")
    parser.add_argument(
        "--identity",
        metavar="FILE",
        action="append",
        default=[],
        help="an identity document of another node (PATH/identities/*.json of its file tier), or a directory of them, "
        "where no tier of this node knows any; may be repeated",
    )
    parser.add_argument("--to", metavar="TIER", help="the tier to warm (default: promote_to)")
    parser.add_argument("--role", choices=("prefill", "decode", "both"), default="prefill", help="default: %(default)s")
    add_namespace_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Warm and print the result; 1 when a page that exists could not be copied."""
    config = load_config(arguments.config).for_role(arguments.role)
    if arguments.tokens is not None:
        prompts = parse_tokens(read_input(arguments.tokens, "--tokens"), "--tokens")
    else:
        prompts = [_tokenize(read_input(arguments.prompt, "--prompt"), arguments.model)]
    bar = Progress("pages")
    started = time.monotonic()
    report = warm_prompts(
        config,
        prompts,
        to=arguments.to,
        model=arguments.served_name,
        identities=read_identities(arguments.identity, "--identity"),
        seed=seed_of(arguments),
        progress=bar.show,
    )
    bar.end()
    seconds = time.monotonic() - started
    print(
        f"{report.fetched} pages fetched ({rounded_size(report.payload_bytes)} in {seconds:.1f} s), "
        f"{report.present} were there, {report.absent} are nowhere, {report.failed} failed"
    )
    return 1 if report.failed else 0


def _tokenize(text: str, model: str | None) -> list[int]:
    if model is None:
        raise ConfigError("--model", "--prompt needs a tokenizer", "the directory or name of the model, or --tokens")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
        return list(tokenizer.encode(text))
    except Exception as error:  # noqa: BLE001 - a tokenizer may raise anything; the user gets its first line
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError("--model", f"no tokenizer could be loaded from {model!r}: {reason}") from None

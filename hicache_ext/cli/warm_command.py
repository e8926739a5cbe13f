"""``hicache-ext warm``: copy the pages of a prompt from the pool to this node's disk before any request."""

from __future__ import annotations

import argparse
import time

from hicache_ext.cli.inputs import add_namespace_arguments, add_prompt_arguments, prompts_of, seed_of
from hicache_ext.cli.terminal import Progress
from hicache_ext.cli.usage import describe, show
from hicache_ext.config import load_config, rounded_size
from hicache_ext.storage.serving.warming import read_identities, warm_prompts


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="the configuration file that the server is given")
    add_prompt_arguments(parser)
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
    describe(
        parser,
        run=run,
        examples=["hicache-ext warm hicache.yaml --tokens tokens.json"],
        problem="nothing can be warmed, or a page that exists could not be copied",
    )


def run(arguments: argparse.Namespace) -> int:
    """Warm and print the result; 1 when a page that exists could not be copied."""
    config = load_config(arguments.config).for_role(arguments.role)
    prompts = prompts_of(arguments)
    started = time.monotonic()
    with Progress("pages") as bar:
        report = warm_prompts(
            config,
            prompts,
            to=arguments.to,
            model=arguments.served_name,
            identities=read_identities(arguments.identity, "--identity"),
            seed=seed_of(arguments),
            progress=bar.show,
        )
    seconds = time.monotonic() - started
    document = {
        "fetched": report.fetched,
        "bytes": report.payload_bytes,
        "seconds": seconds,
        "present": report.present,
        "absent": report.absent,
        "failed": report.failed,
    }
    line = (
        f"{report.fetched} pages fetched ({rounded_size(report.payload_bytes)} in {seconds:.1f} s), "
        f"{report.present} were there, {report.absent} are nowhere, {report.failed} failed"
    )
    show(arguments, document, [line])
    return 1 if report.failed else 0

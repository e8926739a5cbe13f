"""``hicache-ext explain`` and ``warm``: where the pages of a prompt are, and how they come to this node's disk."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

from hicache_ext.cli.inputs import add_namespace_arguments, add_prompt_arguments, prompts_of, seed_of
from hicache_ext.cli.output import Progress, describe, rough_span, show
from hicache_ext.config import load_config, load_document, rounded_size
from hicache_ext.page.identity import KV_POOL
from hicache_ext.storage.serving.explaining import Chain, Explanation, Found, explain
from hicache_ext.storage.serving.warming import read_identities, warm_prompts

# -- explain -----------------------------------------------------------------------------------------------------------

_SGLANG_THRESHOLD = 256
"""SGLang's own ``prefetch_threshold``, where no other is configured."""


def configure_explain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="the configuration file that the server is given")
    add_prompt_arguments(parser)
    parser.add_argument("--served-name", metavar="NAME", help="of the model, where the tiers hold several")
    parser.add_argument("--role", choices=("prefill", "decode", "both"), default="both", help="default: %(default)s")
    add_namespace_arguments(parser)
    describe(
        parser,
        run=_explain,
        examples=[
            "hicache-ext explain hicache.yaml --tokens tokens.json",
            "hicache-ext explain hicache.yaml --prompt prompt.txt --model /models/llama",
        ],
        success="all pages of each prompt's KV are there",
        problem="a page of the KV is missing",
    )


def _explain(arguments: argparse.Namespace) -> int:
    """Explain each prompt; 1 where a page of the KV is missing."""
    document = load_document(arguments.config)
    config = document.hicache_ext.for_role(arguments.role)
    threshold = _SGLANG_THRESHOLD if document.prefetch_threshold is None else document.prefetch_threshold
    model, seed = arguments.served_name, seed_of(arguments)
    explained = [explain(config, tokens, model=model, seed=seed) for tokens in prompts_of(arguments)]
    lines = ["\n\n".join("\n".join(_lines(one, threshold)) for one in explained)]
    show(arguments, [_document(one) for one in explained], lines)
    return 0 if all(map(_is_whole, explained)) else 1


def _is_whole(explanation: Explanation) -> bool:
    """Whether some server finds all pages of the prompt's KV."""
    return any(chain.pool == KV_POOL and chain.leading == len(chain.hashes) for chain in explanation.chains)


def _lines(explanation: Explanation, threshold: int) -> list[str]:
    lines = [f"prompt of {explanation.tokens} tokens"]
    for chain in explanation.chains:
        pool = chain.document["pool"]
        kind = ", ".join(filter(None, (pool.get("dtype"), pool.get("layout"), f"{chain.page_size} tokens a page")))
        model = chain.document["model"]["id"]
        lines += ["", f"identity {chain.digest.hex()[:12]}: {model}, pool {chain.pool} ({kind})"]
        for tier, found in sorted(_by_tier(chain).items()):
            lines.append(f"  {tier}: {len(found)} of {len(chain.hashes)} pages{_ages(found)}")
        if not chain.found:
            lines.append(f"  none of {len(chain.hashes)} pages in any tier")
        lines += _kv_lines(explanation, chain, threshold) if chain.pool == KV_POOL else _lines_beside(chain)
    lines.append("")
    lines += [f"not asked: {name}: {reason}" for name, reason in explanation.unread.items()]
    if explanation.tokens < threshold:
        lines.append(f"SGLang asks storage for {threshold} tokens or more (prefetch_threshold): this is shorter")
    return lines if lines[-1] else lines[:-1]


def _kv_lines(explanation: Explanation, chain: Chain, threshold: int) -> list[str]:
    restorable, whole = chain.restorable(explanation.tokens), len(chain.hashes) * chain.page_size
    few = f"; SGLang takes {threshold} or more (prefetch_threshold), or none" if 0 < restorable < threshold else ""
    lines = [f"  {restorable} tokens can be restored, of {whole} in whole pages{few}"]
    if reason := explanation.reason(chain):
        first, last = chain.leading_tokens, chain.leading_tokens + chain.page_size - 1
        lines.append(f"  page {chain.leading + 1} (tokens {first} to {last}) is missing: {reason}")
    return lines


def _lines_beside(chain: Chain) -> list[str]:
    """A pool beside the KV may need the last pages of a prefix only, and SGLang alone knows how many."""
    return [f"  the last one ends at token {(max(chain.found) + 1) * chain.page_size}"] if chain.found else []


def _by_tier(chain: Chain) -> dict[str, list[Found]]:
    tiers: dict[str, list[Found]] = {}
    for places in chain.found.values():
        for found in places:
            tiers.setdefault(found.tier, []).append(found)
    return tiers


def _ages(found: Sequence[Found]) -> str:
    now, parts = time.time(), []
    for what, moments in (
        ("written", [one.written for one in found if one.written is not None]),
        ("used", [one.used for one in found if one.used is not None]),
    ):
        if moments:
            newest, oldest = rough_span(now - max(moments)), rough_span(now - min(moments))
            parts.append(f"{what} {newest} ago" if newest == oldest else f"{what} {newest} to {oldest} ago")
    return "".join(f", {part}" for part in parts)


def _document(explanation: Explanation) -> dict[str, Any]:
    return {
        "tokens": explanation.tokens,
        "identities": [
            {
                "identity": chain.digest.hex(),
                "model": chain.document["model"]["id"],
                "pool": chain.pool,
                "page_size": chain.page_size,
                "pages": [
                    {
                        "hash": page.hex(),
                        "places": [
                            {"tier": found.tier, "written": found.written, "used": found.used}
                            for found in chain.found.get(position, [])
                        ],
                    }
                    for position, page in enumerate(chain.hashes)
                ],
                "leading_pages": chain.leading,
                "restorable_tokens": chain.restorable(explanation.tokens),
                "reason": explanation.reason(chain) or None,
            }
            for chain in explanation.chains
        ],
        "not_asked": explanation.unread,
    }


# -- warm --------------------------------------------------------------------------------------------------------------


def configure_warm(parser: argparse.ArgumentParser) -> None:
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
        run=_warm,
        examples=["hicache-ext warm hicache.yaml --tokens tokens.json"],
        problem="nothing can be warmed, or a page that exists could not be copied",
    )


def _warm(arguments: argparse.Namespace) -> int:
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

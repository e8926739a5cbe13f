"""``hicache-ext explain``, ``warm``, ``hint``, ``pin``, ``unpin``, ``pins``: where the pages of prompts are, how they
come to this node's disk, and how they stay there. All may be used while servers run.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

from hicache_ext.cli.inputs import (
    MODEL,
    NAMESPACE,
    PROMPTS,
    TARGET,
    Target,
    prompts_of,
    read_input,
    seed_of,
    targets,
)
from hicache_ext.cli.output import argument, command, fitted, one_of, progress, rough_span, show
from hicache_ext.config import load_config, load_document, parse_duration, rounded_size
from hicache_ext.errors import ConfigError, HicacheExtError, StoreError
from hicache_ext.page.envelope import PAGE_HASH_LENGTH
from hicache_ext.page.hashes import page_hashes
from hicache_ext.page.identity import KV_POOL
from hicache_ext.page.transforms.forms import STORED_AS
from hicache_ext.page.transforms.sealing import SealMode
from hicache_ext.runtime.shown import shown_text
from hicache_ext.storage.contract.registry import open_tier
from hicache_ext.storage.serving.kv_hints import Action, KvHints, Said
from hicache_ext.storage.serving.prompts import Chain, Explanation, documents_in, explain, warm_prompts
from hicache_ext.storage.tiers.file.config import FileTierConfig
from hicache_ext.storage.tiers.file.inspection import open_inspector
from hicache_ext.storage.tiers.file.layouts import layout_in
from hicache_ext.storage.tiers.file.pins import Pin, add_pin, read_pins, remove_pin

# -- explain -----------------------------------------------------------------------------------------------------------

_SGLANG_THRESHOLD = 256
"""SGLang's own ``prefetch_threshold``, where no other is configured."""


_CONFIG = argument("config", metavar="CONFIG", help="the configuration file that the server is given")
_NAME = argument("--served-name", metavar="NAME", help="of the model, where the tiers hold several")
_ROLE = partial(argument, "--role", choices=("prefill", "decode", "both"), help="default: %(default)s")


@command(
    *(_CONFIG, MODEL, one_of(*PROMPTS), _NAME, _ROLE(default="both"), *NAMESPACE),
    examples=("hicache.yaml --tokens tokens.json", "hicache.yaml --prompt prompt.txt --model /models/llama"),
    problem="a page of the KV is missing",
)
def explain_command(arguments: argparse.Namespace) -> int:
    """Explain each prompt; 1 where a page of the KV is missing."""
    document = load_document(arguments.config)
    config = document.hicache_ext.for_role(arguments.role)
    threshold = _SGLANG_THRESHOLD if document.prefetch_threshold is None else document.prefetch_threshold
    model, seed = arguments.served_name, seed_of(arguments)
    explained = [explain(config, tokens, model=model, seed=seed) for tokens in prompts_of(arguments)]
    lines = ["\n\n".join("\n".join(_lines(one, threshold)) for one in explained)]
    show(arguments, [_document(one) for one in explained], lines)
    # Whether some server finds all pages of each prompt's KV.
    whole = (any(c.pool == KV_POOL and c.leading == len(c.hashes) for c in one.chains) for one in explained)
    return 0 if all(whole) else 1


def _lines(explanation: Explanation, threshold: int) -> list[str]:
    lines = [f"prompt of {explanation.tokens} tokens"]
    for chain in explanation.chains:
        pool = chain.document["pool"]
        facts = [shown_text(pool[name]) for name in ("dtype", "layout") if pool.get(name)]
        kind = ", ".join([*facts, f"{chain.page_size} tokens a page"])
        model = shown_text(chain.document["model"]["id"])
        lines += ["", f"identity {chain.digest.hex()[:12]}: {model}, pool {shown_text(chain.pool)} ({kind})"]
        tiers = Counter(place.tier for places in chain.found.values() for place in places)
        for tier, found in sorted(tiers.items()):
            lines.append(f"  {tier}: {found} of {len(chain.hashes)} pages")
        if not chain.found:
            lines.append(f"  none of {len(chain.hashes)} pages in any tier")
        if chain.pool == KV_POOL:
            lines += _kv_lines(explanation, chain, threshold)
        elif chain.found:
            # It may need the last pages of a prefix only, and SGLang alone knows how many.
            lines.append(f"  the last one ends at token {(max(chain.found) + 1) * chain.page_size}")
    lines.append("")
    lines += [f"not asked: {name}: {reason}" for name, reason in explanation.unread.items()]
    if explanation.tokens < threshold:
        lines.append(f"SGLang asks storage for {threshold} tokens or more (prefetch_threshold): this is shorter")
    lines.append(
        f"SGLang stores and restores them only where its host memory holds all {explanation.tokens} tokens "
        "(--hicache-ratio, --hicache-size; through the linker: linker.staging); its log at the start says how many fit"
    )
    return lines if lines[-1] else lines[:-1]


def _kv_lines(explanation: Explanation, chain: Chain, threshold: int) -> list[str]:
    restorable, whole = chain.restorable(explanation.tokens), len(chain.hashes) * chain.page_size
    few = f"; SGLang takes {threshold} or more (prefetch_threshold), or none" if 0 < restorable < threshold else ""
    lines = [f"  {restorable} tokens can be restored, of {whole} in whole pages{few}"]
    if reason := explanation.reason(chain):
        first, last = chain.leading_tokens, chain.leading_tokens + chain.page_size - 1
        lines.append(f"  page {chain.leading + 1} (tokens {first} to {last}) is missing: {reason}")
    return lines


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


@command(
    *(_CONFIG, MODEL, one_of(*PROMPTS), _NAME, _ROLE(default="prefill"), *NAMESPACE),
    argument("--to", metavar="TIER", help="the tier to warm (default: promote_to)"),
    examples=["hicache.yaml --tokens tokens.json"],
    problem="nothing can be warmed, or a page that exists could not be copied",
)
def warm_command(arguments: argparse.Namespace) -> int:
    """Warm and print the result; 1 when a page that exists could not be copied."""
    config = load_config(arguments.config).for_role(arguments.role)
    prompts = prompts_of(arguments)
    started = time.monotonic()
    with progress("pages") as told:
        report = warm_prompts(
            config,
            prompts,
            to=arguments.to,
            model=arguments.served_name,
            seed=seed_of(arguments),
            progress=told,
        )
    seconds = time.monotonic() - started
    counts = dict(report)
    document = {"bytes": counts.pop("payload_bytes"), "seconds": seconds, **counts}
    line = (
        f"{report['fetched']} pages fetched ({rounded_size(report['payload_bytes'])} in {seconds:.1f} s), "
        f"{report['present']} were there, {report['absent']} are nowhere, {report['failed']} failed"
    )
    show(arguments, document, [line])
    return 1 if report["failed"] else 0


# -- hint --------------------------------------------------------------------------------------------------------------


_PAGE_SIZE = argument("--page-size", type=int, help="tokens per page; left out: that of the pages in the directory")


@command(
    argument("action", choices=("retain", "release", "demote"), help="what a request would have asked for"),
    *(_CONFIG, MODEL, one_of(*PROMPTS), _PAGE_SIZE, *NAMESPACE),
    argument("--for", dest="duration", metavar="DURATION", help="retain: such as 10m; left out: 1h"),
    argument("--from-token", type=int, default=0, help="demote: what stands before stays as it is"),
    examples=["retain hicache.yaml --tokens prompt.json --for 10m"],
    problem="it was not followed: too many leases, or nothing there that takes hints",
)
def hint_command(arguments: argparse.Namespace) -> int:
    """Do immediately what a request could ask a server to do (serving/kv_hints.py)."""
    config = load_config(arguments.config)
    size = arguments.page_size or _page_size(_directories(arguments.config))
    seconds = 3600.0 if arguments.duration is None else parse_duration(arguments.duration, "--for")
    action = Action(arguments.action, ttl_seconds=seconds, from_token=arguments.from_token)
    with ExitStack() as opened:
        of_files = [name for name, tier in config.tiers.items() if isinstance(tier, FileTierConfig)]
        tiers = [opened.enter_context(closing(open_tier(name, config.tiers[name]))) for name in of_files]
        hints = KvHints(math.inf, lambda: tiers, lambda: size, lambda _: {}, None)
        for tokens in prompts_of(arguments):
            hints.follow(Said(actions=[action]), tokens, seed_of(arguments))
    counted = hints.metrics.snapshot()
    pages, ignored = (sum(n for (event, _), n in counted.items() if event == name) for name in ("page", "ignored"))
    line = f"{arguments.action}: {pages} pages" if not ignored else f"{arguments.action}: not followed"
    show(arguments, {"action": arguments.action, "pages": pages, "ignored": ignored}, [line])
    return 1 if ignored else 0


# -- pin, unpin, pins --------------------------------------------------------------------------------------------------


_PIN = argument("--name", required=True, help="of the pin: letters, digits, '.', '_' and '-'")
_KEYS = argument("--keys", metavar="FILE", help="page hashes, 64 hex digits a line; '-': standard input")


@command(
    *(TARGET, _PIN, MODEL, one_of(*PROMPTS, _KEYS), _PAGE_SIZE, *NAMESPACE),
    argument("--for", dest="duration", metavar="DURATION", help="such as 7d; left out: until it is unpinned"),
    examples=["hicache.yaml --name system-prompt --tokens prompt.json --for 30d"],
    problem="the directory is none of a file tier, or cannot be changed",
)
def pin_command(arguments: argparse.Namespace) -> int:
    directories = _directories(arguments.target, keys=True)
    seconds = None if arguments.duration is None else parse_duration(arguments.duration, "--for")
    option = next(f"--{name}" for name in ("tokens", "prompt", "keys") if getattr(arguments, name) is not None)
    if option == "--keys":
        hashes = _read_keys(arguments.keys)
    else:
        size = arguments.page_size or _page_size(directories)
        tokens, *others = prompts_of(arguments)
        if others:
            raise ConfigError(option, f"{1 + len(others)} prompts, and a pin is of one")
        try:
            hashes = page_hashes(tokens, size, seed_of(arguments))
        except HicacheExtError as error:
            raise ConfigError(option, str(error)) from None
        if not hashes:
            raise ConfigError(option, f"{len(tokens)} tokens are no whole page of {size}")
    names = {directory: _names(directory, target, hashes) for directory, target in directories.items()}
    for directory, stored_as in names.items():
        try:
            add_pin(directory, arguments.name, stored_as, seconds)
        except OSError as error:
            raise StoreError(f"{str(directory)!r}: {error.strerror or error}") from error
        except ValueError as error:
            raise ConfigError(option, str(error)) from None
    document = {
        "name": arguments.name,
        "pages": len(hashes),
        "seconds": seconds,
        "directories": [str(directory) for directory in directories],
    }
    show(arguments, document, [f"{arguments.name}: {len(hashes)} pages pinned in {', '.join(map(str, directories))}"])
    return 0


@command(TARGET, _PIN, examples=["hicache.yaml --name system-prompt"], problem="there is no such pin")
def unpin_command(arguments: argparse.Namespace) -> int:
    directories = _directories(arguments.target)
    removed = [directory for directory in directories if remove_pin(directory, arguments.name)]
    if not removed:
        known = sorted({shown_text(pin.name) for directory in directories for pin in read_pins(directory)})
        print(f"no pin is named {arguments.name!r}; pins here: {', '.join(known) or 'none'}", file=sys.stderr)
        return 1
    document = {"name": arguments.name, "directories": [str(directory) for directory in removed]}
    show(arguments, document, [f"{arguments.name}: unpinned in {', '.join(map(str, removed))}"])
    return 0


@command(TARGET, examples=["hicache.yaml"], problem="the directory cannot be read")
def pins_command(arguments: argparse.Namespace) -> int:
    pins: dict[str, Pin] = {}
    present: dict[str, int] = {}
    for directory in _directories(arguments.target):
        inspector = open_inspector(directory)
        for pin in read_pins(directory):
            pins[pin.name] = pin
            present[pin.name] = present.get(pin.name, 0) + sum(inspector.occupied_by(pin.hashes))
    document = []
    rows = [("name", "pages", "on disk", "since", "for another")]
    for pin in sorted(pins.values(), key=lambda pin: pin.created):
        count, size = len(pin.hashes), present[pin.name]
        facts = {"name": pin.name, "pages": count, "bytes_on_disk": size, "since": pin.created, "until": pin.until}
        document.append(facts)
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(pin.created))
        left = "for good" if pin.until is None else rough_span(pin.until - time.time())
        rows.append((pin.name, str(count), rounded_size(size), since, left))
    show(arguments, document, fitted(rows))
    return 0


def _directories(named: str, *, keys: bool = False) -> dict[Path, Target]:
    """Return the directories of a configuration's file tiers, or the one that was named. Raises StoreError."""
    found = {directory: target for target in targets(named, keys=keys) for directory in target.directories}
    for directory in found:
        if layout_in(directory) is None:
            raise StoreError(f"{str(directory)!r} is no directory of a file tier: it has neither pages nor slabs")
    return found


def _names(directory: Path, target: Target, hashes: Sequence[bytes]) -> Sequence[bytes]:
    """The names under which pages with these hashes are stored there. Raises ConfigError."""
    if target.tier is None and any(
        document.get(STORED_AS, {}).get("seal") == SealMode.ENCRYPT.name.lower()
        for _, document in documents_in(directory)
    ):
        problem = "pages here are encrypted, and their names hidden"
        raise ConfigError("CONFIG|DIRECTORY", problem, "the configuration file, which names the keys")
    seal = None if target.transforms is None else target.transforms.seal
    return hashes if seal is None else seal.names_of(hashes)


def _page_size(directories: Iterable[Path]) -> int:
    """The page size of all pages here, by the documents of their identities."""
    documents = [document for directory in directories for _, document in documents_in(directory)]
    found = [document.get("pool", {}).get("page_size") for document in documents]
    sizes = sorted({size for size in found if isinstance(size, int) and size > 0})
    if len(sizes) != 1:
        told = ", ".join(map(str, sizes)) or "none"
        raise ConfigError("--page-size", f"required: the directory tells of these page sizes: {told}")
    return sizes[0]


def _read_keys(file: str) -> list[bytes]:
    hashes: list[bytes] = []
    for number, line in enumerate(read_input(file, "--keys").split(), start=1):
        try:
            page_hash = bytes.fromhex(line)
        except ValueError:
            page_hash = b""
        if len(page_hash) != PAGE_HASH_LENGTH:
            raise ConfigError("--keys", f"number {number} is no page hash", "64 hex digits each")
        hashes.append(page_hash)
    return hashes

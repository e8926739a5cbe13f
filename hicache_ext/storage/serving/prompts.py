"""The pages of a prompt in the tiers: warm a node with them, and explain why there is no hit.

For people, routers and cron jobs; needs no SGLang. Identities are read from the documents that file, Redis and object
tiers keep next to their pages; a server writes those of its pools when it starts. A Mooncake tier keeps none.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hicache_ext.config import HicacheExtConfig, TierConfig
from hicache_ext.errors import CommandError, StoreError
from hicache_ext.page.hashes import page_hashes
from hicache_ext.page.identity import KV_POOL, digest_of_document
from hicache_ext.page.recording import MOST_TOKENS
from hicache_ext.page.transforms.forms import Transforms
from hicache_ext.runtime.shown import shown_text
from hicache_ext.storage.contract.abilities import IdentityKeeper, ability
from hicache_ext.storage.contract.registry import open_tier
from hicache_ext.storage.contract.store import GetResult, PageBatch, PageKeys, PageStore
from hicache_ext.storage.contract.transforming.known_forms import stored_keys
from hicache_ext.storage.tiering.tier_use import TieringSettings, tier_use
from hicache_ext.storage.tiering.tiered import TieredStore
from hicache_ext.storage.tiers.file.inspection import open_inspector
from hicache_ext.storage.tiers.file.layouts import IDENTITY_NAME
from hicache_ext.storage.tiers.file.pages.tree import load_document

_PAGES_AT_ONCE = 64
_BYTES_AT_ONCE = 256 << 20
_LARGEST_PAGE = 512 << 20
"""Bytes; the limit of a value in Redis."""

Progress = Callable[[int, int], None]
"""Called with the number of pages done and the total."""


def warm_prompts(
    config: HicacheExtConfig,
    prompts: Sequence[Sequence[int]],
    *,
    to: str | None = None,
    model: str | None = None,
    seed: bytes = b"",
    progress: Progress = lambda done, pages: None,
) -> Counter[str]:
    """Copy the pages of ``prompts`` (token ids) to the tier ``to`` (default: ``promote_to``) from the tiers behind it:
    every page that these have and it lacks, for each of the identities. Of a KV pool only the leading run is copied,
    because nothing behind a gap is ever read; of other pools all pages found.

    ``model``: the served name; needed if the tiers hold several. ``seed``: see page/hashes.py. Return numbers of pages:
    ``present`` before, ``fetched`` now, ``absent`` everywhere, ``failed`` to be read or written; and ``payload_bytes``
    of the fetched. Raises CommandError, StoreError or ConfigError with a sentence.
    """
    target_name, source_names = _route(config, to)
    with ExitStack() as opened:
        stores = [opened.enter_context(closing(open_tier(name, config.tiers[name]))) for name in source_names]
        documents = _known_documents(config, stores, source_names, model)
        source = opened.enter_context(closing(TieredStore(stores, [], settings=TieringSettings(prefetch_buffer=0))))
        target = opened.enter_context(closing(open_tier(target_name, config.tiers[target_name])))
        for digest, document in documents.items():
            target.register_identity(digest, document)
        keys_of_chains = [
            (document["pool"], [digest + page for page in page_hashes(prompt, size, seed)])
            for digest, document in documents.items()
            for size in page_sizes(document, documents)
            for prompt in prompts
        ]
        total = sum(len(keys) for _, keys in keys_of_chains)
        report, done = Counter(present=0, fetched=0, failed=0, payload_bytes=0), 0
        for pool, keys in keys_of_chains:
            page_bytes = sum(pool["segments"])
            at_once = max(1, min(_PAGES_AT_ONCE, _BYTES_AT_ONCE // page_bytes))
            for first in range(0, len(keys), at_once):
                complete = _warm_portion(source, target, keys[first : first + at_once], page_bytes, report)
                progress(done + min(first + at_once, len(keys)), total)
                if not complete and pool["name"] == KV_POOL:
                    break
            done += len(keys)
            progress(done, total)
    report["absent"] = total - report["present"] - report["fetched"] - report["failed"]
    return report


def page_sizes(document: Mapping[str, Any], documents: Mapping[bytes, Mapping[str, Any]]) -> list[int]:
    """Return the tokens per page hash under which an identity's pages are stored. Pages of pools other than KV use the
    hashes of the KV pages, whatever their own size (a Mamba state has one token)."""
    own: list[int] = [document["pool"]["page_size"]]
    if document["pool"]["name"] == KV_POOL:
        return own
    of_model = [other["pool"] for other in documents.values() if other["model"] == document["model"]]
    return sorted({pool["page_size"] for pool in of_model if pool["name"] == KV_POOL}) or own


def _warm_portion(
    source: PageStore, target: PageStore, keys: Sequence[bytes], page_bytes: int, report: Counter[str]
) -> bool:
    """Copy ``keys``; return whether ``target`` has all of them now."""
    missing = [key for key, known in zip(keys, target.contains(keys), strict=True) if not known]
    report["present"] += len(keys) - len(missing)
    if not missing:
        return True
    memory = [bytearray(page_bytes) for _ in missing]
    batch = PageBatch(missing, [[memoryview(page)] for page in memory])
    results = source.get(batch)
    found = [position for position, result in enumerate(results) if result is GetResult.HIT]
    report["failed"] += len(missing) - len(found) - results.count(GetResult.MISS)
    stored = [result.durable for result in target.set(batch.select(found))]
    report["fetched"] += sum(stored)
    report["failed"] += stored.count(False)
    report["payload_bytes"] += sum(stored) * page_bytes
    return sum(stored) == len(missing)


def _known_documents(
    config: HicacheExtConfig,
    opened: Iterable[PageStore],
    names: Iterable[str],
    model: str | None,
    unread: Iterable[str] = (),
) -> dict[bytes, dict[str, Any]]:
    """Return digest -> document of one model's identities known to directories of tiers and to the stores ``opened``.

    Excludes flat tensors and documents that do not match their digest. Raises StoreError; CommandError if the tiers
    ``names`` know none, naming those ``unread``, and if the model is ambiguous.
    """
    keepers = [keeper for store in opened if (keeper := ability(store, IdentityKeeper)) is not None]
    known = [item for keeper in keepers for item in keeper.identities().items()]
    for tier in config.tiers.values():
        for path in tier.directories() if tier.keeps_identities else ():
            known += sorted(documents_in(Path(path)))
    documents = {digest: document for digest, document in known if _describes(document, digest)}
    if not documents:
        silent = ", ".join(
            f"{name} ({config.tiers[name].type})" for name in names if not config.tiers[name].keeps_identities
        )
        because = "".join(f"; {reason}" for reason in (*([f"{silent} keeps none"] if silent else []), *unread))
        raise CommandError(
            f"no tier knows an identity{because}; a server with this configuration writes them when it starts, or copy "
            "PATH/identities of another node's file tier into that of this one"
        )
    return _of_model(documents, model)


def documents_in(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield the identities that a directory knows, each with its document."""
    for file in (path / "identities").glob("*.json"):
        if IDENTITY_NAME.fullmatch(file.stem):
            digest = bytes.fromhex(file.stem)
            if (document := load_document(path, digest)) is not None:
                yield digest, document


def _of_model(documents: Mapping[bytes, dict[str, Any]], model: str | None) -> dict[bytes, dict[str, Any]]:
    """Return the identities of one model. Raises CommandError if the model is ambiguous."""
    names = {digest: str(document["model"]["id"]) for digest, document in documents.items()}
    models = ", ".join(sorted({shown_text(name) for name in names.values()}))
    if model is None and len(set(names.values())) > 1:
        raise CommandError(f"the tiers hold pages of several models; say which with --served-name: {models}")
    chosen = {
        digest: documents[digest]
        for digest, name in names.items()
        if model is None or model in (name, shown_text(name))
    }
    if not chosen:
        raise CommandError(f"no tier knows the model {model!r}; known: {models}")
    return chosen


def _describes(document: Mapping[str, Any], digest: bytes) -> bool:
    """Return whether a document, which anybody may have written, belongs to this digest and has the fields we need;
    flat tensors have no page size."""
    pool, model = document.get("pool"), document.get("model")
    if not isinstance(pool, dict) or not isinstance(model, dict) or "id" not in model or "name" not in pool:
        return False
    segments, page_size = pool.get("segments"), pool.get("page_size")
    if not isinstance(segments, list) or not all(isinstance(size, int) and size > 0 for size in segments):
        return False
    if not (0 < sum(segments) <= _LARGEST_PAGE and isinstance(page_size, int) and 0 < page_size <= MOST_TOKENS):
        return False
    return digest_of_document(document) == digest


def _route(config: HicacheExtConfig, to: str | None) -> tuple[str, list[str]]:
    """Return the tier to warm, and the tiers behind it."""
    locations = list(config.retrieve_locations)
    if not locations:
        raise CommandError("retrieve_locations is empty: a server with this configuration reads nothing")
    target = to or tier_use(config).promote_to or locations[0]
    if target not in locations:
        raise CommandError(f"tier {target!r} is not in retrieve_locations, so that nothing would ever read it there")
    behind = locations[locations.index(target) + 1 :]
    if not behind:
        raise CommandError(f"no tier stands behind {target!r} in retrieve_locations, from which its pages could come")
    return target, behind


# -- why is there no hit? ----------------------------------------------------------------------------------------------
#
# Where the pages of one prompt are, how old they are, and why the first missing one is missing. A directory of the file
# tier is only looked at (inspection.py); other tiers are opened and asked whether they have the pages.


@dataclass(frozen=True, slots=True)
class Found:
    """A page in a tier. Times are wall-clock seconds, None if the tier does not report them."""

    tier: str
    written: float | None = None
    used: float | None = None


@dataclass(slots=True)
class Chain:
    """The pages of the prompt under one identity: of one pool, shard and set of weights."""

    digest: bytes
    document: dict[str, Any]
    hashes: list[bytes]
    page_size: int
    """Tokens."""
    found: dict[int, list[Found]] = field(default_factory=dict)
    """Position of a page -> tiers that have it."""
    evicted: set[int] = field(default_factory=set)
    """Positions of pages that servers remember having evicted."""

    @property
    def pool(self) -> str:
        return str(self.document["pool"]["name"])

    @property
    def leading(self) -> int:
        """Number of pages before the first that no tier has."""
        return next((page for page in range(len(self.hashes)) if page not in self.found), len(self.hashes))

    @property
    def leading_tokens(self) -> int:
        """Tokens in these pages."""
        return self.leading * self.page_size

    def restorable(self, tokens: int) -> int:
        """Return how many tokens of a prompt of ``tokens`` can be restored; its last one is always computed."""
        return min(self.leading, max(0, tokens - 1) // self.page_size) * self.page_size


@dataclass(frozen=True, slots=True)
class Explanation:
    """Where the pages of one prompt are."""

    tokens: int
    chains: list[Chain]
    """Sorted: KV first, most pages first."""
    unread: dict[str, str]
    """Tier or directory -> why it could not be asked."""

    def reason(self, chain: Chain) -> str:
        """Return why the first missing page of a chain is missing; empty if none is."""
        page = chain.leading
        if page >= len(chain.hashes):
            return ""
        if page in chain.evicted:
            return "it was evicted: the capacity is too small for what was used since"
        others = [other for other in self.chains if other.pool == chain.pool and other is not chain]
        there = [other for other in others if page in other.found and other.hashes[page] == chain.hashes[page]]
        if there:
            different = "; ".join(sorted({_difference(chain.document, other.document) for other in there}))
            return f"it is there under another identity: {different}"
        if any(later > page for later in chain.found):
            return "pages after it are there, so it was there, too: evicted, cleared, expired or removed as damaged"
        if self.unread:
            return "no tier that could be asked has it"
        return "never written, or evicted, cleared or expired since: no tier remembers it"


def explain(
    config: HicacheExtConfig, tokens: Sequence[int], *, model: str | None = None, seed: bytes = b""
) -> Explanation:
    """Look for the pages of a prompt (token ids) in the tiers that pages are retrieved from, or else stored to.

    ``model``: the served name; needed if the tiers hold several. ``seed``: see page/hashes.py. Raises CommandError
    or StoreError with a sentence if no identity is known.
    """
    # A node that reads nothing, as decode nodes do, writes for others.
    tiers = {name: config.tiers[name] for name in config.retrieve_locations or config.store_locations}
    opened: dict[str, PageStore] = {}
    unread: dict[str, str] = {}
    with ExitStack() as stores:
        for name, tier in tiers.items():
            if not tier.directories():
                try:
                    # Required, so that an unreachable tier raises instead of answering that it has nothing.
                    store = open_tier(name, tier.model_copy(update={"required": True}))
                    opened[name] = stores.enter_context(closing(store))
                except StoreError as error:
                    unread[name] = str(error)
        of_model = _known_documents(config, opened.values(), tiers, model, unread.values())
        sizes = {digest: page_sizes(document, of_model) for digest, document in of_model.items()}
        # Ranks and pools of one page size have the same hashes.
        hashes = {size: page_hashes(tokens, size, seed) for size in set(itertools.chain.from_iterable(sizes.values()))}
        chains = [
            Chain(digest, document, hashes[size], size)
            for digest, document in of_model.items()
            for size in sizes[digest]
        ]
        for name, tier in tiers.items():
            if name in opened:
                _ask(name, opened[name], chains)
                if trouble := _trouble_of(opened[name]):
                    unread[name] = f"it could not answer ({trouble})"
            else:
                unread |= _look(name, tier, chains)
    chains.sort(key=lambda chain: (chain.pool != KV_POOL, -chain.leading, -len(chain.found), chain.digest))
    return Explanation(len(tokens), chains, unread)


def _ask(name: str, store: PageStore, chains: Sequence[Chain]) -> None:
    for chain in chains:
        keys = [chain.digest + page for page in chain.hashes]
        for position, there in enumerate(store.contains(keys) if keys else ()):
            if there:
                chain.found.setdefault(position, []).append(Found(name))


def _trouble_of(store: PageStore) -> str:
    """Return the failures counted during the look-ups: a tier in trouble answers that it has no page."""
    return ", ".join(event for event in ("error", "timeout", "rejected") if store.metrics.total(event))


def _look(name: str, tier: TierConfig, chains: Sequence[Chain]) -> dict[str, str]:
    """Look into the directories of a file tier; return those that cannot be read, and why."""
    unread: dict[str, str] = {}
    places = _stored_places(tier.transforms(name), chains)
    for directory in tier.directories():
        try:
            inspector = open_inspector(Path(directory))
            for page in inspector.pages():
                place = places.get(page.key)
                if place is not None:
                    place[0].found.setdefault(place[1], []).append(Found(name, page.written, page.used))
            for key in inspector.evicted([key for key, (chain, at) in places.items() if at not in chain.found]):
                chain, at = places[key]
                chain.evicted.add(at)
        except StoreError as error:
            unread[directory] = str(error)
    return unread


def _stored_places(transforms: Transforms | None, chains: Sequence[Chain]) -> dict[bytes, tuple[Chain, int]]:
    """Return the keys under which the pages of these chains are stored, in each of their forms."""
    if transforms is None:
        return {chain.digest + page: (chain, at) for chain in chains for at, page in enumerate(chain.hashes)}
    return {
        key: (chain, at)
        for chain in chains
        for form in transforms.forms(chain.digest, chain.document).all
        for at, key in enumerate(stored_keys(form, PageKeys.of_joined(chain.digest, b"".join(chain.hashes))))
    }


def _difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Describe the facts in which two identities differ, with both values."""
    here, there = dict(_flat(one)), dict(_flat(other))
    names = [name for name in sorted({*here, *there}) if here.get(name) != there.get(name)]
    return ", ".join(
        f"{shown_text(name)} is {shown_text(repr(here.get(name)))} here and {shown_text(repr(there.get(name)))} there"
        for name in names
    )


def _flat(document: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in document.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value

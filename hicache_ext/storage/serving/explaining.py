"""Why is there no hit? Where the pages of one prompt are, how old they are, and why the first missing one is missing.

For people; needs no SGLang. A directory of the file tier is only looked at (inspection.py); other tiers are opened and
asked whether they have the pages. Identities come from the documents that tiers keep, as for ``warm``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hicache_ext.config import HicacheExtConfig, TierConfig
from hicache_ext.errors import StoreError
from hicache_ext.page.hashes import page_hashes
from hicache_ext.page.identity import KV_POOL
from hicache_ext.page.transforms.forms import Transforms
from hicache_ext.runtime.shown import shown_text
from hicache_ext.storage.contract.registry import open_tier
from hicache_ext.storage.contract.store import PageKeys, PageStore
from hicache_ext.storage.contract.transforming.known_forms import stored_keys
from hicache_ext.storage.serving.warming import choose_model, known_identities, no_identity, page_sizes
from hicache_ext.storage.tiers.file.inspection import open_inspector


@dataclass(frozen=True, slots=True)
class Found:
    """A page in a tier. Times are wall-clock seconds, None where the tier does not tell them."""

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
    """Position of a page -> where it is."""
    evicted: set[int] = field(default_factory=set)
    """Positions of pages that servers remember to have evicted."""

    @property
    def pool(self) -> str:
        return str(self.document["pool"]["name"])

    @property
    def leading(self) -> int:
        """Pages up to the first that no tier has."""
        return next((page for page in range(len(self.hashes)) if page not in self.found), len(self.hashes))

    @property
    def leading_tokens(self) -> int:
        """Tokens in these pages."""
        return self.leading * self.page_size

    def restorable(self, tokens: int) -> int:
        """Those that can be restored of a prompt of so many: its last one is always computed."""
        return min(self.leading, max(0, tokens - 1) // self.page_size) * self.page_size


@dataclass(frozen=True, slots=True)
class Explanation:
    """Of one prompt."""

    tokens: int
    chains: list[Chain]
    """KV first, the most pages first."""
    unread: dict[str, str]
    """Tier or directory -> why it could not be asked."""

    def reason(self, chain: Chain) -> str:
        """Why the first missing page of a chain is missing; empty where none is."""
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

    ``model``: the served name; needed where the tiers hold several. ``seed``: see page/hashes.py. Raises WarmError or
    StoreError with a sentence where no identity is known.
    """
    # A node that reads nothing, as decode nodes do, writes for others.
    tiers = {name: config.tiers[name] for name in config.retrieve_locations or config.store_locations}
    opened: dict[str, PageStore] = {}
    unread: dict[str, str] = {}
    try:
        for name, tier in tiers.items():
            if not tier.directories():
                try:
                    # Required: one that is not there is to say so, and not to answer that it has nothing.
                    opened[name] = open_tier(name, tier.model_copy(update={"required": True}))
                except StoreError as error:
                    unread[name] = str(error)
        documents = known_identities(config, list(opened.values()))
        if not documents:
            raise no_identity(config, tiers, unread.values())
        of_model = choose_model(documents, model)
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
    finally:
        for store in opened.values():
            store.close()
    chains.sort(key=lambda chain: (chain.pool != KV_POOL, -chain.leading, -len(chain.found), chain.digest))
    return Explanation(len(tokens), chains, unread)


def _ask(name: str, store: PageStore, chains: Sequence[Chain]) -> None:
    for chain in chains:
        keys = [chain.digest + page for page in chain.hashes]
        for position, there in enumerate(store.contains(keys) if keys else ()):
            if there:
                chain.found.setdefault(position, []).append(Found(name))


def _trouble_of(store: PageStore) -> str:
    """What was counted while it was asked: a tier in trouble answers that it has no page."""
    return ", ".join(event for event in ("error", "timeout", "rejected") if store.metrics.total(event))


def _look(name: str, tier: TierConfig, chains: Sequence[Chain]) -> dict[str, str]:
    """Look into the directories of a file tier; those that cannot be read, and why."""
    unread: dict[str, str] = {}
    places = _stored_places(tier.transforms(name), chains)
    for directory in tier.directories():
        try:
            with closing(open_inspector(Path(directory))) as inspector:
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
    """The keys under which the pages of these chains are stored, in each of their forms."""
    if transforms is None:
        return {chain.digest + page: (chain, at) for chain in chains for at, page in enumerate(chain.hashes)}
    return {
        key: (chain, at)
        for chain in chains
        for form in transforms.forms(chain.digest, chain.document).all
        for at, key in enumerate(stored_keys(form, PageKeys.of_joined(chain.digest, b"".join(chain.hashes))))
    }


def _difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """The facts in which two identities differ, and both values."""
    its, of_other = dict(_flat(one)), dict(_flat(other))
    names = [name for name in sorted({*its, *of_other}) if its.get(name) != of_other.get(name)]
    return ", ".join(
        f"{shown_text(name)} is {shown_text(repr(its.get(name)))} here and {shown_text(repr(of_other.get(name)))} there"
        for name in names
    )


def _flat(document: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in document.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value

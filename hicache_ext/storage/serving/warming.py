"""Warming a node: the pages of a prompt are copied from far tiers to a near one, before any request asks.

For a router or a cron job; needs no SGLang. Identities are read from the documents that file, Redis and object tiers
keep beside their pages; a server writes those of its pools when it starts. A Mooncake tier keeps none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hicache_ext.config import HicacheExtConfig
from hicache_ext.errors import WarmError
from hicache_ext.page.hashes import page_hashes
from hicache_ext.page.identity import KV_POOL, digest_of_document
from hicache_ext.page.recording import MOST_TOKENS
from hicache_ext.runtime.shown import shown_text
from hicache_ext.storage.contract.abilities import IdentityKeeper, ability
from hicache_ext.storage.contract.registry import open_tier
from hicache_ext.storage.contract.store import GetResult, PageBatch, PageStore
from hicache_ext.storage.tiering.tier_use import TieringSettings, tier_use
from hicache_ext.storage.tiering.tiered import TieredStore
from hicache_ext.storage.tiers.file.pages.tree import load_document

_PAGES_AT_ONCE = 64
_BYTES_AT_ONCE = 256 << 20
_LARGEST_PAGE = 512 << 20
"""Bytes; Redis' own limit of a value."""

Progress = Callable[[int, int], None]
"""Called with the number of pages done, and of all pages."""


@dataclass(slots=True)
class WarmReport:
    """Numbers of pages: ``present`` before, ``fetched`` now, ``absent`` everywhere, ``failed`` to be read or written.
    ``payload_bytes``: of the fetched."""

    present: int = 0
    fetched: int = 0
    absent: int = 0
    failed: int = 0
    payload_bytes: int = 0

    @property
    def pages(self) -> int:
        return self.present + self.fetched + self.absent + self.failed


def warm_prompts(
    config: HicacheExtConfig,
    prompts: Sequence[Sequence[int]],
    *,
    to: str | None = None,
    model: str | None = None,
    seed: bytes = b"",
    progress: Progress = lambda done, pages: None,
) -> WarmReport:
    """Bring the pages of ``prompts`` (token ids) to the tier ``to`` (default: ``promote_to``) from the tiers behind it.

    ``model``: the served name; needed where the tiers hold several. ``seed``: see page/hashes.py.
    Raises WarmError, StoreError or ConfigError with a sentence.
    """
    target_name, source_names = _route(config, to)
    opened: list[PageStore] = []
    try:
        opened += [open_tier(name, config.tiers[name]) for name in source_names]
        documents = known_identities(config, opened)
        if not documents:
            raise no_identity(config, source_names)
        documents = choose_model(documents, model)
        sources = TieredStore(opened, [], settings=TieringSettings(prefetch_buffer=0))
        target = open_tier(target_name, config.tiers[target_name])
        opened.append(target)
        for digest, document in documents.items():
            target.register_identity(digest, document)
        try:
            return warm(sources, target, documents, prompts, seed=seed, progress=progress)
        finally:
            sources.close()
    finally:
        for store in opened:
            store.close()


def warm(
    source: PageStore,
    target: PageStore,
    documents: Mapping[bytes, Mapping[str, Any]],
    prompts: Sequence[Sequence[int]],
    *,
    seed: bytes = b"",
    progress: Progress = lambda done, pages: None,
) -> WarmReport:
    """Copy every page of ``prompts`` that ``source`` has and ``target`` lacks, for each of the identities.

    Of a KV pool the leading run only: nothing behind a gap is ever read. Of other pools all pages found.
    """
    keys_of_chains = [
        (document["pool"], [digest + page for page in page_hashes(prompt, size, seed)])
        for digest, document in documents.items()
        for size in page_sizes(document, documents)
        for prompt in prompts
    ]
    total = sum(len(keys) for _, keys in keys_of_chains)
    report = WarmReport()
    for pool, keys in keys_of_chains:
        done = report.pages
        page_bytes = sum(pool["segments"])
        at_once = max(1, min(_PAGES_AT_ONCE, _BYTES_AT_ONCE // page_bytes))
        for first in range(0, len(keys), at_once):
            complete = _warm_portion(source, target, keys[first : first + at_once], page_bytes, report)
            progress(report.pages, total)
            if not complete and pool["name"] == KV_POOL:
                break
        report.absent += len(keys) - (report.pages - done)
        progress(report.pages, total)
    return report


def page_sizes(document: Mapping[str, Any], documents: Mapping[bytes, Mapping[str, Any]]) -> list[int]:
    """Tokens per page hash under which the pages of an identity are kept. Those beside the KV are kept under the hashes
    of its pages, whatever their own size (a Mamba state is of one token)."""
    own: list[int] = [document["pool"]["page_size"]]
    if document["pool"]["name"] == KV_POOL:
        return own
    of_model = [other["pool"] for other in documents.values() if other["model"] == document["model"]]
    return sorted({pool["page_size"] for pool in of_model if pool["name"] == KV_POOL}) or own


def _warm_portion(
    source: PageStore, target: PageStore, keys: Sequence[bytes], page_bytes: int, report: WarmReport
) -> bool:
    """Copy ``keys``; whether ``target`` has all of them now."""
    missing = [key for key, known in zip(keys, target.contains(keys), strict=True) if not known]
    report.present += len(keys) - len(missing)
    if not missing:
        return True
    memory = [bytearray(page_bytes) for _ in missing]
    batch = PageBatch(missing, [[memoryview(page)] for page in memory])
    found: list[int] = []
    for position, result in enumerate(source.get(batch)):
        if result is GetResult.HIT:
            found.append(position)
        elif result is GetResult.MISS:
            report.absent += 1
        else:
            report.failed += 1
    stored = [result.durable for result in target.set(batch.select(found))]
    report.fetched += sum(stored)
    report.failed += stored.count(False)
    report.payload_bytes += sum(stored) * page_bytes
    return sum(stored) == len(missing)


def known_identities(config: HicacheExtConfig, opened: Sequence[PageStore] = ()) -> dict[bytes, dict[str, Any]]:
    """Digest -> document of every identity recorded in the directories of tiers and in the stores ``opened``.

    Without flat tensors, and without documents that do not fit their digest. Raises StoreError.
    """
    documents: dict[bytes, dict[str, Any]] = {}
    for store in opened:
        if (keeper := ability(store, IdentityKeeper)) is not None:
            documents |= {
                digest: document for digest, document in keeper.identities().items() if _describes(document, digest)
            }
    for tier in config.tiers.values():
        for path in tier.directories() if tier.keeps_identities else ():
            for file in sorted(Path(path).glob("identities/*.json")):
                try:
                    digest = bytes.fromhex(file.stem)
                except ValueError:
                    continue
                document = load_document(Path(path), digest)
                if document is not None and _describes(document, digest):
                    documents[digest] = document
    return documents


def no_identity(config: HicacheExtConfig, tiers: Iterable[str], unread: Iterable[str] = ()) -> WarmError:
    """The error where these tiers know no identity: why, as far as that is known, and what to do."""
    silent = ", ".join(
        f"{name} ({config.tiers[name].type})" for name in tiers if not config.tiers[name].keeps_identities
    )
    because = "".join(f"; {reason}" for reason in (*([f"{silent} keeps none"] if silent else []), *unread))
    return WarmError(
        f"no tier knows an identity{because}; a server with this configuration writes them when it starts, or copy "
        "PATH/identities of another node's file tier into that of this one"
    )


def choose_model(documents: Mapping[bytes, dict[str, Any]], model: str | None) -> dict[bytes, dict[str, Any]]:
    """The identities of one model. Raises WarmError if it is not clear which model."""
    names = {digest: str(document["model"]["id"]) for digest, document in documents.items()}
    models = ", ".join(sorted({shown_text(name) for name in names.values()}))
    if model is None and len(set(names.values())) > 1:
        raise WarmError(f"the tiers hold pages of several models; say which with --served-name: {models}")
    chosen = {
        digest: documents[digest]
        for digest, name in names.items()
        if model is None or model in (name, shown_text(name))
    }
    if not chosen:
        raise WarmError(f"no tier knows the model {model!r}; known: {models}")
    return chosen


def _describes(document: Mapping[str, Any], digest: bytes) -> bool:
    return _is_usable(document) and digest_of_document(document) == digest


def _is_usable(document: Mapping[str, Any]) -> bool:
    """Whether a document, which anybody may have written, has what is needed; flat tensors have no page size."""
    pool, model = document.get("pool"), document.get("model")
    if not isinstance(pool, dict) or not isinstance(model, dict) or "id" not in model or "name" not in pool:
        return False
    segments, page_size = pool.get("segments"), pool.get("page_size")
    if not isinstance(segments, list) or not all(isinstance(size, int) and size > 0 for size in segments):
        return False
    return 0 < sum(segments) <= _LARGEST_PAGE and isinstance(page_size, int) and 0 < page_size <= MOST_TOKENS


def _route(config: HicacheExtConfig, to: str | None) -> tuple[str, list[str]]:
    """The tier to warm, and the tiers behind it."""
    locations = list(config.retrieve_locations)
    if not locations:
        raise WarmError("retrieve_locations is empty: a server with this configuration reads nothing")
    target = to or tier_use(config).promote_to or locations[0]
    if target not in locations:
        raise WarmError(f"tier {target!r} is not in retrieve_locations, so that nothing would ever read it there")
    behind = locations[locations.index(target) + 1 :]
    if not behind:
        raise WarmError(f"no tier stands behind {target!r} in retrieve_locations, from which its pages could come")
    return target, behind

"""Warming a node: the pages of a prompt are brought from outer tiers to a nearer one, before any request asks.

For a router or a cron job; needs no SGLang. Which identities there are is read from the documents that file tiers keep
beside their pages: a server writes those of its pools when it starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hicache_ext.config import FileTierConfig, HicacheExtConfig
from hicache_ext.errors import HicacheExtError
from hicache_ext.page_hashes import page_hashes
from hicache_ext.storage.file.directory import load_document
from hicache_ext.storage.prefetch import PrefetchSettings
from hicache_ext.storage.registry import open_tier
from hicache_ext.storage.store import GetResult, PageBatch, PageStore
from hicache_ext.storage.tiered import TieredStore, TieringSettings

_PAGES_AT_ONCE = 64
_KV = "kv"

Progress = Callable[[int, int], None]
"""Called with the pages done and the pages there are."""


class WarmError(HicacheExtError):
    """Nothing can be warmed, and why."""


@dataclass(slots=True)
class WarmReport:
    """What became of the pages: ``present`` were there, ``fetched`` are now, ``absent`` are nowhere, ``failed`` were
    found and could not be read or written. ``payload_bytes`` of the fetched."""

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

    ``model`` is the name under which it is served; needed where the tiers hold several. ``seed``: see page_hashes.py.
    Raises WarmError, StoreSetupError or ConfigError with a sentence.
    """
    target_name, source_names = _route(config, to)
    documents = choose_model(known_identities(config), model)
    opened: list[PageStore] = []
    try:
        opened += [open_tier(name, config.tiers[name]) for name in source_names]
        sources = TieredStore(opened, [], settings=TieringSettings(prefetch=PrefetchSettings(buffer=0)))
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

    Of a KV pool the leading run alone: behind a gap nothing is ever read. Of other pools whatever is there.
    """
    chains = [(digest, document["pool"], prompt) for digest, document in documents.items() for prompt in prompts]
    keys_of_chains = [
        (pool, [digest + page for page in page_hashes(prompt, pool["page_size"], seed)])
        for digest, pool, prompt in chains
    ]
    total = sum(len(keys) for _, keys in keys_of_chains)
    report = WarmReport()
    for pool, keys in keys_of_chains:
        done = report.pages
        for first in range(0, len(keys), _PAGES_AT_ONCE):
            portion = keys[first : first + _PAGES_AT_ONCE]
            complete = _warm_portion(source, target, portion, sum(pool["segments"]), report)
            progress(report.pages, total)
            if not complete and pool["name"] == _KV:
                break
        report.absent += len(keys) - (report.pages - done)
        progress(report.pages, total)
    return report


def _warm_portion(
    source: PageStore, target: PageStore, keys: Sequence[bytes], page_bytes: int, report: WarmReport
) -> bool:
    """Whether ``target`` has all of ``keys`` now."""
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


def known_identities(config: HicacheExtConfig) -> dict[bytes, dict[str, Any]]:
    """Digest -> document of every identity recorded in the directories of file tiers; flat tensors left out."""
    documents: dict[bytes, dict[str, Any]] = {}
    for tier in config.tiers.values():
        if not isinstance(tier, FileTierConfig):
            continue
        for path in tier.path:
            for file in sorted(Path(path).glob("identities/*.json")):
                try:
                    digest = bytes.fromhex(file.stem)
                except ValueError:
                    continue
                document = load_document(Path(path), digest)
                if document is not None and _is_usable(document):
                    documents[digest] = document
    return documents


def choose_model(documents: Mapping[bytes, dict[str, Any]], model: str | None) -> dict[bytes, dict[str, Any]]:
    """The identities of one model. Raises WarmError where it is not clear which."""
    models = sorted({str(document["model"]["id"]) for document in documents.values()})
    if not models:
        raise WarmError(
            "no file tier of this node has an identity document; start a server with this configuration once"
        )
    if model is None and len(models) > 1:
        raise WarmError(f"the tiers hold pages of several models; say which with --served-name: {', '.join(models)}")
    if model is not None and model not in models:
        raise WarmError(f"no tier of this node knows the model {model!r}; known: {', '.join(models)}")
    chosen = model or models[0]
    return {digest: document for digest, document in documents.items() if document["model"]["id"] == chosen}


def _is_usable(document: Mapping[str, Any]) -> bool:
    """Whether a file that anybody may have put there has what is needed; flat tensors have no size of their own."""
    pool, model = document.get("pool"), document.get("model")
    if not isinstance(pool, dict) or not isinstance(model, dict) or "id" not in model or "name" not in pool:
        return False
    segments, page_size = pool.get("segments"), pool.get("page_size")
    sizes_are_numbers = isinstance(segments, list) and all(isinstance(size, int) and size > 0 for size in segments)
    return bool(sizes_are_numbers and segments and isinstance(page_size, int) and page_size > 0)


def _route(config: HicacheExtConfig, to: str | None) -> tuple[str, list[str]]:
    """The tier to warm and the tiers behind it."""
    locations = list(config.retrieve_locations)
    target = to or config.promote_to or (locations[0] if locations else "")
    if target not in locations:
        raise WarmError(f"tier {target!r} is not in retrieve_locations, so that nothing would ever read it there")
    behind = locations[locations.index(target) + 1 :]
    if not behind:
        raise WarmError(f"no tier stands behind {target!r} in retrieve_locations, from which its pages could come")
    return target, behind

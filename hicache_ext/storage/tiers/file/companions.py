"""Which pages are of no use without which: those beside the KV of a prefix position (index keys, a state, a draft),
without the KV page of it.

Of the identities in one directory, by the documents that it keeps of them. A page beside the KV takes no KV page with
it: there may be another state of the prefix, and how many a request needs only SGLang knows. Reasons and figures:
docs/decisions/pools-share-a-fate.md.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hicache_ext.page.identity import KV_POOL
from hicache_ext.storage.tiers.file.pages.tree import load_document

_MISSING_INTERVAL = 10.0
"""Seconds between two looks for documents that were missing."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What the relation needs of an identity's document."""

    model: str
    """As JSON."""
    is_kv: bool
    ways: tuple[int, ...]
    """Of how many ranks each parallel coordinate is."""

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Facts | None:
        """None for a document that does not tell them."""
        model, pool, shard = (document.get(part) for part in ("model", "pool", "shard"))
        if not (isinstance(model, dict) and isinstance(pool, dict) and isinstance(shard, dict)):
            return None
        try:
            ways = tuple(int(shard[name][1]) for name in sorted(shard))
        except (TypeError, ValueError, LookupError):
            return None
        return cls(json.dumps(model, sort_keys=True), pool.get("name") == KV_POOL, ways)

    def needs(self, kv: Facts) -> bool:
        """Whether pages of this identity are of no use without the pages of ``kv`` under the same page hashes."""
        if self.is_kv or not kv.is_kv or self.model != kv.model or len(self.ways) != len(kv.ways):
            return False
        # Any rank: they store the same positions. What is replicated has one: a latent KV beside a draft of several.
        return all(own == its or 1 in (own, its) for own, its in zip(self.ways, kv.ways, strict=True))


class Companions:
    """Of the identities in one directory. Thread-safe."""

    def __init__(self, path: Path) -> None:
        """Reads nothing yet."""
        self._path = path
        self._lock = threading.Lock()
        self._identities: Collection[bytes] = ()
        self._facts: dict[bytes, Facts] = {}
        self._unknown: set[bytes] = set()
        self._looked = 0.0
        self._of: Mapping[bytes, Sequence[bytes]] = {}

    def of(self, identities: Collection[bytes]) -> Mapping[bytes, Sequence[bytes]]:
        """For each identity of KV those whose pages need its pages. Reads documents of new identities: another object
        with those of earlier calls and more. Answers with the same object as before where nothing is new."""
        with self._lock:
            is_due = self._unknown and time.monotonic() - self._looked >= _MISSING_INTERVAL
            if identities is not self._identities or is_due:
                self._identities = identities
                self._look([digest for digest in identities if digest not in self._facts])
            return self._of

    def _look(self, digests: Sequence[bytes]) -> None:
        self._looked = time.monotonic()
        before = len(self._facts)
        for digest in digests:
            document = load_document(self._path, digest)
            if document is not None and (facts := Facts.of(document)) is not None:
                self._facts[digest] = facts
                self._unknown.discard(digest)
            else:
                self._unknown.add(digest)
        if len(self._facts) == before:
            return
        families: defaultdict[str, list[bytes]] = defaultdict(list)
        for digest, facts in self._facts.items():
            families[facts.model].append(digest)
        self._of = {
            kv: [other for other in family if other != kv and self._facts[other].needs(self._facts[kv])]
            for family in families.values()
            for kv in family
            if self._facts[kv].is_kv
        }

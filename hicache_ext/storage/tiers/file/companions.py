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
_AT_ONCE = 256
"""Documents that one call reads: a write waits for them."""


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
            return cls(json.dumps(model, sort_keys=True), pool.get("name") == KV_POOL, ways)
        except (TypeError, ValueError, LookupError, ArithmeticError, RecursionError):
            # Anybody may have written it.
            return None

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
        self._seen: set[bytes] = set()
        self._new: list[bytes] = []
        self._unknown: list[bytes] = []
        """Without a document that says enough."""
        self._looked = 0.0
        self._families: defaultdict[str, dict[bytes, Facts]] = defaultdict(dict)
        """By model."""
        self._of: Mapping[bytes, Sequence[bytes]] = {}

    def of(self, identities: Collection[bytes]) -> Mapping[bytes, Sequence[bytes]]:
        """For each identity of KV those whose pages need its pages. Reads documents of new identities, a few a call.
        ``identities``: another object where there are more than before. Answers with the same object as before where
        nothing is new."""
        with self._lock:
            if identities is not self._identities:
                self._new += [digest for digest in identities if digest not in self._seen]
                self._seen.update(self._new)
                self._identities = identities
            if self._unknown and time.monotonic() - self._looked >= _MISSING_INTERVAL:
                self._new += self._unknown
                self._unknown = []
            if self._new:
                self._looked = time.monotonic()
                some, self._new = self._new[:_AT_ONCE], self._new[_AT_ONCE:]
                self._look(some)
            return self._of

    def _look(self, digests: Sequence[bytes]) -> None:
        changed = dict(self._of)
        for digest in digests:
            document = load_document(self._path, digest)
            facts = None if document is None else Facts.of(document)
            if facts is None:
                self._unknown.append(digest)
                continue
            family = self._families[facts.model]
            if facts.is_kv:
                changed[digest] = [other for other, its in family.items() if its.needs(facts)]
            for kv, its in family.items():
                if facts.needs(its):
                    changed[kv] = [*changed[kv], digest]
            family[digest] = facts
        if changed != self._of:
            self._of = changed

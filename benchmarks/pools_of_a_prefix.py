"""Two pools of the same prefixes in one slab tier that is too small: how much of the KV in it can be restored.

``python -m benchmarks.pools_of_a_prefix`` takes minutes. Chains of 48 KV pages of 8 KiB are asked for and written by
popularity (Zipf, 0.8), beside each either one state at its end (TRAILING_PAGES) or an index page for each page
(ALL_PAGES). A prefix counts as far as both pools have what their policy asks for. docs/decisions/pools-share-a-fate.md.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import tempfile
from dataclasses import dataclass
from unittest import mock

import numpy as np

from hicache_ext.config import load_config
from hicache_ext.page.identity import ModelIdentity, PageIdentity, PoolIdentity, Shard
from hicache_ext.storage.opening import open_tiers
from hicache_ext.storage.store import PageBatch, PageStore
from hicache_ext.storage.tiers.file.slab import allocator

PAGES, CHAINS, ROUNDS = 48, 400, 3000
KV_BYTES, STATE_BYTES, INDEX_BYTES = 8 << 10, 64 << 10, 2 << 10
CAPACITY = "48MiB"


@dataclass(frozen=True, slots=True)
class Shares:
    """Of the pages asked for in the second half of the run."""

    kv: float
    """In leading runs of KV."""
    usable: float
    """In prefixes that both pools can restore."""


def measure(*, trailing: bool, slabs: int, rounds: int = ROUNDS) -> Shares:
    """``slabs``: of how many slabs the capacity is; 16 below 16 GiB, up to 1,024 above."""
    with tempfile.TemporaryDirectory() as directory, mock.patch.object(allocator, "_SLABS_AT_CAPACITY", slabs):
        tier = {"type": "file", "path": directory, "capacity": CAPACITY, "layout": "slab", "io": "buffered"}
        loading = {"interface_v1": 1, "backend_name": "hicache_ext", "class_name": "HiCacheExtBackend"}
        loading["module_path"] = "hicache_ext.storage.backend"
        store = open_tiers(load_config({**loading, "hicache_ext": {"tiers": {"disk": tier}}}))
        try:
            return _replay(store, trailing, rounds)
        finally:
            store.close()


def _replay(store: PageStore, trailing: bool, rounds: int) -> Shares:
    beside_bytes = STATE_BYTES if trailing else INDEX_BYTES
    kv, beside = (
        PageIdentity(ModelIdentity("m"), PoolIdentity(name, "", "", "", 16, (size,)), Shard())
        for name, size in (("kv", KV_BYTES), ("beside", beside_bytes))
    )
    for identity in (kv, beside):
        store.register_identity(identity.digest(), identity.document())
    segment = memoryview(np.zeros(max(KV_BYTES, beside_bytes), np.uint8))

    def batch(identity: PageIdentity, hashes: list[bytes], size: int) -> PageBatch:
        return PageBatch([identity.digest() + page for page in hashes], [(segment[:size],)] * len(hashes))

    chains = [_chain(number) for number in range(CHAINS)]
    popularity, chosen = [1 / (rank + 1) ** 0.8 for rank in range(CHAINS)], random.Random(1)
    asked = found = usable = 0
    for number in range(rounds):
        (hashes,) = chosen.choices(chains, popularity)
        leading = store.count_leading([kv.digest() + page for page in hashes])
        there = store.contains([beside.digest() + page for page in hashes[:leading]])
        whole = _last(there) if trailing else there.index(False) if False in there else leading
        if number >= rounds // 2:
            asked, found, usable = asked + PAGES, found + leading, usable + whole
        if whole:
            store.get(batch(kv, hashes[:whole], KV_BYTES))
            store.get(batch(beside, hashes[whole - 1 : whole] if trailing else hashes[:whole], beside_bytes))
        # As SGLang does: the pool beside the KV first.
        store.set(batch(beside, hashes[-1:] if trailing else hashes, beside_bytes))
        store.set(batch(kv, hashes, KV_BYTES))
    return Shares(found / asked, usable / asked)


def _chain(number: int) -> list[bytes]:
    hashes, before = [], str(number).encode()
    for _ in range(PAGES):
        before = hashlib.sha256(before).digest()
        hashes.append(before)
    return hashes


def _last(there: list[bool]) -> int:
    """Pages up to the last one that is there."""
    return max((pages for pages, known in enumerate(there, 1) if known), default=0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    rounds = parser.parse_args().rounds
    print("| pool beside the KV | slabs | share found in KV | share usable |\n|---|---|---|---|")
    for trailing in (True, False):
        for slabs in (16, 128):
            shares = measure(trailing=trailing, slabs=slabs, rounds=rounds)
            name = "states" if trailing else "index keys"
            print(f"| {name} | {slabs} | {shares.kv:.3f} | {shares.usable:.3f} |", flush=True)

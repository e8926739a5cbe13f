"""Two pools of the same prefixes in one file tier that is too small: how much of the KV in it can be restored.

``python -m benchmarks.pools_of_a_prefix`` takes minutes. Chains of KV pages are asked for and written by popularity
(Zipf), and beside each chain one state at its end (TRAILING_PAGES), an index page for each page (ALL_PAGES), or the KV
pages of a second rank. A prefix counts as far as both pools have what their policy asks for.
docs/decisions/pools-share-a-fate.md.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import tempfile
from dataclasses import dataclass
from typing import Literal, get_args
from unittest import mock

import numpy as np

from hicache_ext.config import load_config
from hicache_ext.page.identity import KV_POOL, ModelIdentity, PageIdentity, PoolIdentity, Shard
from hicache_ext.storage.opening import open_tiers
from hicache_ext.storage.store import PageBatch, PageStore
from hicache_ext.storage.tiers.file.slab import allocator

Beside = Literal["state", "index", "rank"]
ROUNDS = 3000
KV_BYTES = 8 << 10
BYTES: dict[Beside, int] = {"state": 64 << 10, "index": 2 << 10, "rank": KV_BYTES}
CAPACITY = "48MiB"


@dataclass(frozen=True, slots=True)
class Requests:
    """What is asked for: one of so many chains of so many pages, with this exponent of Zipf's law."""

    pages: int = 48
    chains: int = 400
    exponent: float = 0.8
    seed: int = 1


TUNED_ON = Requests()
OTHERS = (Requests(exponent=1.1, chains=1200, seed=2), Requests(pages=120, chains=200, exponent=0.6, seed=3))


@dataclass(frozen=True, slots=True)
class Shares:
    """Of the pages asked for in the second half of the run."""

    kv: float
    """In leading runs of KV."""
    usable: float
    """In prefixes that both pools can restore."""


def measure(
    beside: Beside, *, slabs: int, layout: str = "slab", requests: Requests = TUNED_ON, rounds: int = ROUNDS
) -> Shares:
    """``slabs``: of how many slabs the capacity is; 16 below 16 GiB, up to 1,024 above."""
    with tempfile.TemporaryDirectory() as directory, mock.patch.object(allocator, "_SLABS_AT_CAPACITY", slabs):
        tier = {"type": "file", "path": directory, "capacity": CAPACITY, "layout": layout, "io": "buffered"}
        loading = {"interface_v1": 1, "backend_name": "hicache_ext", "class_name": "HiCacheExtBackend"}
        loading["module_path"] = "hicache_ext.storage.backend"
        store = open_tiers(load_config({**loading, "hicache_ext": {"tiers": {"disk": tier}}}))
        try:
            return _replay(store, beside, requests, rounds)
        finally:
            store.close()


def _replay(store: PageStore, beside: Beside, requests: Requests, rounds: int) -> Shares:
    trailing, size = beside == "state", BYTES[beside]
    kv, other = (
        PageIdentity(ModelIdentity("m"), PoolIdentity(name, "", "", "", 16, (bytes_of_page,)), Shard(tp=tp))
        for name, bytes_of_page, tp in (
            (KV_POOL, KV_BYTES, (0, 2)),
            (KV_POOL, KV_BYTES, (1, 2)) if beside == "rank" else (beside, size, (0, 2)),
        )
    )
    for identity in (kv, other):
        store.register_identity(identity.digest(), identity.document())
    segment = memoryview(np.zeros(max(KV_BYTES, size), np.uint8))

    def batch(identity: PageIdentity, hashes: list[bytes], size: int) -> PageBatch:
        return PageBatch([identity.digest() + page for page in hashes], [(segment[:size],)] * len(hashes))

    chains = [_chain(number, requests.pages) for number in range(requests.chains)]
    popularity = [1 / (rank + 1) ** requests.exponent for rank in range(requests.chains)]
    chosen = random.Random(requests.seed)
    asked = found = usable = 0
    for number in range(rounds):
        (hashes,) = chosen.choices(chains, popularity)
        leading = store.count_leading([kv.digest() + page for page in hashes])
        there = store.contains([other.digest() + page for page in hashes[:leading]])
        whole = _last(there) if trailing else there.index(False) if False in there else leading
        if number >= rounds // 2:
            asked, found, usable = asked + len(hashes), found + leading, usable + whole
        if whole:
            store.get(batch(kv, hashes[:whole], KV_BYTES))
            store.get(batch(other, hashes[whole - 1 : whole] if trailing else hashes[:whole], size))
        # As SGLang does: the pool beside the KV first.
        store.set(batch(other, hashes[-1:] if trailing else hashes, size))
        store.set(batch(kv, hashes, KV_BYTES))
    return Shares(found / asked, usable / asked)


def _chain(number: int, pages: int) -> list[bytes]:
    hashes, before = [], str(number).encode()
    for _ in range(pages):
        before = hashlib.sha256(before).digest()
        hashes.append(before)
    return hashes


def _last(there: list[bool]) -> int:
    """Pages up to the last one that is there."""
    return max((pages for pages, known in enumerate(there, 1) if known), default=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--beside", choices=get_args(Beside), nargs="+", default=get_args(Beside))
    parser.add_argument("--slabs", type=int, nargs="+", default=(16, 128), help="0: page files")
    options = parser.parse_args()
    print("| requests | beside the KV | slabs | found in KV | usable |\n|---|---|---|---|---|")
    for requests in (TUNED_ON, *OTHERS):
        name = f"{requests.chains} x {requests.pages}, {requests.exponent}"
        for beside in options.beside:
            for slabs in options.slabs:
                layout = "slab" if slabs else "pages"
                shares = measure(beside, slabs=slabs or 16, layout=layout, requests=requests, rounds=options.rounds)
                of_slabs = slabs or "page files"
                print(f"| {name} | {beside} | {of_slabs} | {shares.kv:.3f} | {shares.usable:.3f} |", flush=True)


if __name__ == "__main__":
    main()

"""The same requests through real tiers: a node is a store of this package (a file tier, a Redis that all share)."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hicache_ext.config import ExtraConfig, load_config
from hicache_ext.plan.fleet import NEAR, POOL, Fleet, routed
from hicache_ext.plan.traces import Trace
from hicache_ext.storage.opening import open_tiers
from hicache_ext.storage.store import GetResult, PageBatch
from hicache_ext.storage.tiering.reload import ReloadableStore

_IDENTITY = bytes(15) + b"\1"
_PORTION = 128
"""Pages of a call, as SGLang's."""
_WAIT = 60.0


@dataclass(slots=True)
class Replayed:
    """What the real tiers did: blocks that came from near and from the pool, by request; bytes by tier and direction;
    seconds of each request, without what is done in the background."""

    hits: npt.NDArray[np.int64]
    bytes: dict[tuple[str, str], int]
    seconds: npt.NDArray[np.float64]


@contextmanager
def nodes_of(
    fleet: Fleet, directory: Path, redis_url: str | None, capacity: str | int
) -> Iterator[list[ReloadableStore]]:
    """The stores of the nodes, each with a directory of its own of ``capacity``."""
    with ExitStack() as ends:
        stores = []
        for number in range(fleet.nodes):
            tiers: dict[str, object] = {}
            if fleet.near != 0:
                path = directory / f"node{number}"
                tiers["near"] = {"type": "file", "path": str(path), "capacity": capacity, "layout": "slab"}
            if redis_url is not None:
                # A busy machine is no reason to leave out the pool here: what is counted is what was there.
                tiers["pool"] = {"type": "redis", "url": redis_url, "timeout": "60s"}
            section = {
                "tiers": tiers,
                "store_policies": dict.fromkeys(tiers, "sync"),
                "prefetch": {"buffer": 0},
                **({} if fleet.promote or len(tiers) < 2 else {"promote_to": "off"}),
            }
            store = open_tiers(load_config(ExtraConfig.around(section)))
            ends.callback(store.close)
            store.register_identity(_IDENTITY, {"model": {"id": "replayed"}})
            stores.append(store)
        yield stores


def replay(trace: Trace, fleet: Fleet, stores: list[ReloadableStore], page_bytes: int) -> Replayed:
    """Raises AssertionError for a page that is said to be there and is not, or has other bytes."""
    keys = [_IDENTITY + hashlib.sha256(f"{trace.name} {block}".encode()).digest() for block in range(trace.distinct)]
    hits = np.zeros((len(trace), 2), np.int64)
    seconds = np.zeros(len(trace))
    bytes_before = _moved(stores)
    nodes = routed(trace, fleet.nodes, fleet.router)
    content = np.random.default_rng(1).integers(0, 256, page_bytes, np.uint8).tobytes()
    memory = [bytearray(page_bytes) for _ in range(_PORTION)]
    for number, chain in enumerate(trace.chains()):
        store = stores[nodes[number]]
        names = [keys[block] for block in chain]
        before = _used(store)
        started = time.perf_counter()
        leading = store.count_leading(names) if names else 0
        for first in range(0, leading, _PORTION):
            wanted = names[first : min(leading, first + _PORTION)]
            buffers = memory[: len(wanted)]
            results = store.get(PageBatch(wanted, [[memoryview(buffer)] for buffer in buffers]))
            assert results == [GetResult.HIT] * len(wanted), results
        for first in range(leading, len(names), _PORTION):
            wanted = names[first : first + _PORTION]
            batch = PageBatch(wanted, [[memoryview(content)]] * len(wanted))
            assert all(result.durable for result in store.set(batch))
        seconds[number] = time.perf_counter() - started
        # What comes from the pool is kept in the background, which the plan does at once.
        assert store.wait_until_written(_WAIT)
        after = _used(store)
        hits[number] = [after[name] - before[name] for name in ("near", "pool")]
    moved = {key: amount - bytes_before[key] for key, amount in _moved(stores).items()}
    return Replayed(hits, moved, seconds)


def _moved(stores: list[ReloadableStore]) -> dict[tuple[str, str], int]:
    """Payload that each tier has read and written so far, on all nodes."""
    moved: dict[tuple[str, str], int] = {}
    for store in stores:
        for tier in store.tiers:
            for direction in ("get", "set"):
                key = (tier.name, direction)
                moved[key] = moved.get(key, 0) + tier.metrics.value("bytes", direction)
    return moved


def _used(store: ReloadableStore) -> dict[str, int]:
    """Pages of leading runs that each tier has served so far."""
    counts = dict.fromkeys(("near", "pool"), 0)
    for tier in store.tiers:
        counts[tier.name] = tier.metrics.value("chain_pages", "used")
    return counts


def features(trace: Trace, per_request: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """What the time of a request depends on: itself, blocks asked for, read near, read from the pool, computed."""
    asked = np.diff(trace.offsets)
    computed = asked - per_request[:, NEAR] - per_request[:, POOL]
    columns = (np.ones(len(trace)), asked, per_request[:, NEAR], per_request[:, POOL], computed)
    return np.stack([np.asarray(column, np.float64) for column in columns], axis=1)


def costs(
    trace: Trace, per_request: npt.NDArray[np.int64], seconds: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Seconds of each of ``features``, from requests that were measured. None is below 0: the least one is left out
    until that is so."""
    measured, kept = features(trace, per_request), list(range(5))
    found = np.zeros(5)
    while kept:
        solved = np.linalg.lstsq(measured[:, kept], seconds, rcond=None)[0]
        if solved.min() >= 0:
            found[kept] = solved
            break
        del kept[int(solved.argmin())]
    return found

"""A Hypothesis state machine that runs a backend with several pools beside a dict: a prefix is there with all of its
pools, or it is not there.

A backend's test file:

    TestMyBackend = pools_machine(open_my_medium).TestCase

where ``open_my_medium()`` answers a fresh, empty ``BackendMedium``. The pools are SGLang's own: KV, index keys that are
needed for every page (ALL_PAGES), and states of which the last ones are needed (TRAILING_PAGES, windows of 1 and 2).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hicache_ext.testing.conformance.storage_backend import page_keys
from hicache_ext.testing.host_pools import page_indices
from tests.rigs.host_pool_kinds import (
    PAGES,
    fill_pools_with_noise,
    mamba_host,
    mha_host,
    minimax_index_host,
    page_content,
)

_CHAIN = 6
"""Pages of a chain; the other half of a pool is what pages are read into."""
_CHAINS = (page_keys(_CHAIN, "a"), page_keys(_CHAIN, "b"))
_POLICIES = {"indexer": "all_pages", "mamba": "trailing_pages"}

_chains = st.integers(0, len(_CHAINS) - 1)
_positions = st.lists(st.integers(0, _CHAIN - 1), max_size=_CHAIN, unique=True)
_windows = st.integers(1, 2)
_sometimes = st.sampled_from((False, False, True))
_pools = st.sampled_from(("kv", *_POLICIES))


class BackendMedium(Protocol):
    """What the machine needs of a backend and of what it keeps its pages in."""

    def open(self) -> Any:
        """A HiCacheStorage over this medium. The machine registers its pools and calls ``close`` if there is one."""

    def lose(self, pool: str, key: str) -> bool:
        """Take a page from the medium behind the backend's back; False where it is not there."""

    def damage(self, pool: str, key: str) -> bool:
        """Change a byte of a stored page behind the backend's back; False where it is not there."""

    def settle(self) -> None:
        """Wait for what the backend still writes, examines and takes away in the background."""

    def close(self) -> None:
        """Take the medium away; called once, after the backend was closed."""


def pools_machine(open_medium: Callable[[], BackendMedium], *, evicts: bool = False) -> type[RuleBasedStateMachine]:
    """The machine for the backends over the media that ``open_medium`` makes; pytest collects its ``TestCase``.

    ``evicts``: the backend may drop pages to stay within its capacity, and refuse some.
    """
    return type("PoolsMachine", (_PoolsMachine,), {"open_medium": staticmethod(open_medium), "evicts": evicts})


class _PoolsMachine(RuleBasedStateMachine):
    open_medium: Callable[[], BackendMedium]
    evicts: bool

    def __init__(self) -> None:
        super().__init__()
        # Both chains of KV alone are more than a mebibyte: a tier of that size has to evict.
        kv = mha_host("page_first", page_size=64, layers=6)
        # Side states: a pool that has no page buffers is one of those that have to hold together.
        states = mamba_host("page_first", conv=((8, 3),), temporal=(2, 4, 4), states=True)
        self.pools = {"kv": kv, "indexer": minimax_index_host("page_first", kv), "mamba": states}
        fill_pools_with_noise(self.pools)
        self.content = {
            name: [page_content(host, page) for page in range(PAGES // 2)] for name, host in self.pools.items()
        }
        self.medium = type(self).open_medium()
        self.backend = self._open()
        self.stored: set[tuple[str, str]] = set()
        self.damaged: set[tuple[str, str]] = set()
        self._unlimited = pytest.MonkeyPatch()
        self._allow_every_removal()

    def _open(self) -> Any:
        from sglang.srt.mem_cache.hicache_storage import PoolName

        backend = self.medium.open()
        backend.register_mem_pool_host(self.pools["kv"])
        for name, host in self.pools.items():
            backend.register_mem_host_pool_v2(host, PoolName(name))
        backend.on_host_pools_registered()
        return backend

    def _allow_every_removal(self) -> None:
        from hicache_ext.storage.contract import bad_pages
        from hicache_ext.storage.tiers.file import path_store

        # Every bad page is one on purpose.
        self._unlimited.setattr(bad_pages, "MOST_REMOVED", 1 << 30)
        self._unlimited.setattr(path_store, "SCRUB_AFTER", math.inf)

    def teardown(self) -> None:
        self._unlimited.undo()
        if hasattr(self.backend, "close"):
            self.backend.close()
        self.medium.close()

    # -- calls ---------------------------------------------------------------------------------------------------------

    @rule(pool=_pools, chain=_chains, positions=_positions)
    def write(self, pool: str, chain: int, positions: list[int]) -> None:
        """One pool alone: the writes of the others failed, or come later, or never."""
        keys = [_CHAINS[chain][position] for position in positions]
        for key, ok in zip(keys, self._move("set", pool, keys, positions), strict=True):
            assert ok or self.evicts
            if ok:
                if (pool, key) not in self.stored:
                    self.damaged.discard((pool, key))
                self.stored.add((pool, key))

    @initialize()
    def begin_with_two_prefixes(self) -> None:
        for chain in range(len(_CHAINS)):
            self.write_all_pools(chain, _CHAIN)

    @rule(chain=_chains, pages=st.integers(1, _CHAIN))
    def write_all_pools(self, chain: int, pages: int) -> None:
        for pool in (*_POLICIES, "kv"):
            self.write(pool, chain, list(range(pages)))

    @rule(pool=_pools, chain=_chains, position=st.integers(0, _CHAIN - 1), of_whole=st.booleans())
    def lose(self, pool: str, chain: int, position: int, of_whole: bool) -> None:
        """As an eviction, or another process, does between any two calls; mostly from a chain that is whole."""
        if of_whole:
            self.write_all_pools(chain, _CHAIN)
        key = _CHAINS[chain][position]
        if self.medium.lose(pool, key):
            self.stored.discard((pool, key))
            self.damaged.discard((pool, key))

    @rule(pool=_pools, chain=_chains, position=st.integers(0, _CHAIN - 1))
    def damage(self, pool: str, chain: int, position: int) -> None:
        key = _CHAINS[chain][position]
        if (pool, key) not in self.damaged and self.medium.damage(pool, key):
            self.damaged.add((pool, key))

    @rule(chance=_sometimes)
    def clear(self, chance: bool) -> None:
        if not chance:
            return
        self.backend.clear()
        self.stored.clear()
        self.damaged.clear()

    @rule(chance=_sometimes)
    def reopen(self, chance: bool) -> None:
        if not chance:
            return
        if hasattr(self.backend, "close"):
            self.backend.close()
        self.backend = self._open()

    @invariant()
    def a_prefix_is_there_with_all_of_its_pools_or_not(self) -> None:
        for keys in _CHAINS:
            for window in (1, 2):
                self._look_up(keys, window, {*_POLICIES})

    @rule(chain=_chains, begin=st.integers(0, 2), window=_windows, beside=st.sets(st.sampled_from([*_POLICIES])))
    def restore(self, chain: int, begin: int, window: int, beside: set[str]) -> None:
        """As SGLang does for a request: which prefixes of the chain are there, then the longest one is read."""
        keys = _CHAINS[chain][begin:]
        self._restore(keys[: self._look_up(keys, window, beside)], window, beside)

    def _look_up(self, keys: list[str], window: int, beside: set[str]) -> int:
        """The pages of the longest prefix that can be restored."""
        found = self.backend.batch_exists_v2(keys, self._asked(sorted(beside), window))
        restorable = found.restorable_prefix_pages
        assert found.kv_hit_pages == max(restorable, default=0)
        # What is damaged is there until somebody reads it, perhaps ahead of the request.
        perhaps = self._restorable(keys, window, beside, self.stored)
        surely = [] if self.evicts else self._restorable(keys, window, beside, self.stored - self.damaged)
        assert set(surely) <= set(restorable) <= set(perhaps), (surely, restorable, perhaps)
        assert all(found.kv_hit_pages <= pages <= len(keys) for pages in found.extra_pool_hit_pages.values())
        return int(found.kv_hit_pages)

    def _restore(self, keys: list[str], window: int, beside: set[str]) -> None:
        """Every page of the prefix that was promised comes back as it was, unless it was damaged meanwhile."""
        for pool in ("kv", *sorted(beside)):
            wanted = keys if _POLICIES.get(pool) != "trailing_pages" else keys[-window:]
            places = [PAGES // 2 + number for number in range(len(wanted))]
            moved = self._move("get", pool, wanted, places)
            for key, place, ok in zip(wanted, places, moved, strict=True):
                position = next(chain.index(key) for chain in _CHAINS if key in chain)
                assert ok or (pool, key) in self.damaged, (pool, position)
                if ok:
                    assert page_content(self.pools[pool], place) == self.content[pool][position]
                else:
                    # A page that was found bad is gone, so that its key can be written again.
                    self.stored.discard((pool, key))
                    self.damaged.discard((pool, key))

    # -- the dict ------------------------------------------------------------------------------------------------------

    def _restorable(self, keys: list[str], window: int, beside: set[str], stored: set[tuple[str, str]]) -> list[int]:
        """The prefix lengths at which every pool has what its policy asks for."""

        def has(pool: str, begin: int, end: int) -> bool:
            return all((pool, key) in stored for key in keys[begin:end])

        return [
            pages
            for pages in range(1, len(keys) + 1)
            if has("kv", 0, pages)
            and ("indexer" not in beside or has("indexer", 0, pages))
            and ("mamba" not in beside or has("mamba", max(0, pages - window), pages))
        ]

    def _asked(self, beside: list[str], window: int) -> list[Any]:
        from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

        return [
            PoolTransfer(
                PoolName(pool),
                keys=["__placeholder__"] * window if _POLICIES[pool] == "trailing_pages" else None,
                hit_policy=PoolHitPolicy(_POLICIES[pool]),
            )
            for pool in beside
        ]

    def _move(self, call: str, pool: str, keys: list[str], pages: list[int]) -> list[bool]:
        from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

        indices = page_indices(self.pools[pool].page_size, pages) if pages else page_indices(1, [0])[:0]
        if pool == "kv":
            moved: list[bool] = getattr(self.backend, f"batch_{call}_v1")(keys, indices)
        else:
            transfer = PoolTransfer(PoolName(pool), host_indices=indices, keys=keys)
            moved = getattr(self.backend, f"batch_{call}_v2")([transfer])[PoolName(pool)]
        assert len(moved) == len(keys)
        self.medium.settle()
        return moved

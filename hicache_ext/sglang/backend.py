"""HiCacheExtBackend: the class SGLang loads (``--hicache-storage-backend dynamic``).

It is deliberately thin: it turns SGLang's keys, pools and indices into page batches, and results back into what SGLang
expects. Everything that stores anything is behind the PageStore contract.

SGLang calls, in this order (threads in brackets): the constructor, ``register_mem_pool_host``,
``register_mem_host_pool_v2`` per pool, ``on_host_pools_registered`` [scheduler]; then ``batch_exists*`` [prefetch, on
decode nodes scheduler], ``batch_get*`` [prefetch_io_aux], ``batch_set*`` [backup], ``get_stats`` and ``clear``
[scheduler]; at the end ``close`` [scheduler].

Only the first four raise: otherwise SGLang would lose the operation at best and a thread at worst. A failure is a miss.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageExtraInfo,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from hicache_ext.page.identity import page_hash_bytes
from hicache_ext.sglang.host_pool import AnyPages
from hicache_ext.sglang.lifecycle import BackendLifecycle, answering, name_of
from hicache_ext.sglang.releases import hit_policy
from hicache_ext.sglang.served_pools import KV, BoundPool
from hicache_ext.storage.contract import tenants
from hicache_ext.storage.contract.store import GetResult, PageKeys, SetResult

_LOOKUP_PORTION = 2048
"""Keys of a chain that are converted and looked up together; each call costs some 50 us on the way to the tier."""


# Return values of calls that fail.


def length(keys: Any) -> int:
    try:
        return len(keys)
    except Exception:  # noqa: BLE001 - ``keys`` is no list, and its ``__len__`` may raise anything
        return 0


def all_false(keys: Any = (), *_: Any, **__: Any) -> list[bool]:
    return [False] * length(keys)


def transfer_false(transfer: Any = None, *_: Any, **__: Any) -> list[bool]:
    return all_false(getattr(transfer, "keys", None))


def result_name(transfer: Any) -> str | None:
    """Return the name under which SGLang looks for the result of a transfer; None if it is no transfer."""
    name = getattr(transfer, "name", None)
    return name if isinstance(name, str) else None


def transfers_false(transfers: Any = (), *_: Any, **__: Any) -> dict[Any, list[bool]]:
    named = [(result_name(transfer), transfer) for transfer in transfers or ()]
    return {name: transfer_false(transfer) for name, transfer in named if name is not None}


class HiCacheExtBackend(BackendLifecycle):
    """SGLang's storage interface over the configured tiers. See the module docstring for threads and guarantees."""

    # -- existence -------------------------------------------------------------------------------------------------

    @answering(lambda *_, **__: 0)
    def batch_exists(self, keys: list[str]) -> int:
        if self.served.closed or not keys:
            return 0
        pool = self.served.usable(KV)
        if pool is None or pool.pages is None:
            self._store.count_absent(len(keys))
            return 0
        if self._pull_rule is None:
            return self._leading(pool, keys)
        parts = len(pool.digests)
        with self._pull_rule.looking_up(len(keys), pool.pages.page_size, pool.pages.page_bytes, parts) as lookup:
            leading = 0 if lookup is None else self._leading(pool, keys)
        if lookup is None:
            self._store.count_absent(len(keys) * parts)
            return 0
        first = pool.digests[0]
        return self._pull_rule.pages_to_pull(
            lookup, leading, lambda count: [first + page_hash_bytes(key) for key in keys[:count]]
        )

    @answering(lambda *_, **__: PoolTransferResult(0, {}, []))
    def batch_exists_v2(self, keys: list[str], pool_transfers: list[PoolTransfer] | None = None) -> PoolTransferResult:
        if self.served.unavailable or not keys:
            return PoolTransferResult(0, {}, [])
        kv = self.served.bound.get(KV)
        # A logical anchor has no pages of its own, so its sidecars decide.
        kv_pages = len(keys) if kv is not None and kv.pages is None else self.batch_exists(keys)
        hits: dict[Any, int] = {PoolName.KV: kv_pages} if kv_pages else {}
        restorable = list(range(1, kv_pages + 1))
        for transfer in pool_transfers or []:
            if hit_policy(transfer.hit_policy) == "none":
                # A pool missing from the result carries no verdict.
                continue
            if not restorable:
                break
            pool_restorable = self._restorable_pages(transfer, keys[:kv_pages])
            boundary = max(pool_restorable, default=0)
            if boundary:
                hits[transfer.name] = boundary
            restorable = [pages for pages in restorable if pages in pool_restorable]
        return PoolTransferResult(restorable[-1] if restorable else 0, hits, restorable)

    def _restorable_pages(self, transfer: PoolTransfer, keys: list[str]) -> set[int]:
        """Return the prefix lengths in pages at which this pool has what its policy requires."""
        pool = self.served.bound.get(name_of(transfer.name))
        if pool is None or pool.pages is None:
            return set()
        if hit_policy(transfer.hit_policy) == "all_pages":
            return set(range(1, self._leading(pool, keys) + 1))
        if hit_policy(transfer.hit_policy) == "unknown":
            return set()
        window = max(1, len(transfer.keys) if transfer.keys else 1)
        complete: set[int] = set()
        run = 0
        for pages, known in enumerate(self._all_parts(pool, keys, self._store.contains), start=1):
            run = run + 1 if known else 0
            if run >= min(window, pages):
                complete.add(pages)
        return complete

    def _leading(self, pool: BoundPool, keys: Sequence[str]) -> int:
        """Return how many leading pages have every part present; count the rest as absent. Long chains are looked up
        in portions, since most end early."""
        leading = found = 0
        while leading < len(keys):
            present = PageKeys.of_hashes(pool.digests[0], keys[leading : leading + _LOOKUP_PORTION])
            portion = len(present)
            for digest in pool.digests:
                with self._store_call():
                    present = present[: self._store.count_leading(present.under(digest))]
                found += len(present)
            leading += len(present)
            if len(present) < portion:
                break
        if absent := len(keys) * len(pool.digests) - found:
            self._store.count_absent(absent)
        return leading

    def _all_parts(self, pool: BoundPool, keys: Sequence[str], test: Callable[[PageKeys], list[bool]]) -> list[bool]:
        """Return, for each page, whether ``test`` holds for all its parts."""
        first = PageKeys.of_hashes(pool.digests[0], keys)
        with self._store_call():
            per_part = [test(first.under(digest)) for digest in pool.digests]
        return [all(known) for known in zip(*per_part, strict=True)]

    # -- v1 and v2: pages of host pools ----------------------------------------------------------------------------

    @answering(all_false)
    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor) -> list[bool]:
        return self._move(self.served.usable(KV), keys, host_indices, "read")

    @answering(all_false)
    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        self._follow_owners(extra_info, keys)
        return self._move(self.served.usable(KV), keys, host_indices, "write")

    @staticmethod
    def _follow_owners(extra_info: HiCacheStorageExtraInfo | None, keys: Sequence[str]) -> None:
        """Record that pages behind a tenant's pages belong to that tenant."""
        if (owners := tenants.in_force()) is not None:
            owners.follow(getattr(extra_info, "prefix_keys", None), keys)

    @answering(transfers_false)
    def batch_get_v2(self, transfers: list[PoolTransfer]) -> dict[Any, list[bool]]:
        return self._move_transfers(transfers, "read")

    @answering(transfers_false)
    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[Any, list[bool]]:
        for transfer in transfers:
            self._follow_owners(extra_info, getattr(transfer, "keys", None) or ())
        return self._move_transfers(transfers, "write")

    def _move_transfers(self, transfers: list[PoolTransfer], move: Move) -> dict[Any, list[bool]]:
        moved = [(result_name(transfer), self._move_transfer(transfer, move)) for transfer in transfers]
        return {name: pages for name, pages in moved if name is not None}

    @answering(transfer_false)
    def _move_transfer(self, transfer: PoolTransfer, move: Move) -> list[bool]:
        """Move the pages of one transfer; guarded on its own, so that a failure does not affect the other transfers."""
        pool = self.served.usable(name_of(transfer.name))
        return self._move(pool, transfer.keys or [], transfer.host_indices, move)

    def _move(
        self, pool: BoundPool | None, keys: Sequence[str], host_indices: torch.Tensor | None, move: Move
    ) -> list[bool]:
        """Move pages between the store and a registered host pool; return for each whether it succeeded."""
        if pool is None:
            return [False] * len(keys)
        if pool.pages is None:
            return [True] * len(keys)
        return succeeded(self._move_valid(pool, pool.pages, keys, host_indices, move))

    def _move_valid(
        self, pool: BoundPool, pages: AnyPages, keys: Sequence[str], host_indices: torch.Tensor | None, move: Move
    ) -> list[Any]:
        """Move the pages with valid indices; return the worst result of each page's parts, None for an invalid page."""
        numbers, valid = pages.page_numbers(host_indices, len(keys))
        valid_keys = keys
        if valid is not None:
            given = host_indices.numel() if host_indices is not None else "no"
            wanted = f"{len(keys)} pages of {pages.page_size} in {pool.name}, {valid.sum()} of them sound"
            self.report_failure("host_indices", ValueError(f"{given} indices for {wanted}"))
            numbers, valid_keys = numbers[valid], [key for key, is_valid in zip(keys, valid, strict=True) if is_valid]
        started = time.perf_counter()
        first_keys = PageKeys.of_hashes(pool.digests[0], valid_keys)
        part_keys = [first_keys.under(digest) for digest in pool.digests]
        results: list[Any]
        if move == "read":
            samples, results = self._prefetched, [*pages.read(part_keys, numbers, self._store.get)]
        else:
            samples, results = self._backed_up, [*pages.write(part_keys, numbers, self._store.set)]
        seconds = time.perf_counter() - started
        if pages.parts > 1:
            parts = (results[first : first + pages.parts] for first in range(0, len(results), pages.parts))
            results = [max(page_results, key=_severity) for page_results in parts]
        samples.record(len(keys), pages.page_bytes * sum(map(results.count, _MOVED)), seconds)
        if valid is None:
            return results
        found = iter(results)
        return [next(found) if is_valid else None for is_valid in valid]

    # -- the external linker (linker.py) ---------------------------------------------------------------------------

    @answering(lambda *_, **__: False)
    def read_whole(self, pool: BoundPool, keys: Sequence[str], host_indices: torch.Tensor) -> bool:
        """Read pages into a host pool; return whether all of them were found."""
        return all(self._move(pool, keys, host_indices, "read"))

    @answering(lambda *_, **__: False)
    def write_whole(self, pool: BoundPool, keys: Sequence[str], host_indices: torch.Tensor) -> bool:
        """Store pages of a host pool; return whether each is stored or was refused by admission."""
        self._follow_owners(None, keys)
        return all(self._move(pool, keys, host_indices, "write"))

    # -- a decode node's own writer (pd/) --------------------------------------------------------------------------

    @answering(all_false)
    def stored(self, keys: list[str], name: str = KV) -> list[bool]:
        """Return for each page of a pool whether it need not be written again [pd writer]."""
        pool = self.served.usable(name)
        return [False] * len(keys) if pool is None else self._all_parts(pool, keys, self._store.stored)

    @answering(lambda keys=(), *_, **__: [SetResult.ERROR] * length(keys))
    def store_pages(self, keys: list[str], host_indices: torch.Tensor, name: str = KV) -> list[SetResult]:
        """Store pages of a host pool; return each page's result [pd writer]."""
        pool = self.served.usable(name)
        if pool is None or pool.pages is None:
            return [SetResult.REJECTED] * len(keys)
        results = self._move_valid(pool, pool.pages, keys, host_indices, "write")
        return [SetResult.ERROR if result is None else result for result in results]

    # -- generic calls ---------------------------------------------------------------------------------------------
    # SGLang's base class requires them but SGLang never calls them: the configuration must say ``interface_v1``.

    def exists(self, key: Any = "", *_: Any, **__: Any) -> bool:
        return bool(self.batch_exists([key]) == 1)

    def get(self, *_: Any, **__: Any) -> None:
        return None

    def batch_get(self, keys: Any = (), *_: Any, **__: Any) -> list[None]:
        return [None] * length(keys)

    def set(self, *_: Any, **__: Any) -> bool:
        return False

    def batch_set(self, *_: Any, **__: Any) -> bool:
        return False


Move = Literal["read", "write"]
"""Direction between the store and a host pool. Moving raises what a closed store raises, and what a pool raises whose
pages are copied."""

_MOVED = (GetResult.HIT, SetResult.STORED, SetResult.EXISTS)
_SUCCESSES = (*_MOVED, SetResult.REFUSED)
"""A page that admission refused is no failure: SGLang would end the whole backup, and log it."""


def succeeded(results: list[Any]) -> list[bool]:
    """Return for each page whether it was read, stored, or refused by admission."""
    if results and results.count(results[0]) == len(results):
        return [results[0] in _SUCCESSES] * len(results)
    return [result in _SUCCESSES for result in results]


def _severity(result: Any) -> int:
    return _SUCCESSES.index(result) if result in _SUCCESSES else len(_SUCCESSES)

"""HiCacheExtBackend: the class SGLang loads (``--hicache-storage-backend dynamic``).

Thin on purpose: it turns SGLang's keys, pools and indices into page batches, and results back into what SGLang expects.
Everything that stores anything is behind the PageStore contract.

Called by SGLang, in this order (threads in brackets): the constructor, ``register_mem_pool_host``,
``register_mem_host_pool_v2`` per pool, ``on_host_pools_registered`` [scheduler]; then ``batch_exists*`` [prefetch, on
decode nodes scheduler], ``batch_get*`` [prefetch_io_aux], ``batch_set*`` [backup], ``get_stats`` and ``clear``
[scheduler]; at the end ``close`` [scheduler].

No call but the first four raises: SGLang would lose the operation at best and a thread at worst. Trouble is a miss.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.observability.metrics_collector import StorageMetrics

from hicache_ext.config import HicacheExtConfig, load_config
from hicache_ext.config.model import hints_over
from hicache_ext.errors import UnsupportedError
from hicache_ext.kernels.selection import kernel_metrics
from hicache_ext.page.identity import (
    ModelIdentity,
    PageIdentity,
    PoolIdentity,
    Shard,
    page_hash_bytes,
)
from hicache_ext.runtime.metrics import TierMetrics, TransferSamples
from hicache_ext.sglang import kernel_hooks, weights_hooks
from hicache_ext.sglang.attached import attach, detach
from hicache_ext.sglang.hooks import ADAPTERS, DECODE_WRITER, FEATURES, not_in_force
from hicache_ext.sglang.host_pool import HostPages, address_segments, has_page_bytes, tensor_segments
from hicache_ext.sglang.launch_facts import LaunchFacts, logical_dtype, read_launch_facts
from hicache_ext.sglang.model_weights import ModelWeights, records_directory, weights_of_server
from hicache_ext.sglang.prefill_cost import prefill_cost
from hicache_ext.sglang.releases import check_sglang_version
from hicache_ext.storage.contract.hint_board import BoardLimits, HintBoard, board_among
from hicache_ext.storage.contract.reports import TierReports
from hicache_ext.storage.contract.store import GetResult, PageBatch, PageKeys, SetResult
from hicache_ext.storage.guards.scheduler import answering_at_once
from hicache_ext.storage.opening import open_tiers, server_view
from hicache_ext.storage.serving.config_file import config_file_of
from hicache_ext.storage.serving.hints.hint import longest as longest_hint
from hicache_ext.storage.serving.hints.receiver import HintReceiver
from hicache_ext.storage.serving.hints.sender import HintSender
from hicache_ext.storage.serving.metrics_export import export_when_wanted
from hicache_ext.storage.tiering.pulling.rule import open_pull_rule

logger = logging.getLogger(__name__)

_KV = PoolName.KV.value
_HINTS_TIMEOUT = 5.0
"""Seconds that close() waits for a hint that is being followed."""
_HINT_MEMORY = 32 * 1024 * 1024
"""Bytes of pages that are on their way at once because of a hint."""
_FIRST_LOOK_UP = 8
_LOOK_UP_PORTION = 2048
"""Keys of a chain converted and looked up at once: each time costs some 50 us on the way to the tier. The first time
only a few: most chains that end do so at once."""

_UNHURRIED = nullcontext()

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _answering(
    otherwise: Callable[..., Any],
) -> Callable[[Callable[Concatenate[HiCacheExtBackend, _P], _R]], Callable[Concatenate[HiCacheExtBackend, _P], _R]]:
    """Make a method that SGLang calls never raise: ``otherwise(*arguments)`` is its answer to any trouble."""

    def decorate(
        method: Callable[Concatenate[HiCacheExtBackend, _P], _R],
    ) -> Callable[Concatenate[HiCacheExtBackend, _P], _R]:
        @functools.wraps(method)
        def guarded(self: HiCacheExtBackend, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
            try:
                return method(self, *args, **kwargs)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - SystemExit would end SGLang's I/O thread
                self._report_failure(method.__name__, error)
                answer: _R = otherwise(*args, **kwargs)
                return answer

        return guarded

    return decorate


def _length(keys: Any) -> int:
    try:
        return len(keys)
    except TypeError:
        return 0


def _all_false(keys: Any = (), *_: Any, **__: Any) -> list[bool]:
    return [False] * _length(keys)


def _all_none(keys: Any = (), *_: Any, **__: Any) -> list[None]:
    return [None] * _length(keys)


def _transfers_false(transfers: Any = (), *_: Any, **__: Any) -> dict[Any, list[bool]]:
    return {transfer.name: [False] * _length(transfer.keys) for transfer in transfers or ()}


@dataclass(frozen=True, slots=True)
class _BoundPool:
    """A registered host pool: its memory and, per part, its identity."""

    name: str
    pages: HostPages | None
    """None for a logical anchor, which has no bytes to store."""
    identities: tuple[PageIdentity, ...]
    digests: tuple[bytes, ...]
    """Of the identities; they mean nothing before the weights are identified."""


class HiCacheExtBackend(HiCacheStorage):  # type: ignore[misc]  # SGLang is untyped here
    """SGLang's storage interface over the configured tiers. See the module docstring for threads and promises."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        """Raises ConfigError, StoreSetupError or UnsupportedError with one sentence: SGLang then does not start."""
        check_sglang_version()
        self._storage_config = storage_config
        self._facts = read_launch_facts()
        view = server_view(self._facts.role, int(storage_config.tp_rank or 0))
        self._config: HicacheExtConfig = view(load_config(storage_config.extra_config or {}))
        self._model = self._model_identity()
        self._weights = self._weights_to_identify()
        self._identified = self._weights is None
        self._clear_when_identified = False
        self._pools: dict[str, _BoundPool] = {}
        self._flat: _BoundPool | None = None
        self._own_digests: set[bytes] = set()
        self._suspended_because = None if weights_hooks.caches_are_flushed() else weights_hooks.NOT_FLUSHED
        self._state_lock = threading.Lock()
        self._failures = TierMetrics("backend")
        self._reports = TierReports()
        self._also_counted: list[TierMetrics] = []
        self._last_failure_log = 0.0
        self._prefetched = TransferSamples()
        self._backed_up = TransferSamples()
        self._closed = False
        self._found_all = False
        kernel_hooks.configure(self._config.kernels)
        # SGLang constructs its backend on the scheduler's thread. Outside a server no thread is one that must not wait.
        self._scheduler = threading.get_ident() if self._facts.model_path is not None else None
        self._store = open_tiers(self._config)
        self._config_file = config_file_of(self._facts.config_file, self._store, self._config, view)
        self._pull_rule = open_pull_rule(self._config.pd.pull, lambda: self._store.tiers, prefill_cost)
        self._hints = self._hint_receiver()
        self._exporter = export_when_wanted(self._facts.metrics, self._export_sources, _process_labels(storage_config))
        attach(self)
        self._warn_about_missing_hooks()
        logger.info(
            "hicache_ext: role %s, model %r revision %r epoch %s, tiers %s",
            self._config.role,
            self._model.id,
            self._model.revision,
            self._model.weights_epoch,
            self._store.describe().details,
        )
        if self._weights is not None:
            self._weights.start(records_directory(self._config))
            self._weights.when_known(self._weights_known)

    # -- registration ----------------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host
        self._bind(_KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._bind(_name_of(host_pool_name), host_pool)

    def _bind(self, name: str, pool: Any) -> None:
        bound = self._pools.get(name)
        if bound is not None and bound.pages is not None and bound.pages.pool is pool:
            return
        if not has_page_bytes(pool):
            self._pools[name] = _BoundPool(name, None, (), ())
            return
        parts = self._head_parts(name, pool)
        pages = HostPages(pool, name, parts)
        stored = str(getattr(pool, "dtype", torch.uint8)).removeprefix("torch.")
        dtype = logical_dtype(stored, self._facts.kv_cache_dtype, self._config.kv_dtype)
        if dtype is None:
            raise UnsupportedError(
                f"host pool {name!r}",
                f"its {stored} bytes may be fp8_e4m3 or fp8_e5m2 and no launch argument tells",
                "set hicache_ext.kv_dtype",
            )
        shards = self._shards(name, pool, parts)
        logger.info(
            "hicache_ext: pool %s, %s, %s, %d bytes a page in %d segments",
            name,
            dtype,
            getattr(pool, "layout", "?"),
            pages.page_bytes,
            len(pages.segment_sizes) * parts,
        )
        with self._state_lock:
            self._pools[name] = bound = self._under_model(name, pages, pages.describe(dtype), shards)
            identified = self._identified
        if identified:
            self._register(bound)

    def _under_model(
        self, name: str, pages: HostPages | None, pool: PoolIdentity, shards: Sequence[Shard]
    ) -> _BoundPool:
        """A pool whose pages are of the weights as they are known now; its identities are yet to be registered."""
        identities = tuple(PageIdentity(self._model, pool, shard) for shard in shards)
        return _BoundPool(name, pages, identities, tuple(identity.digest() for identity in identities))

    def _register(self, bound: _BoundPool) -> None:
        """Tell the tiers what the identities of a pool's pages are; not before the weights are identified."""
        for identity, digest in zip(bound.identities, bound.digests, strict=True):
            self._own_digests.add(digest)
            with self._patience():
                self._store.register_identity(digest, identity.document())
            logger.info("hicache_ext: pages of pool %s have identity %s", bound.name, digest.hex())

    def _change_model(self, **facts: str) -> None:
        """From now on every page belongs to another identity."""
        with self._state_lock:
            bounds = self._with_model(**facts)
        for bound in bounds:
            self._register(bound)

    def _with_model(self, **facts: str) -> list[_BoundPool]:
        """The lock is held. Which pools' identities are to be registered when it is not any more."""
        self._model = replace(self._model, **facts)
        self._flat = None
        for name, bound in list(self._pools.items()):
            if bound.identities:
                shards = [identity.shard for identity in bound.identities]
                self._pools[name] = self._under_model(name, bound.pages, bound.identities[0].pool, shards)
        return list(self._pools.values()) if self._identified else []

    def _weights_known(self) -> None:
        """The weights of the target and of all drafts are identified, or never will be [the thread that read them]."""
        weights = self._weights
        if weights is None or self._closed:
            return
        with self._state_lock:
            # Read before the problem: one that comes up meanwhile comes with a call of its own, which waits here.
            fingerprint, draft = weights.fingerprint, weights.draft
            problem = weights.problem
            if problem is None:
                self._with_model(fingerprint=fingerprint, draft=draft)
                bounds = list(self._pools.values())
            self._identified = problem is None
            clear_first, self._clear_when_identified = self._clear_when_identified, False
        if problem is not None:
            logger.error(
                "hicache_ext: the weights cannot be identified, so nothing is stored or served until a restart: %s",
                problem,
            )
            return
        for bound in bounds:
            self._register(bound)
        if clear_first:
            self.clear()
        logger.info("hicache_ext: weights %s%s", fingerprint, f", draft {draft}" if draft else "")

    def _head_parts(self, name: str, pool: Any) -> int:
        """Objects a page is split in, so that deployments of other TP sizes find their heads (tp_lcm_size)."""
        lcm = self._storage_config.tp_lcm_size
        if not lcm or name != _KV or self._storage_config.is_mla_model or getattr(pool, "layout", "") != "page_head":
            return 1
        return int(lcm) // int(self._storage_config.tp_size)

    def _shards(self, name: str, pool: Any, parts: int) -> list[Shard]:
        config = self._storage_config
        common = Shard(
            pp=(config.pp_rank, config.pp_size),
            cp=(config.attn_cp_rank, config.attn_cp_size),
            dcp=(config.dcp_rank, config.dcp_size),
        )
        replicated = config.is_mla_model and name != PoolName.MAMBA.value
        if replicated and config.tp_size > 1 and getattr(pool, "v_head_dim", None) is not None:
            raise UnsupportedError(
                f"host pool {name!r} ({type(pool).__name__})",
                "its heads differ per TP rank, but SGLang writes the pools of this model from rank 0 only",
                "use --tp 1, or no draft model, or no storage backend",
            )
        if replicated:
            return [common]
        lcm = config.tp_lcm_size
        if lcm and getattr(pool, "layout", "") == "page_head" and name == _KV:
            return [replace(common, tp=(config.tp_rank * parts + part, lcm)) for part in range(parts)]
        return [replace(common, tp=(config.tp_rank, config.tp_size))]

    def _model_identity(self) -> ModelIdentity:
        model = self._config.model
        facts: LaunchFacts = self._facts
        revision = model.revision or facts.revision or ""
        return ModelIdentity(
            id=model.id or self._storage_config.model_name or "",
            revision=revision,
            fingerprint="" if model.fingerprint in ("auto", "off") else model.fingerprint,
            weights_epoch=self._epoch_after(weights_hooks.updated_to()),
            compute=facts.compute,
        )

    def _epoch_after(self, update: str | None) -> str:
        configured = str(self._config.model.weights_epoch)
        return configured if update is None else f"{configured}+{update}"

    def _weights_to_identify(self) -> ModelWeights | None:
        """None where nothing is to be read: outside a server, or where the configuration says what the weights are.

        Raises UnsupportedError where they cannot be read.
        """
        if self._facts.model_path is None:
            return None
        if self._facts.lora and (missing := not_in_force([ADAPTERS])):
            remedy = "leave SGLANG_PLUGINS unset, or let it name hicache_ext"
            raise UnsupportedError("--enable-lora", missing[ADAPTERS], remedy)
        if self._config.model.fingerprint != "auto" or weights_hooks.updated_to() is not None:
            # The files do not hold what an update has put in their place, and its epoch is like no other.
            return None
        weights = weights_of_server(self._facts)
        if weights.problem is not None:
            raise UnsupportedError(
                f"the model {self._facts.model_path!r}",
                f"its weights cannot be identified: {weights.problem}",
                "set hicache_ext.model.fingerprint to a text that changes whenever the weights do",
            )
        return weights

    # -- existence -------------------------------------------------------------------------------------------------

    @_answering(lambda *_, **__: 0)
    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        if self._closed or not keys:
            return 0
        if self._unavailable:
            self._store.count_absent(len(keys))
            return 0
        pool = self._pools.get(_KV)
        if self._pull_rule is None or pool is None or pool.pages is None:
            return self._leading_of_any_kind(pool, keys)
        parts = len(pool.digests)
        with self._pull_rule.looking_up(len(keys), pool.pages.page_size, pool.pages.page_bytes, parts) as asked:
            leading = 0 if asked is None else self._leading_of_any_kind(pool, keys)
        if asked is None:
            self._store.count_absent(len(keys) * parts)
        return 0 if asked is None else self._pull_rule.pages_to_pull(asked, leading, partial(_probe_keys, pool, keys))

    def _leading_of_any_kind(self, pool: _BoundPool | None, keys: Sequence[str]) -> int:
        leading, absent = self._leading(pool, keys) if pool is not None and pool.pages is not None else (0, len(keys))
        if not leading and (self._flat is not None or self._scheduler is None):
            # Pages that came as flat tensors; a server has them only where SGLang uses the generic calls. A chain is of
            # one kind.
            leading, absent = self._leading(self._flat_pool(), keys)
        if absent:
            self._store.count_absent(absent)
        return leading

    @_answering(lambda *_, **__: False)
    def exists(self, key: str) -> bool:
        return bool(self.batch_exists([key]) == 1)

    @_answering(lambda *_, **__: PoolTransferResult(0, {}, []))
    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        if self._unavailable or not keys:
            return PoolTransferResult(0, {}, [])
        kv = self._pools.get(_KV)
        # A logical anchor has no pages of its own: its sidecars decide.
        kv_pages = len(keys) if kv is not None and kv.pages is None else self.batch_exists(keys)
        hits: dict[Any, int] = {PoolName.KV: kv_pages} if kv_pages else {}
        restorable = list(range(1, kv_pages + 1))
        for transfer in pool_transfers or []:
            if transfer.hit_policy is PoolHitPolicy.BLOCK_GROUPS:
                # Never gates the hit; a pool left out of the answer carries no verdict.
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
        """The prefix lengths in pages at which this pool has what its policy asks for."""
        pool = self._pools.get(_name_of(transfer.name))
        if pool is None or pool.pages is None:
            return set()
        if transfer.hit_policy is PoolHitPolicy.ALL_PAGES:
            leading, absent = self._leading(pool, keys)
            if absent:
                self._store.count_absent(absent)
            return set(range(1, leading + 1))
        window = max(1, len(transfer.keys) if transfer.keys else 1)
        present = self._present(pool, keys)
        complete: set[int] = set()
        run = 0
        for length, known in enumerate(present, start=1):
            run = run + 1 if known else 0
            if run >= min(window, length):
                complete.add(length)
        return complete

    def _leading(self, pool: _BoundPool, keys: Sequence[str]) -> tuple[int, int]:
        """Leading pages of which every part is present, and how many parts of ``keys`` were not found: for
        ``count_absent``. Long chains in portions, since most end early."""
        found = 0
        # SGLang asks for a long chain 128 pages at a time: after a call that found all, the next goes on with it.
        done, portion = 0, _LOOK_UP_PORTION if self._found_all else _FIRST_LOOK_UP
        while done < len(keys):
            names = keys[done : done + portion]
            asked = PageKeys.of_hashes(pool.digests[0], names)
            leading = len(names)
            for number, digest in enumerate(pool.digests):
                if number:
                    asked = asked.leading(leading).under(digest)
                with self._patience():
                    leading = self._store.count_leading(asked)
                found += leading
            done += leading
            if leading < len(names):
                break
            portion = _LOOK_UP_PORTION
        self._found_all = done == len(keys)
        return done, len(keys) * len(pool.digests) - found

    def _present(self, pool: _BoundPool, keys: Sequence[str]) -> list[bool]:
        of_first = PageKeys.of_hashes(pool.digests[0], keys)
        present = [True] * len(keys)
        for digest in pool.digests:
            with self._patience():
                known = self._store.contains(of_first.under(digest))
            present = [a and b for a, b in zip(present, known, strict=True)]
        return present

    # -- v1 and v2: pages of host pools ----------------------------------------------------------------------------

    @_answering(_all_false)
    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        return self._get_pages(_KV, keys, host_indices)

    @_answering(_all_false)
    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        return self._set_pages(_KV, keys, host_indices)

    @_answering(_transfers_false)
    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[Any, list[bool]]:
        return {
            transfer.name: self._get_pages(_name_of(transfer.name), transfer.keys or [], transfer.host_indices)
            for transfer in transfers
        }

    @_answering(_transfers_false)
    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[Any, list[bool]]:
        return {
            transfer.name: self._set_pages(_name_of(transfer.name), transfer.keys or [], transfer.host_indices)
            for transfer in transfers
        }

    def _get_pages(self, name: str, keys: Sequence[str], host_indices: torch.Tensor | None) -> list[bool]:
        return self._move_pages(name, keys, host_indices, self._read, self._prefetched)

    def _set_pages(self, name: str, keys: Sequence[str], host_indices: torch.Tensor | None) -> list[bool]:
        return self._move_pages(name, keys, host_indices, self._write, self._backed_up)

    @_answering(lambda _name, keys, *_: [False] * _length(keys))
    def _move_pages(
        self,
        name: str,
        keys: Sequence[str],
        host_indices: torch.Tensor | None,
        move: Callable[[PageBatch], list[bool]],
        samples: TransferSamples,
    ) -> list[bool]:
        """Move pages between the store and a registered host pool; which of them went well."""
        pool = self._usable_pool(name)
        if pool is None:
            return [False] * len(keys)
        if pool.pages is None:
            return [True] * len(keys)
        batch, owners = self._batch(pool, pool.pages, keys, host_indices)
        started = time.perf_counter()
        moved = move(batch)
        seconds = time.perf_counter() - started
        samples.record(len(keys), batch.bytes_of(True, moved), seconds)
        return moved if owners is None else _per_page(len(keys), len(pool.digests), owners, moved)

    def _read(self, batch: PageBatch) -> list[bool]:
        hit, results = GetResult.HIT, self._store.get(batch)
        if results.count(hit) == len(results):
            return [True] * len(results)
        return [result is hit for result in results]

    def _write(self, batch: PageBatch) -> list[bool]:
        return [result.durable for result in self._store.set(batch)]

    def _batch(
        self, pool: _BoundPool, pages: HostPages, keys: Sequence[str], host_indices: torch.Tensor | None
    ) -> tuple[PageBatch, list[int] | None]:
        """The batch of all parts of all sound pages, and for each of its entries the page it belongs to.

        None instead where entries and pages are the same, as they mostly are.
        """
        numbers, sound = pages.page_numbers(host_indices, len(keys))
        owners = None
        if sound is not None:
            given = host_indices.numel() if host_indices is not None else "no"
            wanted = f"{len(keys)} pages of {pages.page_size} in {pool.name}, {sound.sum()} of them sound"
            self._report_failure("host_indices", ValueError(f"{given} indices for {wanted}"))
            owners = np.flatnonzero(sound).tolist()
            numbers, keys = numbers[sound], [keys[page] for page in owners]
        of_first = PageKeys.of_hashes(pool.digests[0], keys)
        parts = len(pool.digests)
        buffers = [pages.memory_of(numbers, part) for part in range(parts)]
        if parts == 1:
            sizes = [pages.page_bytes] * len(keys)
            return PageBatch(of_first, buffers[0], sizes), owners
        store_keys = [
            key for page in zip(*[of_first.under(digest) for digest in pool.digests], strict=True) for key in page
        ]
        sizes = [pages.part_bytes(part) for part in range(parts)] * len(keys)
        # The parts of a page one after the other, as its keys.
        of_parts = [segments for page in zip(*buffers, strict=True) for segments in page]
        return PageBatch(store_keys, of_parts, sizes), [
            page for page in (range(len(keys)) if owners is None else owners) for _ in range(parts)
        ]

    # -- a decode node's own writer (pd/) --------------------------------------------------------------------------

    @_answering(_all_false)
    def stored(self, keys: list[str]) -> list[bool]:
        """Which pages need not be written again [pd writer]."""
        pool = self._usable_pool(_KV)
        if pool is None:
            return [False] * len(keys)
        of_first = PageKeys.of_hashes(pool.digests[0], keys)
        per_part = [self._store.stored(of_first.under(digest)) for digest in pool.digests]
        return [all(known) for known in zip(*per_part, strict=True)]

    @_answering(lambda *_, **__: 0)
    def stored_leading(self, keys: list[str]) -> int:
        """Leading pages of which a prefill node finds every part in the pool [pd writer]."""
        pool = self._usable_pool(_KV)
        if pool is None:
            return 0
        of_first = PageKeys.of_hashes(pool.digests[0], keys)
        return min(
            (self._store.count_leading_in_pool(of_first.under(digest)) for digest in pool.digests),
            default=0,
        )

    @_answering(lambda keys, *_, **__: [SetResult.ERROR] * _length(keys))
    def store_pages(self, keys: list[str], host_indices: torch.Tensor) -> list[SetResult]:
        """Like ``batch_set_v1``, with each page's result [pd writer]."""
        pool = self._usable_pool(_KV)
        if pool is None or pool.pages is None:
            return [SetResult.REJECTED] * len(keys)
        batch, owners = self._batch(pool, pool.pages, keys, host_indices)
        started = time.perf_counter()
        results = self._store.set(batch)
        seconds = time.perf_counter() - started
        stored = sum(size for size, result in zip(batch.sizes, results, strict=True) if result.durable)
        self._backed_up.record(len(keys), stored, seconds)
        worst: list[SetResult | None] = [None] * len(keys)
        for owner, result in zip(range(len(keys)) if owners is None else owners, results, strict=True):
            before = worst[owner]
            if before is None or not result.durable:
                worst[owner] = result
        return [SetResult.ERROR if result is None else result for result in worst]

    # -- hints from decode to prefill nodes (hints/) ---------------------------------------------------------------

    def hint_sender(self, metrics: TierMetrics) -> HintSender | None:
        """What announces on a decode node; None unless hints are on. One rank speaks for all [pd, scheduler]."""
        hints, ranks = self._config.pd.hints, self._storage_config
        if not hints.enabled or ranks.tp_rank or ranks.pp_rank:
            return None
        board, limits = self._hint_board(self._config.store_locations)
        return HintSender(board, lambda: self._hint_scope() or b"", limits, hints.max_pages, metrics)

    def _hint_receiver(self) -> HintReceiver | None:
        hints = self._config.pd.hints
        if not hints.enabled or self._config.role != "prefill":
            return None
        board, limits = self._hint_board(self._config.retrieve_locations)
        return HintReceiver(board, self._bring_inward, self._hint_scope, limits, hints.max_pages, hints.interval)

    def _hint_board(self, locations: Sequence[str]) -> tuple[Callable[[], HintBoard], BoardLimits]:
        hints = self._config.pd.hints
        over = hints_over(hints, locations) or ""
        return lambda: board_among(self._store.tiers, over), BoardLimits(
            hints.keep, longest_hint(hints.max_pages), hints.lifetime
        )

    def _hint_scope(self) -> bytes | None:
        """Equal on nodes whose pages are of the same weights and size; None before pools and weights are known."""
        pool = self._usable_pool(_KV)
        if pool is None or not pool.identities:
            return None
        identity = pool.identities[0]
        common = replace(identity.pool, kind="hint", layout="", segments=(), geometry=())
        return PageIdentity(identity.model, common, Shard()).digest()

    def _bring_inward(self, page_hashes: Sequence[bytes]) -> Counter[str]:
        """Pages that are likely to be asked for soon, to the tier ``promote_to`` [hints' thread]."""
        pool = self._usable_pool(_KV)
        outcomes: Counter[str] = Counter()
        if pool is None or pool.pages is None:
            return outcomes
        at_once = max(1, min(_LOOK_UP_PORTION, _HINT_MEMORY // pool.pages.page_bytes))
        for first in range(0, len(page_hashes), at_once):
            if self._unavailable or outcomes["absent"] or outcomes["dropped"]:
                outcomes["dropped"] += len(page_hashes) - first
                break
            for digest in pool.digests:
                keys = [digest + page_hash for page_hash in page_hashes[first : first + at_once]]
                outcomes.update(self._store.bring_inward(keys))
        return outcomes

    # -- generic calls: flat tensors -------------------------------------------------------------------------------

    @_answering(lambda *_, **__: None)
    def get(self, key: str, target_location: Any | None = None, target_sizes: Any | None = None) -> torch.Tensor | None:
        return self.batch_get([key], [target_location], [target_sizes])[0]

    @_answering(_all_none)
    def batch_get(
        self, keys: list[str], target_locations: Any | None = None, target_sizes: Any | None = None
    ) -> list[torch.Tensor | None]:
        return self._flat_transfer(keys, target_locations, target_sizes, self._read)

    @_answering(lambda *_, **__: False)
    def set(
        self,
        key: str,
        value: Any | None = None,
        target_location: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        return self.batch_set([key], [value], [target_location], [target_sizes])

    @_answering(lambda *_, **__: False)
    def batch_set(
        self,
        keys: list[str],
        values: Any | None = None,
        target_locations: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        sources = values if values is not None and any(value is not None for value in values) else target_locations
        done = self._flat_transfer(keys, sources, target_sizes, self._write)
        return len(done) == len(keys) and all(value is not None for value in done)

    def _flat_transfer(
        self,
        keys: Sequence[str],
        tensors: Sequence[Any] | None,
        sizes: Sequence[Any] | None,
        move: Callable[[PageBatch], list[bool]],
    ) -> list[Any]:
        """Move the bytes of one tensor (or address and size) per key; the tensor where it went well, else None."""
        done: list[Any] = [None] * len(keys)
        if self._unavailable:
            return done
        digest = self._flat_pool().digests[0]
        positions: list[int] = []
        buffers: list[list[memoryview]] = []
        kept_alive: list[Any] = []
        for position in range(min(len(keys), len(tensors or ()))):
            target = tensors[position] if tensors is not None else None
            size = sizes[position] if sizes is not None and position < len(sizes) else None
            segments: list[memoryview] | None = None
            if isinstance(target, torch.Tensor):
                if move == self._write:
                    target = target.detach().cpu().contiguous()
                kept_alive.append(target)
                segments = tensor_segments(target)
            elif isinstance(target, int) and isinstance(size, int) and size > 0:
                segments = address_segments([target], [size])
            if segments is not None:
                positions.append(position)
                buffers.append(segments)
        moved = move(PageBatch([digest + page_hash_bytes(keys[position]) for position in positions], buffers))
        for position, ok in zip(positions, moved, strict=True):
            if ok and tensors is not None:
                done[position] = tensors[position]
        return done

    def _flat_pool(self) -> _BoundPool:
        """The identity of pages that come as one flat tensor (``interface_v1`` off): another byte order than v1."""
        if self._flat is None:
            with self._state_lock:
                kv = self._pools.get(_KV)
                if kv is not None and kv.identities:
                    pool = replace(kv.identities[0].pool, kind=f"flat:{kv.identities[0].pool.kind}", segments=())
                    shards = [kv.identities[0].shard]
                else:
                    pool = PoolIdentity(name=_KV, kind="flat", dtype="", layout="flat", page_size=0, segments=())
                    shards = self._shards(_KV, None, 1)
                self._flat = self._under_model("flat", None, pool, shards)
            self._register(self._flat)
        return self._flat

    # -- weights updates -------------------------------------------------------------------------------------------

    def suspend(self, reason: str) -> None:
        """Answer everything as a miss and store nothing until ``resume``; called by hooks [scheduler]."""
        self._suspended_because = reason

    def resume(self) -> None:
        self._suspended_because = None

    @property
    def flushes_with_cache(self) -> bool:
        """Whether SGLang's flush empties the queues in front of this backend; not so on a decode node's offload."""
        return hasattr(self, "registered_pools")

    @property
    def suspended_because(self) -> str | None:
        return self._suspended_because

    def advance_weights_epoch(self, nonce: str) -> None:
        """The weights have changed: from now on every page belongs to another identity [scheduler].

        ``nonce`` must be equal on all ranks of this deployment and different for every update of any deployment.
        """
        epoch = self._epoch_after(nonce)
        self._change_model(weights_epoch=epoch)
        logger.info("hicache_ext: weights updated, epoch is now %s", epoch)

    # -- administration --------------------------------------------------------------------------------------------

    @_answering(lambda *_, **__: False)
    def clear(self) -> bool:
        """Remove the pages of this rank's own identities, nobody else's. Does not wait for the disk."""
        with self._state_lock:
            if not self._identified:
                # What is to be cleared has no name yet.
                self._clear_when_identified = True
                return True
        with self._patience():
            self._store.clear(sorted(self._own_digests))
        return True

    @_answering(lambda *_, **__: None)
    def get_stats(self) -> StorageMetrics | None:
        if self._prefetched.empty and self._backed_up.empty:
            return None
        prefetch_pages, prefetch_bandwidth = self._prefetched.drain()
        backup_pages, backup_bandwidth = self._backed_up.drain()
        return StorageMetrics(
            prefetch_pgs=prefetch_pages,
            backup_pgs=backup_pages,
            prefetch_bandwidth=prefetch_bandwidth,
            backup_bandwidth=backup_bandwidth,
        )

    @_answering(lambda *_, **__: None)
    def close(self) -> None:
        self._closed = True
        detach(self)
        if self._hints is not None:
            self._hints.close(_HINTS_TIMEOUT)
        if self._config_file is not None:
            self._config_file.close()
        self._store.close()
        self._exporter.close()

    def export_also(self, metrics: TierMetrics) -> None:
        """Export the counts of something beside the tiers together with theirs, as long as this backend lives."""
        self._also_counted.append(metrics)

    def _export_sources(self) -> list[TierMetrics]:
        self._failures.set_level("serving", "", float(not self._unavailable))
        beside = [self._failures, kernel_metrics, *self._also_counted]
        if self._pull_rule is not None:
            beside.append(self._pull_rule.metrics)
        if self._hints is not None:
            beside.append(self._hints.metrics)
        tiers = self._store.tiers
        return [*beside, *self._reports.sources(tiers), self._store.metrics, *[tier.metrics for tier in tiers]]

    def _warn_about_missing_hooks(self) -> None:
        if self._facts.model_path is None:
            return
        unused = {ADAPTERS: not self._facts.lora, DECODE_WRITER: self._config.role == "prefill"}
        for sentence in not_in_force([feature for feature in FEATURES if not unused.get(feature)]).values():
            logger.warning("hicache_ext: %s", sentence)

    def _patience(self) -> AbstractContextManager[None]:
        """Around a call of the store: on the scheduler's thread, guards answer it from what is known."""
        return answering_at_once() if threading.get_ident() == self._scheduler else _UNHURRIED

    def _usable_pool(self, name: str) -> _BoundPool | None:
        """A registered pool under the identity of now; None where nothing may be stored or served.

        In this order: when the weights become known, pools get their identities before they may be used.
        """
        return None if self._unavailable else self._pools.get(name)

    @property
    def _unavailable(self) -> bool:
        return self._closed or not self._identified or self._suspended_because is not None

    def _report_failure(self, call: str, error: BaseException) -> None:
        """Count trouble that SGLang must not see; log it with its traceback, at most once a second."""
        self._failures.add("failure", call)
        now = time.monotonic()
        if now - self._last_failure_log >= 1.0:
            self._last_failure_log = now
            logger.error("hicache_ext: %s failed and is answered as a miss: %s", call, error, exc_info=error)


def _probe_keys(pool: _BoundPool, keys: Sequence[str], count: int) -> list[bytes]:
    """Store keys of the first ``count`` pages, of their first parts."""
    return [pool.digests[0] + page_hash_bytes(key) for key in keys[:count]]


def _per_page(pages: int, parts: int, owners: Sequence[int], succeeded: Sequence[bool]) -> list[bool]:
    """A page succeeded when all its parts did; pages without entries did not."""
    good = [0] * pages
    for owner, ok in zip(owners, succeeded, strict=True):
        good[owner] += ok
    return [count == parts for count in good]


def _process_labels(config: HiCacheStorageConfig) -> dict[str, str]:
    """The model, and which of a server's processes counts; like the labels of SGLang's own metrics."""
    ranks = ("tp_rank", "pp_rank", "dp_rank", "attn_cp_rank", "dcp_rank")
    return {
        "model_name": config.model_name or "",
        **{rank: str(getattr(config, rank, None) or 0) for rank in ranks},
    }


def _name_of(pool_name: Any) -> str:
    return str(getattr(pool_name, "value", pool_name))

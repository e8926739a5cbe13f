"""The host pools that SGLang registered, and the identities of their pages under the current weights.

A page may be stored or served only while the weights are identified, SGLang's caches hold nothing of older weights, and
the backend is open. Threads: the scheduler registers pools and reports updates, a thread that reads files reports the
weights, and any thread looks up pools.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName

from hicache_ext.config import HicacheExtConfig
from hicache_ext.errors import UnsupportedError
from hicache_ext.page.fingerprint import ModelFingerprint
from hicache_ext.page.identity import ModelIdentity, PageIdentity, PoolIdentity, Shard
from hicache_ext.sglang import model_weights, process
from hicache_ext.sglang.host_pool import AnyPages, CopiedPages, is_logical_anchor, pages_of
from hicache_ext.sglang.launch_arguments import LaunchFacts, logical_dtype, unicode_text
from hicache_ext.sglang.model_weights import problem_of, records_directory, weights_of_server
from hicache_ext.sglang.plugin import not_in_force
from hicache_ext.sglang.releases import (
    dcp_shard,
    installed_release,
    kv_layout_facts,
    left_out_of_host_memory,
    pool_fact,
    rank_replicated,
)
from hicache_ext.sglang.used_names import ADAPTERS, DRAFTS

logger = logging.getLogger(__name__)

KV: str = PoolName.KV.value
ONE_FOR_ALL = ("tp_rank", "pp_rank", "attn_cp_rank", "dcp_rank")
"""Ranks of a replica: one process acts for all processes that differ only in these."""


@dataclass(frozen=True, slots=True)
class BoundPool:
    """A registered host pool: its memory, and one identity per part."""

    name: str
    pages: AnyPages | None
    """None for a logical anchor, which has no bytes to store."""
    identities: tuple[PageIdentity, ...]
    digests: tuple[bytes, ...]
    """Digests of the identities; meaningless before the weights are identified."""


class ServedPools:
    """See the module docstring. ``register`` adds an identity to the tiers, ``clear`` removes this rank's pages."""

    def __init__(
        self,
        ranks: Any,
        config: HicacheExtConfig,
        facts: LaunchFacts,
        register: Callable[[bytes, dict[str, Any]], None],
        clear: Callable[[], bool],
    ) -> None:
        """``ranks`` is SGLang's HiCacheStorageConfig. Raises UnsupportedError where the weights cannot be read."""
        self.bound: dict[str, BoundPool] = {}
        self.unserved: dict[str, str] = {}
        """Registered pools that cannot be served -> reason. While there are any, nothing is served."""
        self.suspended = not model_weights.flushed
        """While set, every lookup is a miss and nothing is stored [set by hooks, scheduler]."""
        self.closed = self.distrusted = False
        self._ranks = ranks
        self._config = config
        self._facts = facts
        self._register_identity = register
        self._clear = clear
        self._clear_when_identified = False
        self._own_digests: set[bytes] = set()
        self._lock = threading.Lock()
        self.model = self._model_identity()
        self.weights = _weights_to_identify(facts, config)
        """Weights of the target and of all drafts with files of their own; empty if none are to be identified."""
        self.identified = not self.weights

    def start(self) -> None:
        """Begin to identify the weights, if required."""
        handler = weakref.WeakMethod(self._weights_done)  # threads that read files must not keep the backend alive

        def model_done() -> None:
            if (call := handler()) is not None:
                call()

        for model in self.weights:
            model.start(records_directory(self._config))
        for model in self.weights:
            model.when_done(model_done)

    @property
    def unavailable(self) -> bool:
        """Whether nothing may be stored or served."""
        stopped = self.closed or self.distrusted or self.suspended
        return stopped or not self.identified or bool(self.unserved)

    def usable(self, name: str) -> BoundPool | None:
        """Return a registered pool under its current identity; None while nothing may be stored or served.

        The order of the checks matters: pools get their identities before ``identified`` allows their use.
        """
        return None if self.unavailable else self.bound.get(name)

    @property
    def page_size(self) -> int:
        """Tokens per page of KV; 0 while unknown."""
        kv = self.bound.get(KV)
        physical = 0 if kv is None or kv.pages is None else kv.pages.page_size
        return int(getattr(self._ranks, "logical_page_size", None) or physical)

    def try_bind(self, name: str, pool: Any) -> None:
        """Bind a further host pool, at any time. Never raises: SGLang registers some while it already serves.

        A pool that cannot be served is named in the log and in the metrics. As long as it exists nothing is stored or
        served: SGLang restores no prefix without all of its pools, so the others would be kept in vain.
        """
        try:
            self.bind(name, pool)
        except Exception as error:  # noqa: BLE001 - a pool of an unknown kind may raise anything
            reason = str(error) if isinstance(error, UnsupportedError) else f"{type(error).__name__}: {error}"
            self.bound.pop(name, None)
            if self.unserved.get(name) != reason:
                logger.error("hicache_ext: nothing is stored or served, for lack of pool %s: %s", name, reason)
            self.unserved[name] = reason
        else:
            self.unserved.pop(name, None)

    def bind(self, name: str, pool: Any) -> None:
        """Bind a host pool of SGLang. Raises UnsupportedError for one that cannot be served."""
        bound = self.bound.get(name)
        if bound is not None and bound.pages is not None and bound.pages.pool is pool:
            return
        if is_logical_anchor(pool):
            self.bound[name] = BoundPool(name, None, (), ())
            return
        target = process.target()
        if target is not None and (lost := left_out_of_host_memory(target.runner)) is not None:
            reason = f"SGLang {installed_release()} does not keep {lost}, so that restored prompts get wrong answers"
            raise UnsupportedError(f"host pool {name!r}", reason, "use SGLang 0.5.22 or newer, or no storage backend")
        shards = self._shards(name, pool)
        parts = len(shards)
        pages = pages_of(pool, name, parts)
        stored = str(getattr(pool, "dtype", torch.uint8)).removeprefix("torch.")
        dtype = logical_dtype(stored, self._facts.kv_cache_dtype, self._config.kv_dtype)
        if dtype is None:
            raise UnsupportedError(
                f"host pool {name!r}",
                f"its {stored} bytes may be fp8_e4m3 or fp8_e5m2 and no launch argument tells",
                "set hicache_ext.kv_dtype",
            )
        logger.info(
            "hicache_ext: pool %s, %s, %s, %d bytes a page in %d segments%s",
            name,
            dtype,
            getattr(pool, "layout", "?"),
            pages.page_bytes,
            len(pages.segment_sizes) * parts,
            ", through copies" if isinstance(pages, CopiedPages) else "",
        )
        with self._lock:
            described = pages.describe(dtype)
            if target is not None:
                described = replace(described, geometry=(*described.geometry, *kv_layout_facts(target.runner)))
            self.bound[name] = bound = self._bound_pool(name, pages, described, shards)
            identified = self.identified
        for codec in sorted(self._config.lossy_codecs):
            from hicache_ext.page.transforms.codec import rows_of
            from hicache_ext.page.transforms.numbers import Rows

            rows = rows_of(bound.identities[0].document(), codec)
            how = f"in codes of 8 bits, a scale for {rows.length} numbers" if isinstance(rows, Rows) else rows
            logger.info("hicache_ext: pool %s with codec %s: %s", name, codec, how)
        if identified:
            self._register(bound)

    def on_every_rank(self, name: str) -> bool:
        """Return whether each tensor-parallel rank has its own pages in this pool."""
        bound = self.bound.get(name)
        return bound is not None and any(identity.shard.tp[1] > 1 for identity in bound.identities)

    def digests_to_clear(self) -> list[bytes] | None:
        """Return the digests of this rank's identities; None, and clear later, until the weights are identified."""
        with self._lock:
            if not self.identified:
                self._clear_when_identified = True
                return None
        return sorted(self._own_digests)

    def advance_weights_epoch(self, nonce: str) -> None:
        """Switch every page to another identity, because the weights have changed [scheduler].

        ``nonce`` must be equal on all ranks of this deployment and different for every update of any deployment.
        """
        epoch = self._epoch_after(nonce)
        with self._lock:
            bounds = self._update_model(weights_epoch=epoch)
        for bound in bounds:
            self._register(bound)
        logger.info("hicache_ext: weights updated, epoch is now %s", epoch)

    def _weights_done(self) -> None:
        """Handle weights that were identified or cannot be, and any later change of that [thread that read them]."""
        if self.closed or not all(model.done.is_set() for model in self.weights):
            return
        with self._lock:
            # Read the digests before the problem: a later problem triggers its own call, which waits for this lock.
            fingerprint, *drafts = [str(model.digest) for model in self.weights]
            draft = "".join(drafts) if len(drafts) < 2 else hashlib.sha256("\0".join(drafts).encode()).hexdigest()[:32]
            problem = problem_of(self.weights)
            if problem is None:
                self._update_model(fingerprint=fingerprint, draft=draft)
                bounds = list(self.bound.values())
            self.identified = problem is None
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
            self._clear()
        logger.info("hicache_ext: weights %s%s", fingerprint, f", draft {draft}" if draft else "")

    def distrust(self) -> bool:
        """Stop storing and serving, and remove this rank's pages; return False if some stay for now."""
        self.distrusted = True
        return self._clear()

    def _update_model(self, **facts: str) -> list[BoundPool]:
        """Update the model, with the lock held; return the pools to register once the lock is released."""
        self.model = replace(self.model, **facts)
        for name, bound in list(self.bound.items()):
            if bound.identities:
                shards = [identity.shard for identity in bound.identities]
                self.bound[name] = self._bound_pool(name, bound.pages, bound.identities[0].pool, shards)
        return list(self.bound.values()) if self.identified else []

    def _bound_pool(self, name: str, pages: AnyPages | None, pool: PoolIdentity, shards: Sequence[Shard]) -> BoundPool:
        """Return a pool with identities under the current weights, which the caller must register."""
        identities = tuple(PageIdentity(self.model, pool, shard) for shard in shards)
        return BoundPool(name, pages, identities, tuple(identity.digest() for identity in identities))

    def _register(self, bound: BoundPool) -> None:
        """Register the identities of a pool's pages with the tiers; call only after the weights are identified."""
        for identity, digest in zip(bound.identities, bound.digests, strict=True):
            self._own_digests.add(digest)
            self._register_identity(digest, identity.document())
            logger.info("hicache_ext: pages of pool %s have identity %s", bound.name, digest.hex())

    def _shards(self, name: str, pool: Any) -> list[Shard]:
        """Return the shard of each part of a page: pages are split by heads so that deployments of other TP sizes find
        their parts (tp_lcm_size), or have one part."""
        ranks = self._ranks
        common = Shard(
            pp=(ranks.pp_rank, ranks.pp_size),
            cp=(ranks.attn_cp_rank, ranks.attn_cp_size),
            dcp=dcp_shard(ranks, pool),
        )
        replicated = rank_replicated(ranks) and name != PoolName.MAMBA.value
        if replicated and ranks.tp_size > 1 and pool_fact(pool, "v_head_dim") is not None:
            missing = not_in_force([DRAFTS])
            if name == KV or missing:
                raise UnsupportedError(
                    f"host pool {name!r} ({type(pool).__name__})",
                    missing.get(DRAFTS, "its heads differ per TP rank, but SGLang writes them from rank 0 only"),
                    "use --tp 1, or no draft model, or no storage backend",
                )
            replicated = False
        if replicated:
            # SGLang gathers latents: each rank of a context-parallel group has those of all tokens. This was not
            # checked for other contents of its pools (states, windows).
            latents = pool_fact(pool, "kv_lora_rank") is not None and not self._facts.parts_of_pages
            return [replace(common, cp=(0, 1)) if latents and common.dcp[1] == 1 else common]
        lcm = ranks.tp_lcm_size
        if lcm and getattr(pool, "layout", "") == "page_head" and name == KV:
            parts = int(lcm) // int(ranks.tp_size)
            return [replace(common, tp=(ranks.tp_rank * parts + part, lcm)) for part in range(parts)]
        if name == KV and ranks.tp_rank == 0 and self._config.role in ("prefill", "decode"):
            words = "hicache_ext: only nodes of TP %d find each other's pages; for others, %s on all nodes"
            logger.info(words, ranks.tp_size, "--hicache-mem-layout page_head and tp_lcm_size")
        return [replace(common, tp=(ranks.tp_rank, ranks.tp_size))]

    def _model_identity(self) -> ModelIdentity:
        model = self._config.model
        return ModelIdentity(
            id=unicode_text(model.id or self._ranks.model_name or ""),
            revision=unicode_text(model.revision or self._facts.revision or ""),
            fingerprint="" if model.fingerprint in ("auto", "off") else model.fingerprint,
            weights_epoch=self._epoch_after(model_weights.updated_to),
            compute=self._facts.compute,
        )

    def _epoch_after(self, update: str | None) -> str:
        configured = str(self._config.model.weights_epoch)
        return configured if update is None else f"{configured}+{update}"


def _weights_to_identify(facts: LaunchFacts, config: HicacheExtConfig) -> list[ModelFingerprint]:
    """Return the weights to identify; none outside a server, or if the configuration already identifies them.

    Raises UnsupportedError if they cannot be read.
    """
    if facts.model_path is None:
        return []
    if facts.lora and (missing := not_in_force([ADAPTERS])):
        remedy = "leave SGLANG_PLUGINS unset, or let it name hicache_ext"
        raise UnsupportedError("--enable-lora", missing[ADAPTERS], remedy)
    if config.model.fingerprint != "auto" or model_weights.updated_to is not None:
        # After an update the files no longer hold the weights, but its epoch is unique.
        return []
    weights = weights_of_server(facts)
    if (problem := problem_of(weights)) is not None:
        raise UnsupportedError(
            f"the model {facts.model_path!r}",
            f"its weights cannot be identified: {problem}",
            "set hicache_ext.model.fingerprint to a text that changes whenever the weights do",
        )
    return weights

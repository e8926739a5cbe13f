"""Events for KV-aware routers (storage/serving/events.py), for the pages of this server's KV pool, in SGLang's structs.

SGLang tells what is on the device and in host memory, and nothing of storage. A block hash is the first 8 bytes of a
page hash, as there. A storage backend is never given the tokens of a page: ``token_ids`` is empty, no parent is named.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from hicache_ext.config import HicacheExtConfig
from hicache_ext.runtime.log_limit import LimitedLog
from hicache_ext.sglang.features import EVENTS
from hicache_ext.sglang.self_check import check_installed, features_off
from hicache_ext.sglang.served_pools import KV, BoundPool, ServedPools
from hicache_ext.storage.serving.events import Blocks, Change, Encode, EventPublisher, Kind, Media, blocks_in
from hicache_ext.storage.tiering.reload import ReloadableStore

logger = logging.getLogger(__name__)


def kv_events(
    config: HicacheExtConfig, ranks: Any, pools: ServedPools, store: Callable[[], ReloadableStore]
) -> EventPublisher | None:
    """The publisher of this process; None where events are off, or where another rank speaks for this one.

    ``ranks`` is SGLang's HiCacheStorageConfig. Raises ConfigError, MissingPackageError.
    """
    if config.events is None or any(getattr(ranks, rank, 0) for rank in _RANKS):
        return None
    if (lacking := features_off(check_installed()).get(EVENTS)) is not None:
        logger.warning("hicache_ext: SGLang lacks %s: %s", lacking, EVENTS.loss)
        return None
    from sglang.srt.disaggregation.kv_events import StorageMedium

    media = Media(private=StorageMedium.DISK.value, shared=StorageMedium.EXTERNAL.value)
    silent = [name for name in config.retrieve_locations if not config.tiers[name].tells_pages]
    if silent:
        logger.warning(
            "hicache_ext: KV events tell nothing of %s: they do not say which pages they hold (docs/pd.md)",
            ", ".join(silent),
        )

    log = LimitedLog(logger, math.inf)

    def look() -> Blocks:
        pool = pools.usable(KV)
        if pool is None:
            return {}
        if pool.pages is None:
            words = "hicache_ext: KV events tell nothing: the KV pool of this model has no bytes of its own"
            log.log(logging.WARNING, "anchor", words)
        return blocks_in(store().arrangement.retrieve, pool.digests, media)

    replica = _replica(ranks)
    return EventPublisher(config.events, replica, look, _encoder(ranks, lambda: pools.bound.get(KV), replica))


_RANKS = ("tp_rank", "pp_rank", "attn_cp_rank", "dcp_rank")


def _replica(ranks: Any) -> int:
    """Which of the server's KV caches this process has, as SGLang counts them for its own publishers' ports."""
    try:
        from sglang.srt.disaggregation.kv_events import select_kv_publisher_dp_rank
        from sglang.srt.runtime_context import get_parallel

        parallel = get_parallel()
        return int(select_kv_publisher_dp_rank(parallel.attn_dp_size, parallel.attn_dp_rank, parallel.dp_rank))
    except Exception as error:  # noqa: BLE001 - outside a server SGLang raises whatever it likes here
        logger.debug("which replica this is, is not known: %s", error)
        return int(getattr(ranks, "dp_rank", 0) or 0)


def _encoder(ranks: Any, pool: Callable[[], BoundPool | None], replica: int) -> Encode:
    import msgspec
    from sglang.srt.disaggregation.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

    encoder = msgspec.msgpack.Encoder()

    def block_size() -> int:
        """Tokens of a page."""
        bound = pool()
        logical = getattr(ranks, "logical_page_size", None)
        return int(logical or (0 if bound is None or bound.pages is None else bound.pages.page_size))

    def event(change: Change) -> Any:
        if change.kind is Kind.CLEARED:
            return AllBlocksCleared()
        if change.kind is Kind.REMOVED:
            return BlockRemoved(block_hashes=change.blocks.tolist(), medium=change.medium)
        return BlockStored(
            block_hashes=change.blocks.tolist(),
            parent_block_hash=None,
            token_ids=[],
            block_size=block_size(),
            lora_id=None,
            medium=change.medium,
        )

    def encode(changes: Sequence[Change]) -> bytes:
        batch = KVEventBatch(ts=time.time(), events=[event(change) for change in changes], attn_dp_rank=replica)
        return encoder.encode(batch)

    return encode

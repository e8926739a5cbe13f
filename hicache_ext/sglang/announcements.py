"""What one process of a server publishes about its pages: KV events for routers, and a recording."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from hicache_ext.config import HicacheExtConfig
from hicache_ext.config.model import EventsConfig
from hicache_ext.runtime.log_limit import LimitedLog
from hicache_ext.sglang.launch_arguments import unicode_text
from hicache_ext.sglang.served_pools import KV, ServedPools
from hicache_ext.sglang.used_names import EVENTS, check_installed, lacking
from hicache_ext.storage.serving.events import Blocks, Change, Encode, EventPublisher, Kind, blocks_in
from hicache_ext.storage.tiering.observers import begin_recording
from hicache_ext.storage.tiering.recording import Recorder
from hicache_ext.storage.tiering.reload import ReloadableStore

logger = logging.getLogger(__name__)


# -- KV events ---------------------------------------------------------------------------------------------------------
# Events for KV-aware routers (storage/serving/events.py) about the pages of this server's KV pool, in SGLang's structs.
#
# SGLang itself reports what is on the device and in host memory, but nothing about storage. A block hash is the first 8
# bytes of a page hash, as in SGLang's own events. A storage backend never sees the tokens of a page, so ``token_ids``
# is empty, and no parent is named.


def kv_events(
    config: HicacheExtConfig, events: EventsConfig, ranks: Any, pools: ServedPools, store: ReloadableStore
) -> EventPublisher | None:
    """Return the publisher of this process; None if this release has no events.

    ``ranks`` is SGLang's HiCacheStorageConfig. Raises ConfigError, MissingPackageError.
    """
    if (words := lacking(check_installed(), EVENTS)) is not None:
        logger.warning("hicache_ext: SGLang lacks %s: %s", words, EVENTS.loss)
        return None
    from sglang.srt.disaggregation.kv_events import StorageMedium

    media = {"private": StorageMedium.DISK.value, "shared": StorageMedium.EXTERNAL.value}
    silent = [name for name in config.retrieve_locations if not config.tiers[name].tells_pages]
    if silent:
        logger.warning(
            "hicache_ext: KV events tell nothing of %s: they do not say which pages they hold (docs/pd.md)",
            ", ".join(silent),
        )

    log = LimitedLog(logger, math.inf)

    def current_blocks() -> Blocks:
        pool = pools.usable(KV)
        if pool is None:
            return {}
        if pool.pages is None:
            words = "hicache_ext: KV events tell nothing: the KV pool of this model has no bytes of its own"
            log.log(logging.WARNING, "anchor", words)
        return blocks_in(store.arrangement.retrieve, pool.digests, **media)

    replica = _replica(ranks)
    return EventPublisher(events, replica, current_blocks, _encoder(lambda: pools.page_size, replica))


def _replica(ranks: Any) -> int:
    """Return the number of this process's KV cache, as SGLang counts them for its own publishers' ports."""
    try:
        from sglang.srt.disaggregation.kv_events import select_kv_publisher_dp_rank
        from sglang.srt.runtime_context import get_parallel

        parallel = get_parallel()
        return int(select_kv_publisher_dp_rank(parallel.attn_dp_size, parallel.attn_dp_rank, parallel.dp_rank))
    except Exception as error:  # noqa: BLE001 - outside a server SGLang may raise anything here
        logger.debug("which replica this is, is not known: %s", error)
        return int(getattr(ranks, "dp_rank", 0) or 0)


def _encoder(page_size: Callable[[], int], replica: int) -> Encode:
    import msgspec
    from sglang.srt.disaggregation.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

    encoder = msgspec.msgpack.Encoder()

    def event(change: Change) -> Any:
        if change.kind is Kind.CLEARED:
            return AllBlocksCleared()
        if change.kind is Kind.REMOVED:
            return BlockRemoved(block_hashes=change.blocks.tolist(), medium=change.medium)
        return BlockStored(
            block_hashes=change.blocks.tolist(),
            parent_block_hash=None,
            token_ids=[],
            block_size=page_size(),
            lora_id=None,
            medium=change.medium,
        )

    def encode(changes: Sequence[Change]) -> bytes:
        batch = KVEventBatch(ts=time.time(), events=[event(change) for change in changes], attn_dp_rank=replica)
        return encoder.encode(batch)

    return encode


# -- recordings --------------------------------------------------------------------------------------------------------
# The recorder of a server's lookups, and the facts about its process that go into the files.

_SIZES = ("tp_size", "pp_size", "attn_cp_size", "dcp_size")


def recording_of(config: HicacheExtConfig, ranks: Any, pools: ServedPools) -> Recorder | None:
    """Return the recorder of this process; None if nothing is recorded. ``ranks`` is SGLang's HiCacheStorageConfig.

    Raises ConfigError.
    """

    def facts() -> dict[str, Any]:
        kv = pools.bound.get(KV)
        pages = None if kv is None else kv.pages
        return {
            "model": unicode_text(str(getattr(ranks, "model_name", None) or "")),
            **{name: int(getattr(ranks, name, None) or 1) for name in _SIZES},
            "page_size": pools.page_size,
            "page_bytes": 0 if pages is None else pages.page_bytes,
        }

    return begin_recording(config.record, facts)

"""What one process of a server tells others of its pages: hints to prefill nodes, events to routers, a recording."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hicache_ext.config import HicacheExtConfig
from hicache_ext.config.model import EventsConfig, hints_over
from hicache_ext.page.identity import PageIdentity, Shard
from hicache_ext.runtime.log_limit import LimitedLog
from hicache_ext.sglang.launch_arguments import unicode_text
from hicache_ext.sglang.served_pools import KV, ServedPools
from hicache_ext.sglang.used_names import EVENTS, check_installed, features_off
from hicache_ext.storage.contract.abilities import HintBoard, board_among
from hicache_ext.storage.serving.events import Blocks, Change, Encode, EventPublisher, Kind, blocks_in
from hicache_ext.storage.tiering.observers import begin_recording
from hicache_ext.storage.tiering.recording import Recorder
from hicache_ext.storage.tiering.reload import ReloadableStore

logger = logging.getLogger(__name__)


# -- hints -------------------------------------------------------------------------------------------------------------
# From decode to prefill nodes (storage/serving/hints.py), for the pages of this server's KV pool.

_MEMORY = 32 * 1024 * 1024
"""Bytes of pages that are on their way at once because of a hint."""
_MOST_KEYS = 2048
"""Keys looked up at once."""


def bring_inward(pools: ServedPools, store: ReloadableStore, page_hashes: Sequence[bytes]) -> Counter[str]:
    """Bring pages that are likely to be asked for soon to the tier ``promote_to`` [threads of hints]."""
    pool = pools.usable(KV)
    outcomes: Counter[str] = Counter()
    if pool is None or pool.pages is None:
        return outcomes
    at_once = max(1, min(_MOST_KEYS, _MEMORY // pool.pages.page_bytes))
    for first in range(0, len(page_hashes), at_once):
        if pools.unavailable or outcomes["absent"] or outcomes["dropped"]:
            outcomes["dropped"] += len(page_hashes) - first
            break
        for digest in pool.digests:
            keys = [digest + page_hash for page_hash in page_hashes[first : first + at_once]]
            outcomes.update(store.bring_inward(keys))
    return outcomes


def hint_board(config: HicacheExtConfig, locations: Sequence[str], store: ReloadableStore) -> Callable[[], HintBoard]:
    """What finds the board of the tier over which hints go."""
    over = hints_over(config.pd.hints, locations) or ""
    return lambda: board_among(store.tiers, over)


def hint_scope(pools: ServedPools) -> bytes | None:
    """Equal on nodes whose pages are of the same weights and size; None before pools and weights are known."""
    pool = pools.usable(KV)
    if pool is None or not pool.identities:
        return None
    identity = pool.identities[0]
    common = replace(identity.pool, kind="hint", layout="", segments=(), geometry=())
    return PageIdentity(identity.model, common, Shard()).digest()


# -- KV events ---------------------------------------------------------------------------------------------------------
# For KV-aware routers (storage/serving/events.py), of the pages of this server's KV pool, in SGLang's structs.
#
# SGLang tells what is on the device and in host memory, and nothing of storage. A block hash is the first 8 bytes of a
# page hash, as there. A storage backend is never given the tokens of a page: ``token_ids`` is empty, no parent is
# named.


def kv_events(
    config: HicacheExtConfig, events: EventsConfig, ranks: Any, pools: ServedPools, store: ReloadableStore
) -> EventPublisher | None:
    """The publisher of this process; None where this release has no events.

    ``ranks`` is SGLang's HiCacheStorageConfig. Raises ConfigError, MissingPackageError.
    """
    if (lacking := features_off(check_installed()).get(EVENTS)) is not None:
        logger.warning("hicache_ext: SGLang lacks %s: %s", lacking, EVENTS.loss)
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

    def look() -> Blocks:
        pool = pools.usable(KV)
        if pool is None:
            return {}
        if pool.pages is None:
            words = "hicache_ext: KV events tell nothing: the KV pool of this model has no bytes of its own"
            log.log(logging.WARNING, "anchor", words)
        return blocks_in(store.arrangement.retrieve, pool.digests, **media)

    replica = _replica(ranks)
    return EventPublisher(events, replica, look, _encoder(lambda: pools.page_size, replica))


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
# Which process of a server records what requests ask for, and what it says about itself in the files.

_SIZES = ("tp_size", "pp_size", "attn_cp_size", "dcp_size")


def recording_of(config: HicacheExtConfig, ranks: Any, pools: ServedPools) -> Recorder | None:
    """The recorder of this process; None where nothing is recorded. ``ranks`` is SGLang's HiCacheStorageConfig.

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

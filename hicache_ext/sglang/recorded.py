"""Which process of a server records what requests ask for, and what it says about itself in the files."""

from __future__ import annotations

from typing import Any

from hicache_ext.config import HicacheExtConfig
from hicache_ext.sglang.served_pools import KV, ServedPools
from hicache_ext.storage.tiering.observers import begin_recording
from hicache_ext.storage.tiering.recording import Recorder

_RANKS = ("tp_rank", "pp_rank", "attn_cp_rank", "dcp_rank")
_SIZES = ("tp_size", "pp_size", "attn_cp_size", "dcp_size")


def recording_of(config: HicacheExtConfig, ranks: Any, pools: ServedPools) -> Recorder | None:
    """The recorder of this process; None where nothing is recorded, or where another rank speaks for this one: all
    ranks of a replica are asked for the same pages. ``ranks`` is SGLang's HiCacheStorageConfig. Raises ConfigError."""
    if any(getattr(ranks, rank, 0) for rank in _RANKS):
        return None

    def facts() -> dict[str, Any]:
        kv = pools.bound.get(KV)
        pages = None if kv is None else kv.pages
        return {
            "model": str(getattr(ranks, "model_name", None) or ""),
            **{name: int(getattr(ranks, name, None) or 1) for name in _SIZES},
            "page_size": int(getattr(ranks, "logical_page_size", None) or (0 if pages is None else pages.page_size)),
            "page_bytes": 0 if pages is None else pages.page_bytes * pages.parts,
        }

    return begin_recording(config.record, facts)

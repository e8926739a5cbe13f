"""Hints from decode to prefill nodes (storage/serving/hints/), for the pages of this server's KV pool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hicache_ext.config import HicacheExtConfig
from hicache_ext.config.model import hints_over
from hicache_ext.page.identity import PageIdentity, Shard
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.sglang.served_pools import KV, ServedPools
from hicache_ext.storage.contract.hint_board import BoardLimits, HintBoard, board_among
from hicache_ext.storage.serving.hints.hint import longest as longest_hint
from hicache_ext.storage.serving.hints.receiver import HintReceiver
from hicache_ext.storage.serving.hints.sender import HintSender
from hicache_ext.storage.tiering.reload import ReloadableStore

_CLOSE_TIMEOUT = 1.0
"""Seconds that close() waits for a hint that is being followed."""
_MEMORY = 32 * 1024 * 1024
"""Bytes of pages that are on their way at once because of a hint."""
_MOST_KEYS = 2048
"""Keys looked up at once."""
_INTERVAL = 0.5
"""Seconds between two looks of a prefill node for hints."""
_MOST_PAGES = 2048
"""Pages that one hint names, 32 bytes each, from the first page of the conversation on."""
_KEPT = 256
"""Hints that the pool keeps; the oldest go first."""
_LIFETIME = 60.0
"""Seconds after which a hint is ignored; the nodes' clocks must agree better than this."""


class HintTraffic:
    """A prefill node follows hints on a thread of its own as long as this is open; a decode node makes a sender."""

    def __init__(
        self, config: HicacheExtConfig, ranks: Any, pools: ServedPools, store: Callable[[], ReloadableStore]
    ) -> None:
        """``ranks`` is SGLang's HiCacheStorageConfig; ``store`` answers with the tiers as one."""
        self._config = config
        self._ranks = ranks
        self._pools = pools
        self._store = store
        self._receiver: HintReceiver | None = None
        hints = config.pd.hints
        if hints.enabled and config.role == "prefill":
            board, limits = self._board(config.retrieve_locations)
            self._receiver = HintReceiver(board, self._bring_inward, self._scope, limits, _MOST_PAGES, _INTERVAL)

    def sender(self, metrics: TierMetrics) -> HintSender | None:
        """What announces on a decode node; None unless hints are on. One rank speaks for all [pd, scheduler]."""
        hints = self._config.pd.hints
        if not hints.enabled or self._ranks.tp_rank or self._ranks.pp_rank:
            return None
        board, limits = self._board(self._config.store_locations)
        return HintSender(board, lambda: self._scope() or b"", limits, _MOST_PAGES, metrics, self._in_pool)

    @property
    def metrics(self) -> list[TierMetrics]:
        return [] if self._receiver is None else [self._receiver.metrics]

    def close(self) -> None:
        if self._receiver is not None:
            self._receiver.close(_CLOSE_TIMEOUT)

    def _board(self, locations: Sequence[str]) -> tuple[Callable[[], HintBoard], BoardLimits]:
        over = hints_over(self._config.pd.hints, locations) or ""
        limits = BoardLimits(_KEPT, longest_hint(_MOST_PAGES), _LIFETIME)
        return lambda: board_among(self._store().tiers, over), limits

    def _scope(self) -> bytes | None:
        """Equal on nodes whose pages are of the same weights and size; None before pools and weights are known."""
        pool = self._pools.usable(KV)
        if pool is None or not pool.identities:
            return None
        identity = pool.identities[0]
        common = replace(identity.pool, kind="hint", layout="", segments=(), geometry=())
        return PageIdentity(identity.model, common, Shard()).digest()

    def _in_pool(self, page_hashes: Sequence[bytes]) -> int:
        """Leading pages of which a prefill node finds every part [hints' thread]."""
        pool, store = self._pools.usable(KV), self._store()
        if pool is None:
            return 0
        parts = [[digest + page_hash for page_hash in page_hashes] for digest in pool.digests]
        return min((store.count_leading_in_pool(keys) for keys in parts), default=0)

    def _bring_inward(self, page_hashes: Sequence[bytes]) -> Counter[str]:
        """Pages that are likely to be asked for soon, to the tier ``promote_to`` [hints' thread]."""
        pool = self._pools.usable(KV)
        outcomes: Counter[str] = Counter()
        if pool is None or pool.pages is None:
            return outcomes
        at_once = max(1, min(_MOST_KEYS, _MEMORY // pool.pages.page_bytes))
        for first in range(0, len(page_hashes), at_once):
            if self._pools.unavailable or outcomes["absent"] or outcomes["dropped"]:
                outcomes["dropped"] += len(page_hashes) - first
                break
            for digest in pool.digests:
                keys = [digest + page_hash for page_hash in page_hashes[first : first + at_once]]
                outcomes.update(self._store().bring_inward(keys))
        return outcomes

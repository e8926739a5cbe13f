"""What of a prompt can be restored, as SGLang asks its linker.

SGLang asks again in every round of its scheduler for a request that waits at the head of its queue. For a moment it is
answered what it was answered before: a pool over a network would cost its budget of look-ups each time.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hicache_ext.sglang.lifecycle import name_of
from hicache_ext.sglang.linking.staging import Staging
from hicache_ext.sglang.served_pools import KV

REMEMBERED = 0.5
"""Seconds for which an answer counts. What has gone meanwhile is found out when it is read."""
_MOST_REQUESTS = 1024

_Question = tuple[tuple[str, int, str, str], ...]
"""Of each component its name, and how many keys from which to which: a key stands for all before it."""


class LookUps:
    """Threads: any."""

    def __init__(
        self,
        staging: Staging,
        find: Callable[[list[str], list[Any]], list[int]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``find``: prefix lengths that can be restored, of KV keys and transfers of the pools beside."""
        self._staging = staging
        self._find = find
        self._clock = clock
        self._answers: OrderedDict[str, tuple[_Question, float, list[int]]] = OrderedDict()

    def restorable(self, rid: str, transfers: Sequence[Any]) -> list[int]:
        """Every prefix length in pages at which all pools have what they need."""
        by_name = {name_of(transfer.name): transfer for transfer in transfers}
        kv = by_name.get(KV)
        if kv is None or not kv.keys:
            return []
        beside = self._beside(by_name)
        if beside is None:
            return []
        question = tuple((name, len(one.keys), one.keys[0], one.keys[-1]) for name, one in by_name.items() if one.keys)
        known = self._answers.get(rid)
        if known is not None and known[0] == question and self._clock() - known[1] < REMEMBERED:
            return list(known[2])
        found = self._find(list(kv.keys), beside)
        self._answers[rid] = (question, self._clock(), found)
        while len(self._answers) > _MOST_REQUESTS:
            self._answers.popitem(last=False)
        return list(found)

    def forget(self, rid: str | None = None) -> None:
        """An answer, or all of them."""
        if rid is None:
            self._answers.clear()
        else:
            self._answers.pop(rid, None)

    def _beside(self, by_name: Mapping[str, Any]) -> list[Any] | None:
        """What is asked of the pools beside KV; None where SGLang asks for too few: nothing can be restored then."""
        from sglang.srt.mem_cache.hicache_storage import PoolTransfer

        beside = []
        for source, names in self._staging.pools_on.items():
            asked = by_name.get(source)
            if asked is None or not asked.keys:
                return None
            for name in names:
                if name != KV:
                    policy = asked.hit_policy if name == source else self._staging.policies[name]
                    beside.append(PoolTransfer(self._staging.pool_name(name), keys=asked.keys, hit_policy=policy))
        return beside

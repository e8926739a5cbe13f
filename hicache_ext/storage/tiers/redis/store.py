"""The Redis tier: pages as string values of a Redis or Valkey server, or of a cluster of them.

A value is header || payload (docs/page-format.md) under ``<prefix>page:<identity>:<page hash>``. Pages of a call are
spread over the nodes that hold them and over several connections per node; a node that is lost costs its own pages.
"""

from __future__ import annotations

import json
import logging
import math
import os
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from hicache_ext.errors import (
    NodeDownError,
    NotReadError,
    ProtocolError,
    StoreClosedError,
    StoreSetupError,
)
from hicache_ext.runtime.call_deadline import call_deadline
from hicache_ext.runtime.call_gate import CallGate
from hicache_ext.storage.contract.bad_pages import BadPages, Removal, Stored, Verdict
from hicache_ext.storage.contract.base import TierStore
from hicache_ext.storage.contract.clearing import Cleared, Clearing
from hicache_ext.storage.contract.diagnosis import Finding
from hicache_ext.storage.contract.hint_board import BoardLimits
from hicache_ext.storage.contract.reports import LastLook
from hicache_ext.storage.contract.store import GetResult, PageBatch, SetResult, identities_of
from hicache_ext.storage.tiers.redis.clients import (
    TlsSettings,
    admin_client,
    identity_name,
    page_name,
    page_names_of,
    page_prefix,
    short_call,
)
from hicache_ext.storage.tiers.redis.config import Endpoint, RedisTierConfig
from hicache_ext.storage.tiers.redis.connection import LARGEST_VALUE, command
from hicache_ext.storage.tiers.redis.dispatch import (
    Dispatch,
    PageCall,
    Talk,
    ask_integers,
    ask_presence,
    read_again,
    read_pages,
    remove_bad,
    write_pages,
)
from hicache_ext.storage.tiers.redis.topology import Topology, post_hint, read_hints, stored_identities, sweep_nodes

logger = logging.getLogger(__name__)

_LEADING_AT_ONCE = 1024
_IDENTITY_INTERVAL = 60.0
"""Seconds between two renewals of an identity document: a restart, an eviction or a clear() may remove it."""
_CLEAR_WAIT = 1.0
"""Seconds that clear() waits for its count: SGLang calls it on the scheduler's thread."""
_CLEAR_AT_CLOSE = 30.0
"""Seconds that close() gives the removal of cleared pages."""
_LOOK_INTERVAL = 10.0
"""Seconds between two reads of how full the servers are, while somebody asks."""


class _GateOfOneProcess(CallGate):
    """Refuses a forked child: the sockets are the parent's, and its threads do not exist in the child."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._process = os.getpid()

    def __enter__(self) -> None:
        if os.getpid() != self._process:
            raise StoreClosedError(self._name)
        super().__enter__()

    def shut(self) -> bool:
        return os.getpid() == self._process and super().shut()


class RedisPageStore(TierStore):
    """PageStore over one server or a cluster. Threads: any; a forked child may not use it.

    Every call ends by the tier's timeout. Memory of a batch is touched only by threads that the call waits for.
    """

    type_name = "redis"
    shared = True

    def __init__(self, name: str, tier: RedisTierConfig) -> None:
        """Raises StoreSetupError, see ``Topology``."""
        super().__init__(name)
        self._calls = _GateOfOneProcess(name)
        self._tier = tier
        self._page_names = page_prefix(tier.prefix)
        self._documents: dict[bytes, bytes] = {}
        self._documents_saved: dict[bytes, float] = {}
        try:
            tls = TlsSettings(tier) if tier.tls else None
        except (ssl.SSLError, OSError) as error:
            raise StoreSetupError(name, f"the TLS files cannot be used: {error.strerror or error}") from None
        self._topology = Topology(name, tier, tls, self.metrics)
        self._clearing = Clearing(name, self._endpoint_of)
        try:
            self._dispatch = Dispatch(name, tier, self._topology, self._clearing.hides, self.metrics)
        except RuntimeError as error:
            self._topology.close()
            raise StoreSetupError(name, f"no threads: {error}") from None
        self._last_look = LastLook(name, self._look, _LOOK_INTERVAL)
        self._bad_pages = BadPages(name, self.metrics, _Medium(self._examine))

    def details(self) -> dict[str, Any]:
        return {
            "servers": [str(endpoint) for endpoint in self._tier.endpoints],
            "service": self._tier.service,
            "cluster": self._topology.is_cluster,
            "nodes": {str(node.endpoint): "up" if node.up else "down" for node in self._topology.nodes},
            "database": self._tier.database,
            "prefix": self._tier.prefix,
            "connections": self._tier.connections,
            "ttl": self._tier.ttl,
            "timeout": self._tier.longest_call,
            "tls": self._tier.tls,
        }

    def gauges(self) -> dict[str, float]:
        up = any(node.up for node in self._topology.nodes)
        return {**(self._last_look.known() if up else {}), "tier_up": float(up)}

    def _look(self) -> dict[str, float]:
        """How full all nodes that are up are together, as they say; everything they hold counts, whoever wrote it.

        Takes at most a short call per node. Raises redis.RedisError: also where the user may not use INFO.
        """
        used = capacity = 0.0
        for node in self._topology.nodes:
            if not node.up:
                continue
            with admin_client(self._tier, node.endpoint, database=0) as client:
                facts: Any = client.info("memory")
            used += int(facts["used_memory"])
            # 0 is no limit: then the whole has none.
            capacity += int(facts.get("maxmemory", 0)) or math.inf
        if capacity == math.inf:
            return {"used_bytes": used, "capacity_bytes": math.nan, "free_bytes": math.nan}
        return {"used_bytes": used, "capacity_bytes": capacity, "free_bytes": max(0.0, capacity - used)}

    def _register(self, digest: bytes, document: dict[str, Any]) -> None:
        self._documents[digest] = json.dumps(document, sort_keys=True, ensure_ascii=False).encode()
        self._documents_saved.pop(digest, None)
        self._save_identities([digest], self._deadline())

    def identities(self) -> dict[bytes, dict[str, Any]]:
        with self._calls:
            return stored_identities(self.name, self._tier, self._topology.nodes)

    # -- reading ---------------------------------------------------------------------------------------------------

    def _page_calls(self, batch: PageBatch) -> list[PageCall]:
        return [
            PageCall(key, name, segments, payload)
            for key, name, segments, payload in zip(
                batch.keys, page_names_of(self._page_names, batch.keys), batch.buffers, batch.sizes, strict=True
            )
        ]

    def _moved_at_once(
        self, batch: PageBatch, deadline: float, results: type[GetResult] | type[SetResult]
    ) -> list[Any]:
        """As ``Dispatch.move``; nothing is moved so while pages are hidden, or writes wait for verdicts."""
        if self._clearing.hides_some or (results is SetResult and self._bad_pages.hides_some):
            return [None] * len(batch)
        return self._dispatch.move(batch, lambda: page_names_of(self._page_names, batch.keys), deadline, results)

    def _read(self, batch: PageBatch) -> list[GetResult]:
        deadline = self._deadline()
        results = self._moved_at_once(batch, deadline, GetResult)
        if None in results:
            left = [position for position, result in enumerate(results) if result is None]
            calls = self._page_calls(batch.select(left))
            self._dispatch.run(calls, read_pages, deadline, GetResult, hidden=GetResult.MISS, looks=True)
            self._note_suspects(calls)
            self.metrics.add_many("corrupt", _reasons(calls, GetResult.CORRUPT))
            self.metrics.add_many("error", _reasons(calls, GetResult.ERROR))
            for position, call in zip(left, calls, strict=True):
                results[position] = call.result
        if self._bad_pages.hides_some:
            self._bad_pages.clear(
                key for key, result in zip(batch.keys, results, strict=True) if result is GetResult.HIT
            )
        return results

    def _note_suspects(self, calls: Iterable[PageCall]) -> None:
        """The pages whose copies are not what they should be; looked at again on another thread."""
        for call in calls:
            if call.seen is not None:
                self._bad_pages.suspect(call.key, call.size, call.seen, call.reason)

    def _examine(self, key: bytes, talk: Talk) -> Any:
        """What ``talk`` finds out about one page over a connection of its own. Raises NotReadError."""
        call = PageCall(key, self._page_name(key))
        self._dispatch.run([call], talk, self._deadline(), GetResult, hidden=GetResult.MISS, examines=True)
        if call.result in (GetResult.ERROR, GetResult.TIMEOUT):
            raise NotReadError(call.reason)
        return call.result

    # -- writing ---------------------------------------------------------------------------------------------------

    def _write(self, batch: PageBatch) -> list[SetResult]:
        deadline = self._deadline()
        results = self._moved_at_once(batch, deadline, SetResult)
        if None in results:
            left = [position for position, result in enumerate(results) if result is None]
            for position, result in zip(left, self._write_each(batch.select(left), deadline), strict=True):
                results[position] = result
        stored = [key for key, result in zip(batch.keys, results, strict=True) if result is SetResult.STORED]
        self._save_identities(identities_of(stored), deadline)
        return results

    def _write_each(self, batch: PageBatch, deadline: float) -> list[SetResult]:
        """Page by page, whatever is wrong."""
        calls = self._page_calls(batch)
        for call in calls:
            if call.size > LARGEST_VALUE:
                call.finish(SetResult.REJECTED, "too_large")
            elif self._bad_pages.hides(call.key):
                call.finish(SetResult.REJECTED, "suspect")
        self._write_pages([call for call in calls if call.result is None], deadline)
        self._note_suspects(calls)
        wrong = sum(call.seen is not None for call in calls)
        if wrong:
            self.metrics.add("corrupt", "length", wrong)
        self._write_pages(self._settled([call for call in calls if call.reason == "suspect"], deadline), deadline)
        self._bad_pages.clear(call.key for call in calls if call.result is SetResult.STORED)
        self.metrics.add_many("rejected", _reasons(calls, SetResult.REJECTED))
        self.metrics.add_many("error", _reasons(calls, SetResult.ERROR))
        return [call.result for call in calls]

    def _write_pages(self, calls: list[PageCall], deadline: float) -> None:
        if not calls:
            return
        talk = partial(write_pages, ttl=self._tier.ttl)
        with self._clearing.writing([call.key for call in calls], deadline) as writing:
            if writing.cleared:
                self._remove_before([call for call in calls if call.key in writing.cleared], deadline)
            self._dispatch.run([call for call in calls if call.result is None], talk, deadline, SetResult)
            writing.stored.update(call.key for call in calls if call.result in (SetResult.STORED, SetResult.EXISTS))

    def _remove_before(self, calls: Sequence[PageCall], deadline: float) -> None:
        """The stored copies of these pages were cleared: a write would find them and answer EXISTS."""
        removals = [PageCall(call.key, call.name) for call in calls]
        self._dispatch.run(removals, partial(ask_integers, word=b"UNLINK"), deadline, None)
        for call, removal in zip(calls, removals, strict=True):
            if removal.reason:
                call.finish(SetResult.REJECTED, "clearing")

    def _settled(self, suspects: Sequence[PageCall], deadline: float) -> list[PageCall]:
        """Of pages that are not written because of a copy that is there: those that can be written now."""
        verdicts = self._bad_pages.settle([call.key for call in suspects], deadline)
        again = []
        for call in suspects:
            # Settled in the meantime where there is no verdict.
            verdict = verdicts.get(call.key, Verdict.GONE)
            if verdict.free or (verdict is Verdict.GOOD and call.seen is None):
                call.result, call.reason, call.seen = None, "", None
                again.append(call)
        return again

    def _save_identities(self, digests: Iterable[bytes], deadline: float) -> None:
        """Store the identity documents that have not been stored lately; one that cannot be is tried again later."""
        now = time.monotonic()
        for digest in digests:
            document = self._documents.get(digest)
            if document is None or now - self._documents_saved.get(digest, -_IDENTITY_INTERVAL) < _IDENTITY_INTERVAL:
                continue
            self._documents_saved[digest] = now
            ttl = self._tier.ttl
            # Lives longer than the last page that was written while it was fresh.
            options = [] if ttl is None else [b"EX", b"%d" % (ttl + 2 * int(_IDENTITY_INTERVAL))]
            name = identity_name(self._tier.prefix, digest)
            node = self._topology.node_of(name)
            try:
                if node is None:
                    raise NodeDownError("no node")
                with node.connection(node.requests, deadline) as connection:
                    connection.ask([command(b"SET", name, document, *options)])
            except (OSError, ProtocolError):
                self.metrics.add("error", "identity")

    # -- presence and removal --------------------------------------------------------------------------------------

    def _has(self, keys: Sequence[bytes]) -> list[bool]:
        return self._present(keys, self._deadline())

    def _lead(self, keys: Sequence[bytes]) -> int:
        deadline = self._deadline()
        for first in range(0, len(keys), _LEADING_AT_ONCE):
            present = self._present(keys[first : first + _LEADING_AT_ONCE], deadline)
            if False in present:
                return first + present.index(False)
        return len(keys)

    def _present(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        """EXISTS, and not STRLEN or TYPE: it alone leaves the order of eviction as it is."""
        # Before the server is asked: what is removed meanwhile would have been there and be no suspect any more.
        hidden: list[int] = []
        if self._bad_pages.hides_some or self._clearing.hides_some:
            hidden = [page for page, key in enumerate(keys) if self._bad_pages.hides(key) or self._clearing.hides(key)]
        if self._topology.is_cluster:
            ask = partial(ask_integers, word=b"EXISTS")
            present = [count == 1 for count in self._ask_integers(keys, deadline, ask, looks=True)]
        else:
            present = self._present_on_one(page_names_of(self._page_names, keys), deadline)
        for page in hidden:
            present[page] = False
        return present

    def _present_on_one(self, names: Sequence[bytes], deadline: float) -> list[bool]:
        """There is one server: one call stands for all pages."""
        call = PageCall(b"", names[0])
        self._dispatch.run([call], partial(ask_presence, names=names), deadline, None, looks=True)
        if call.reason:
            self.metrics.add("error", call.reason, len(names))
            return [False] * len(names)
        return [*map(bool, call.result)]

    def _remove(self, keys: Sequence[bytes]) -> int:
        self._bad_pages.clear(keys)
        self._topology.rest_replicas()
        return sum(self._ask_integers(keys, self._deadline(), partial(ask_integers, word=b"UNLINK")))

    def _ask_integers(self, keys: Sequence[bytes], deadline: float, talk: Talk, *, looks: bool = False) -> list[int]:
        calls = [PageCall(*one) for one in zip(keys, page_names_of(self._page_names, keys), strict=True)]
        self._dispatch.run(calls, talk, deadline, None, hidden=0, looks=looks)
        failed = Counter(call.reason for call in calls if call.reason)
        if failed:
            self.metrics.add_many("error", failed)
        return [call.result for call in calls]

    def _remove_copies(self, copies: Mapping[bytes, bytes]) -> int:
        return self._bad_pages.remove_copies(copies)

    def _clear(self, digests: Sequence[bytes] | None) -> int:
        """See ``Clearing``. The answer counts the identities whose pages were found within a second."""
        found = self._clearing.clear(digests, self._sweep, _CLEAR_WAIT)
        if digests is None:
            self._documents_saved.clear()
        return found

    def _sweep(self, cleared: Cleared) -> None:
        try:
            sweep_nodes(cleared, self._topology.nodes, self._tier, self.metrics)
        finally:
            # Before anything is in sight again.
            self._topology.rest_replicas()

    def _endpoint_of(self, key: bytes) -> Endpoint | None:
        """The server that has a page."""
        node = self._topology.node_of(self._page_name(key))
        return None if node is None else node.endpoint

    # -- the rest --------------------------------------------------------------------------------------------------

    def post_hint(self, hint: bytes, limits: BoardLimits) -> None:
        with self._calls:
            post_hint(self._tier, self._topology, hint, limits)

    def read_hints(self, since: bytes | None, limits: BoardLimits) -> tuple[bytes, list[bytes]]:
        with self._calls:
            return read_hints(self._tier, self._topology, since, limits)

    def diagnose(self) -> list[Finding]:
        from hicache_ext.storage.tiers.redis.diagnosis import diagnose

        with self._calls:
            return diagnose(self._tier, self._topology)

    def wait_until_examined(self, timeout: float) -> bool:
        """Wait until the pages that arrived damaged have been looked at again; for tools and tests."""
        return self._bad_pages.wait(timeout)

    def _close(self) -> None:
        self._last_look.close(short_call(self._tier))
        self._bad_pages.close()
        self._dispatch.close()
        self._clearing.close(_CLEAR_AT_CLOSE)
        self._topology.close()

    def _page_name(self, key: bytes) -> bytes:
        return page_name(self._page_names, key)

    def _deadline(self) -> float:
        return call_deadline(self._tier.longest_call)


class _Medium:
    """``Medium`` of bad_pages.py: one page at a time, each over a connection of its own."""

    def __init__(self, ask: Callable[[bytes, Talk], Any]) -> None:
        """``ask``: (key, the commands for its page) -> the page's result; raises NotReadError."""
        self._ask = ask

    def read_again(self, key: bytes, most: int) -> Stored | None:
        answer = self._ask(key, lambda connection, calls: read_again(connection, calls[0], most))
        return answer if isinstance(answer, Stored) else None

    def remove(self, key: bytes, bad: Stored) -> Removal:
        answer = self._ask(key, lambda connection, calls: remove_bad(connection, calls[0], bad))
        # A miss: it is being cleared.
        return answer if isinstance(answer, Removal) else Removal.CHANGED


def _reasons(calls: Sequence[PageCall], result: GetResult | SetResult) -> Counter[str]:
    """Why calls ended so."""
    return Counter([call.reason for call in calls if call.result is result])

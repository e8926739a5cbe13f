"""The Redis tier: pages as string values on a Redis or Valkey server, or a cluster of them.

A value is header || payload (docs/page-format.md) under ``<prefix>page:<identity>:<page hash>``. The pages of a call
are spread over the nodes that hold them and over several connections per node; a lost node costs only its own pages.
"""

from __future__ import annotations

import json
import logging
import math
import os
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from hicache_ext.errors import (
    ConfigError,
    LaneBusyError,
    NodeDownError,
    NotReadError,
    ProtocolError,
    RefusedError,
    StoreClosedError,
    StoreError,
    StoreSetupError,
    UnansweredError,
)
from hicache_ext.page.envelope import KEY_LENGTH
from hicache_ext.runtime.call_deadline import call_deadline
from hicache_ext.runtime.call_gate import CallGate
from hicache_ext.runtime.threads import ThreadPool
from hicache_ext.storage.contract.bad_pages import PoolStore, Stored, Verdict
from hicache_ext.storage.contract.base import leading_in_portions
from hicache_ext.storage.contract.clearing import Cleared
from hicache_ext.storage.contract.diagnosis import Finding, Level
from hicache_ext.storage.contract.reports import LastLook
from hicache_ext.storage.contract.store import GetResult, PageBatch, SetResult, grouped, identities_of, put_back
from hicache_ext.storage.contract.trial import try_store
from hicache_ext.storage.tiers.redis.config import Endpoint, RedisTierConfig
from hicache_ext.storage.tiers.redis.connection import (
    LARGEST_VALUE,
    Connection,
    command,
    identity_name,
    page_name,
    page_names_of,
    page_prefix,
    short_call,
    tls_contexts,
)
from hicache_ext.storage.tiers.redis.node import Node, error_words
from hicache_ext.storage.tiers.redis.page_calls import (
    ELSEWHERE,
    REMOVES,
    WRITES,
    NativeCall,
    PageCall,
    Talk,
    ask_integers,
    ask_presence,
    read_again,
    read_pages,
    refused_commands,
    remove_bad,
    write_pages,
)
from hicache_ext.storage.tiers.redis.topology import Topology, post_hint, read_hints, stored_identities, sweep_nodes

logger = logging.getLogger(__name__)

_Found = TypeVar("_Found")
_ATTEMPTS = 2
"""Maximum connections tried for one page: the first may have died while idle."""
_SHARE = 256 * 1024
"""Minimum bytes per connection; below it another connection does not pay off."""
_NATIVE_SHARE = 8 << 20
_LARGE_SHARE, _LARGE_PAGE = 4 << 20, 512 * 1024
"""The same for the native core, where one thread can saturate a server; measured in docs/decisions/redis.md."""
_MOST_THREADS = 64
_NEVER_ALLOWED = ("NOPERM", "unknown command")
"""Reasons for the refusal of a command that the server's administrator has disabled."""
_NO_REFUSALS = {"memory", "too_large", "suspect", "clearing", "moving"}
"""Rejections that do not count as refusals by the server: it accepts other pages, or is full."""
_SLOT_ERRORS = ("CLUSTERDOWN", "CROSSSLOT")
"""Refusals that concern the pages' slots, not the node. CROSSSLOT comes from a cluster node that is configured as a
single server (cluster: false)."""
_LEADING_AT_ONCE = 1024
_IDENTITY_INTERVAL = 60.0
"""Seconds between two renewals of an identity document: a restart, an eviction or a clear() may remove it."""
_CLEAR_WAIT = 1.0
"""Maximum seconds that clear() waits for its count: SGLang calls it on the scheduler thread."""
_CLEAR_AT_CLOSE = 30.0
"""Maximum seconds that close() waits for the removal of cleared pages."""
_LOOK_INTERVAL = 10.0
"""Seconds between two reads of the servers' memory usage while gauges are requested."""


class _SingleProcessGate(CallGate):
    """Refuses calls in a forked child: the sockets belong to the parent, whose threads do not exist in the child."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._process = os.getpid()

    def __enter__(self) -> None:
        if os.getpid() != self._process:
            raise StoreClosedError(self._name)
        super().__enter__()

    def shut(self) -> bool:
        return os.getpid() == self._process and super().shut()


class RedisPageStore(PoolStore):
    """PageStore over one server or a cluster. Threads: any; not usable in a forked child.

    Every call ends within the tier's timeout. Only threads that the call waits for touch the memory of its batch.
    """

    type_name = "redis"
    shared = True

    def __init__(self, name: str, tier: RedisTierConfig) -> None:
        """Connect to the servers. Raises StoreSetupError; see ``Topology``."""
        super().__init__(name)
        self._calls = _SingleProcessGate(name)
        self._tier = tier
        self._page_names = page_prefix(tier.prefix)
        self._documents: dict[bytes, bytes] = {}
        self._documents_saved: dict[bytes, float] = {}
        try:
            tls = tls_contexts(tier) if tier.tls else None
        except (ssl.SSLError, OSError) as error:
            raise StoreSetupError(name, f"the TLS files cannot be used: {error.strerror or error}") from None
        self._topology = Topology(name, tier, tls, self.metrics)
        nodes = max(3, len(self._topology.nodes)) if self._topology.is_cluster else 1
        try:
            # One thread per connection, so that a hanging node cannot delay the pages of other nodes.
            self._threads = ThreadPool(f"hicache-{name}", min(_MOST_THREADS, tier.connections * nodes))
        except RuntimeError as error:
            self._topology.close()
            raise StoreSetupError(name, f"no threads: {error}") from None
        try:
            self._check_permissions()
        except StoreSetupError:
            self._threads.close()
            self._topology.close()
            raise
        self._last_look = LastLook(name, self._look, _LOOK_INTERVAL)

    def _check_permissions(self) -> None:
        """Raise StoreSetupError if a server forbids its user a command that serving needs. Other refusals are
        tolerated: a node that refuses reads is down until it answers them; one that refuses writes is still read."""
        for node in self._topology.nodes:
            # The slot does not matter: a node checks permissions before it redirects.
            name = self._page_name(os.urandom(KEY_LENGTH))
            try:
                with node.aside(short_call(self._tier)) as connection:
                    refused = refused_commands(connection, name, writes=not self._tier.only_read)
            except (OSError, StoreError, ConfigError):
                continue
            missing = [error for error in refused if error.code in _NEVER_ALLOWED]
            words = " and ".join(str(error) for error in missing)
            if any(error.code == "NOPERM" or error.word not in REMOVES for error in missing):
                rules = " ".join(f"+{error.word.decode().lower()}" for error in missing if error.code == "NOPERM")
                remedy = f"ACL SETUSER with {rules} ~{self._tier.prefix}*" if rules else "use a server that has it"
                raise StoreSetupError(self.name, f"redis at {node.endpoint}: {words}", [remedy])
            if missing:
                text = "tier %s: redis at %s: %s: pages that are cleared or damaged may not be removed there"
                logger.warning(text, self.name, node.endpoint, words)
            refused_reads = [error for error in refused if error.word not in WRITES]
            if refused_reads:
                node.mark_down(refused_reads[0], self._unused_name(name))

    def _unused_name(self, like: bytes) -> bytes:
        """Return a name that no page has; in a cluster a hash tag puts it in the slot of the page ``like``."""
        return self._page_name(os.urandom(KEY_LENGTH)) + (b"{%b}" % like if self._topology.is_cluster else b"")

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
        """Return the memory usage that the nodes that are up report, summed; data of other writers counts, too.

        Raises StoreError or OSError, also if the user may not use INFO.
        """
        used = capacity = 0.0
        for node in self._topology.nodes:
            if not node.up:
                continue
            with node.aside() as connection:
                facts = connection.info(b"memory")
            used += int(facts["used_memory"])
            # 0 means no limit; then the sum has none.
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

    def _read(self, batch: PageBatch) -> list[GetResult]:
        deadline = self._deadline()
        results = self._move(batch, deadline, GetResult)
        if None in results:
            left = [position for position, result in enumerate(results) if result is None]
            calls = self._page_calls(batch.select(left))
            self._run(calls, read_pages, deadline, GetResult, hidden=GetResult.MISS, looks=True)
            self._note_suspects(calls)
            self.metrics.add_many("corrupt", _reasons(calls, GetResult.CORRUPT))
            self.count_errors(_reasons(calls, GetResult.ERROR))
            put_back(results, left, [call.result for call in calls])
        if self._bad_pages.hides_some:
            self._bad_pages.clear(
                key for key, result in zip(batch.keys, results, strict=True) if result is GetResult.HIT
            )
        return results

    def _note_suspects(self, calls: Iterable[PageCall]) -> None:
        """Report pages with wrong copies; another thread reads them again."""
        for call in calls:
            if call.seen:
                self._bad_pages.suspect(call.key, call.size, call.reason)

    def _aside(self, key: bytes, talk: Callable[[Connection, bytes], _Found | None]) -> _Found | None:
        """Return what ``talk`` finds under the name of a page, using a separate connection. Raises NotReadError."""
        name = self._page_name(key)
        node = self._topology.node_of(name)
        if self._clearing.hides(key):
            return None
        if node is None:
            raise NotReadError("no_node")
        try:
            with node.aside() as connection:
                return talk(connection, name)
        except (OSError, StoreError, ConfigError) as error:
            raise NotReadError(error_words(error)) from None

    def read_again(self, key: bytes, most: int) -> Stored | None:
        """Read the stored copy of a page for ``BadPages``, which also calls ``remove_bad``."""
        return self._aside(key, partial(read_again, most=most))

    def remove_bad(self, key: bytes, bad: Stored) -> Verdict | None:
        return self._aside(key, partial(remove_bad, bad=bad))

    # -- writing ---------------------------------------------------------------------------------------------------

    def _write(self, batch: PageBatch) -> list[SetResult]:
        deadline = self._deadline()
        results = self._move(batch, deadline, SetResult)
        if None in results:
            left = [position for position, result in enumerate(results) if result is None]
            batch.move_at(left, partial(self._write_each, deadline=deadline), results)
        stored = [key for key, result in zip(batch.keys, results, strict=True) if result is SetResult.STORED]
        self._save_identities(identities_of(stored), deadline)
        return results

    def _write_each(self, batch: PageBatch, deadline: float) -> list[SetResult]:
        """Write pages one by one, handling every kind of failure."""
        calls = self._page_calls(batch)
        for call in calls:
            if call.size > LARGEST_VALUE:
                call.finish(SetResult.REJECTED, "too_large")
            elif self._bad_pages.hides(call.key):
                call.finish(SetResult.REJECTED, "suspect")
        self._write_pages([call for call in calls if call.result is None], deadline)
        self._note_suspects(calls)
        wrong = sum(call.seen for call in calls)
        if wrong:
            self.metrics.add("corrupt", "length", wrong)
        self._write_pages(self._settle([call for call in calls if call.reason == "suspect"], deadline), deadline)
        self._bad_pages.clear(call.key for call in calls if call.result is SetResult.STORED)
        rejected = _reasons(calls, SetResult.REJECTED)
        self.metrics.add_many("rejected", rejected)
        for reason in rejected.keys() - _NO_REFUSALS:
            self.note_refusal(reason)
        self.count_errors(_reasons(calls, SetResult.ERROR))
        return [call.result for call in calls]

    def _write_pages(self, calls: list[PageCall], deadline: float) -> None:
        if not calls:
            return
        talk = partial(write_pages, ttl=self._tier.ttl)
        with self._clearing.writing([call.key for call in calls], deadline) as writing:
            if writing.cleared:
                self._remove_before([call for call in calls if call.key in writing.cleared], deadline)
            self._run([call for call in calls if call.result is None], talk, deadline, SetResult)
            writing.stored.update(call.key for call in calls if call.result in (SetResult.STORED, SetResult.EXISTS))

    def _remove_before(self, calls: Sequence[PageCall], deadline: float) -> None:
        """Remove the stored copies of these cleared pages: a write would find them and return EXISTS."""
        removals = [PageCall(call.key, call.name) for call in calls]
        self._run(removals, partial(ask_integers, word=b"UNLINK"), deadline, None)
        for call, removal in zip(calls, removals, strict=True):
            if removal.reason:
                call.finish(SetResult.REJECTED, "clearing")

    def _settle(self, suspects: Sequence[PageCall], deadline: float) -> list[PageCall]:
        """Settle pages that an existing copy keeps from being written; return those that can be written now."""
        verdicts = self._bad_pages.settle([call.key for call in suspects], deadline)
        again = []
        for call in suspects:
            # No verdict: the page was settled in the meantime.
            verdict = verdicts.get(call.key, Verdict.GONE)
            if verdict.free or (verdict is Verdict.GOOD and not call.seen):
                call.result, call.reason, call.seen = None, "", False
                again.append(call)
        return again

    def _save_identities(self, digests: Iterable[bytes], deadline: float) -> None:
        """Store the identity documents that were not stored recently; failed ones are retried later."""
        now = time.monotonic()
        for digest in digests:
            document = self._documents.get(digest)
            if document is None or now - self._documents_saved.get(digest, -_IDENTITY_INTERVAL) < _IDENTITY_INTERVAL:
                continue
            self._documents_saved[digest] = now
            ttl = self._tier.ttl
            # Outlives the last page that was written before the document's next renewal.
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
        return leading_in_portions(keys, lambda some: self._present(some, deadline), _LEADING_AT_ONCE)

    def _present(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        """Return which pages are present. Uses EXISTS because, unlike STRLEN or TYPE, it does not renew recency."""
        # Must precede the request: a page removed meanwhile would be reported present and no longer be a suspect.
        hidden: list[int] = []
        if self._bad_pages.hides_some or self._clearing.hides_some:
            hidden = [page for page, key in enumerate(keys) if self._bad_pages.hides(key) or self._clearing.hides(key)]
        failed: Counter[str] = Counter()
        if self._topology.is_cluster:
            calls = self._ask_each(keys, deadline, b"EXISTS", looks=True)
            present, failed = [call.result == 1 for call in calls], _reasons(calls)
        else:
            # There is only one server: a single call represents all pages.
            names = page_names_of(self._page_names, keys)
            call = PageCall(b"", names[0])
            self._run([call], partial(ask_presence, names=names), deadline, None, looks=True)
            failed = Counter({call.reason: len(keys)} if call.reason else {})
            present = [False] * len(keys) if failed else [*map(bool, call.result)]
        for page in hidden:
            present[page] = False
        if failed:
            raise UnansweredError(present, failed.total(), len(keys), failed)
        return present

    def _remove(self, keys: Sequence[bytes]) -> int:
        self._bad_pages.clear(keys)
        removals = self._ask_each(keys, self._deadline(), b"UNLINK")
        self.count_errors(_reasons(removals))
        return sum(call.result for call in removals)

    def _ask_each(self, keys: Sequence[bytes], deadline: float, word: bytes, *, looks: bool = False) -> list[PageCall]:
        """Send a command with an integer reply for each page."""
        calls = [PageCall(*page) for page in zip(keys, page_names_of(self._page_names, keys), strict=True)]
        self._run(calls, partial(ask_integers, word=word), deadline, None, hidden=0, looks=looks)
        return calls

    def _clear(self, digests: Sequence[bytes] | None) -> int:
        """Clear pages through ``Clearing``; return the number of identities with pages found within a second."""
        found = self._clearing.clear(digests, self._sweep, _CLEAR_WAIT)
        if digests is None:
            self._documents_saved.clear()
        return found

    def _sweep(self, cleared: Cleared) -> None:
        sweep_nodes(cleared, self._topology, self._tier, self.metrics)

    def _part_of(self, key: bytes) -> Endpoint | None:
        """Return the server that holds a page."""
        node = self._topology.node_of(self._page_name(key))
        return None if node is None else node.endpoint

    # -- distribution over nodes and connections -------------------------------------------------------------------

    def _run(
        self,
        calls: list[PageCall],
        talk: Talk,
        deadline: float,
        results: type[GetResult] | type[SetResult] | None,
        hidden: Any = None,
        *,
        looks: bool = False,
    ) -> None:
        """Give every call a result: from ``talk`` with the nodes or, if that fails, TIMEOUT or ERROR of ``results``.

        Without ``results`` a failure is 0. ``hidden`` is the result of cleared pages; without it they are treated like
        any other. ``looks`` marks a read or a lookup.
        """
        failed: Any = 0 if results is None else results.ERROR
        waiting: dict[Node, list[PageCall]] = {}
        for call in calls:
            node = self._topology.node_of(call.name)
            if node is None:
                call.finish(failed, "no_node")
            elif hidden is not None and self._clearing.hides(call.key):
                call.finish(hidden)
            else:
                waiting.setdefault(node, []).append(call)
        shares = _interleave_shares((node, pages, self._shares(pages, results)) for node, pages in waiting.items())
        self._threads.run(len(shares), lambda n: self._talk(*shares[n], talk, deadline, results, looks=looks))
        if not (elsewhere := [call for call in calls if call.result is ELSEWHERE]):
            return
        # Their slot has moved or is migrating: they count as absent, and are not written until the map names its node.
        kinds = _reasons(elsewhere)
        self.metrics.add_many("redirect", kinds)
        if kinds["moved"]:
            moved = next(call.name for call in elsewhere if call.reason == "moved")
            self._topology.refresh_soon(self._topology.node_of(moved))
        absent = {GetResult.ERROR: GetResult.MISS, SetResult.ERROR: SetResult.REJECTED}.get(failed, failed)
        for call in elsewhere:
            if self._topology.is_cluster:
                call.finish(absent, "" if looks else "moving")
            else:
                call.finish(failed, "redirected")

    def _move(
        self,
        batch: PageBatch,
        deadline: float,
        results: type[GetResult] | type[SetResult],
    ) -> list[Any]:
        """Move pages with the native core and return the results that a healthy server gives: HIT or MISS, STORED or
        EXISTS. All are None while pages are hidden or writes wait for verdicts.

        None also stands for a page with any other outcome: ``_run`` finds out what is wrong and reports it.
        """
        write, nothing = results is SetResult, [None] * len(batch)
        if self._clearing.hides_some or (write and self._bad_pages.hides_some):
            return nothing
        pages = None if self._tier.tls else NativeCall.of(batch, self._page_names, self._tier.ttl, write=write)
        if pages is None:
            return nothing
        by_node: list[tuple[Node, npt.NDArray[np.int64], int]] = []
        for node, positions in self._positions_by_node(batch.keys):
            if node is None or not node.up or (write and node.writes.in_doubt):
                continue
            size = batch.sizes[0]
            # A page must be hashed before its first byte is sent; with large pages other connections send meanwhile.
            share = _LARGE_SHARE if write and size >= _LARGE_PAGE else _NATIVE_SHARE
            count = max(1, min(node.pages.free, len(positions) * size // share, len(positions)))
            by_node.append((node, positions, count))
        shares = _interleave_shares(by_node)

        def move(number: int) -> None:
            node, positions = shares[number]
            try:
                with node.connection(node.pages, deadline) as connection:
                    if connection.descriptor is not None:
                        pages.talk(connection, np.ascontiguousarray(positions))
            except LaneBusyError:
                return
            except (OSError, ProtocolError) as error:
                # ``_run`` meets any other error again, unless it was transient. After a timeout it has no time left.
                if isinstance(error, TimeoutError):
                    (node.missed_write if write else node.mark_down)(error)

        self._threads.run(len(shares), move)
        return pages.results()

    def _positions_by_node(self, keys: Sequence[bytes]) -> list[tuple[Node | None, npt.NDArray[np.int64]]]:
        if not self._topology.is_cluster:
            return [(self._topology.node_of(b""), np.arange(len(keys), dtype=np.int64))]
        by_node = grouped(map(self._topology.node_of, page_names_of(self._page_names, keys)))
        return [(node, np.array(found, np.int64)) for node, found in by_node.items()]

    def _shares(self, calls: list[PageCall], results: type | None) -> int:
        """Return how many connections share the pages of a node; one is enough for short requests."""
        size = 0 if results is None else sum([call.size for call in calls])
        return max(1, min(self._tier.connections, size // _SHARE, len(calls)))

    def _talk(
        self,
        node: Node,
        calls: list[PageCall],
        talk: Talk,
        deadline: float,
        results: type[GetResult] | type[SetResult] | None,
        *,
        looks: bool,
    ) -> None:
        """Give every call a result from one node. ``looks`` marks a read or a lookup; only these mark the node down."""
        timed_out, failed = (0, 0) if results is None else (results.TIMEOUT, results.ERROR)
        reason, writes = "connection", results is SetResult
        lane = node.requests if results is None else node.pages
        for attempt in range(_ATTEMPTS):
            waiting = [call for call in calls if call.result is None]
            if not waiting:
                return
            if time.monotonic() >= deadline:
                # Other nodes used up the time: nothing is known about this one.
                _finish(calls, timed_out, "timeout")
                return
            try:
                exchange = partial(talk, pause=node.writes.reason) if writes else talk
                with node.connection(lane, deadline, fresh=attempt > 0) as connection:
                    refusal = exchange(connection, waiting) or ""
                if refusal:
                    node.refused_write(refusal)
                    self._topology.refresh_soon()
                elif writes and any(call.result is SetResult.STORED for call in waiting):
                    node.took_write()
                return
            except NodeDownError:
                reason = node.why_down
                break
            except LaneBusyError:
                _finish(calls, timed_out, "busy")
                return
            except TimeoutError as error:
                if looks:
                    node.mark_down(error)
                elif writes:
                    node.missed_write(error)
                _finish(calls, timed_out, "timeout")
                return
            except RefusedError as error:
                reason = error.code
                self._topology.refresh_soon()
                if writes and reason not in _SLOT_ERRORS:
                    node.refused_write(reason)
                elif looks and reason not in _SLOT_ERRORS:
                    name = next(call.name for call in waiting if call.result is not ELSEWHERE)
                    node.mark_down(error, self._unused_name(name))
                break
            except ProtocolError as error:
                reason = "protocol"
                words = "tier %s: %s does not speak RESP: %s"
                self._log.log(logging.WARNING, "protocol", words, self.name, node.endpoint, error)
            except OSError as error:
                reason = "connection"
                logger.debug("tier %s: %s: %s", self.name, node.endpoint, error)
            self.metrics.add("connection", "lost")
        _finish(calls, failed, reason)

    # -- hints, diagnosis, close -----------------------------------------------------------------------------------

    def post_hint(self, hint: bytes) -> None:
        with self._calls:
            post_hint(self._tier, self._topology, hint)

    def read_hints(self, since: bytes | None) -> tuple[bytes, list[bytes]]:
        with self._calls:
            return read_hints(self._tier, self._topology, since)

    def diagnose(self) -> list[Finding]:
        from hicache_ext.storage.tiers.redis.diagnosis import diagnose

        with self._calls:
            findings = diagnose(self._tier, self._topology)
        nodes = self._topology.nodes
        if self._tier.only_read or not nodes or not all(node.up for node in nodes):
            return findings
        try:
            again = RedisPageStore(self.name, self._tier)
        except StoreSetupError as error:
            return [*findings, Finding("round trip", Level.ERROR, error.reason, "servers do not start with it")]
        with closing(again):
            return findings + try_store(self, again=again)

    def _close(self) -> None:
        self._last_look.close(short_call(self._tier))
        self._bad_pages.close()
        self._threads.close()
        self._clearing.close(_CLEAR_AT_CLOSE)
        self._topology.close()

    def _page_name(self, key: bytes) -> bytes:
        return page_name(self._page_names, key)

    def _deadline(self) -> float:
        return call_deadline(self._tier.longest_call)


def _reasons(calls: Sequence[PageCall], result: GetResult | SetResult | None = None) -> Counter[str]:
    """Count the reasons of calls with this ``result``; without ``result``, of calls that have a reason."""
    return Counter([call.reason for call in calls if (call.result is result if result else call.reason)])


def _interleave_shares(by_node: Iterable[tuple[Node, Any, int]]) -> list[tuple[Node, Any]]:
    """Split each node's pages into ``count`` shares, one per connection, and let the nodes take turns. Pages are dealt
    round-robin, so that those that arrive before a call is cut off nearly form a leading run."""
    shares = [(turn, node, pages[turn::count]) for node, pages, count in by_node for turn in range(count)]
    return [(node, pages) for _, node, pages in sorted(shares, key=lambda share: share[0])]


def _finish(calls: Sequence[PageCall], result: Any, reason: str) -> None:
    for call in calls:
        if call.result is None:
            call.finish(result, reason)

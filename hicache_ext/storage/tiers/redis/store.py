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
"""Connections tried for one page: the first may have died while it was idle."""
_SHARE = 256 * 1024
"""Bytes below which another connection does not pay."""
_NATIVE_SHARE = 8 << 20
_LARGE_SHARE, _LARGE_PAGE = 4 << 20, 512 * 1024
"""The same for the native core, of which one thread does what a server can; measured in docs/decisions/redis.md."""
_MOST_THREADS = 64
_NEVER_ALLOWED = ("NOPERM", "unknown command")
"""What commands are answered with that the server's administrator has taken away."""
_NO_REFUSALS = {"memory", "too_large", "suspect", "clearing", "moving"}
"""Why pages are not written to a server that takes others, or is full."""
_OF_SLOTS = ("CLUSTERDOWN", "CROSSSLOT")
"""Refusals that are of the pages' slots, not of the node: the second one is that of a cluster's node that passes for a
single server (cluster: false)."""
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


class RedisPageStore(PoolStore):
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
            tls = tls_contexts(tier) if tier.tls else None
        except (ssl.SSLError, OSError) as error:
            raise StoreSetupError(name, f"the TLS files cannot be used: {error.strerror or error}") from None
        self._topology = Topology(name, tier, tls, self.metrics)
        nodes = max(3, len(self._topology.nodes)) if self._topology.is_cluster else 1
        try:
            # One thread for every connection, so that a node that hangs cannot keep the others' pages waiting.
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
        """Raises StoreSetupError where a server does not let its user do what serving does. Other refusals pass: a node
        that answers no reads is down until it does, and one that takes no writes is read."""
        for node in self._topology.nodes:
            # Of any slot: a node says what its user may not do before it says whose the slot is.
            name = self._page_name(os.urandom(KEY_LENGTH))
            try:
                with node.aside(short_call(self._tier)) as connection:
                    refused = refused_commands(connection, name, writes=not self._tier.only_read)
            except (OSError, StoreError, ConfigError):
                continue
            missing = [one for one in refused if one.code in _NEVER_ALLOWED]
            words = " and ".join(str(one) for one in missing)
            if any(one.code == "NOPERM" or one.word not in REMOVES for one in missing):
                rules = " ".join(f"+{one.word.decode().lower()}" for one in missing if one.code == "NOPERM")
                remedy = f"ACL SETUSER with {rules} ~{self._tier.prefix}*" if rules else "use a server that has it"
                raise StoreSetupError(self.name, f"redis at {node.endpoint}: {words}", [remedy])
            if missing:
                text = "tier %s: redis at %s: %s: pages that are cleared or damaged may not be removed there"
                logger.warning(text, self.name, node.endpoint, words)
            passing = [one for one in refused if one.word not in WRITES]
            if passing:
                node.mark_down(passing[0], self._unused_name(name))

    def _unused_name(self, like: bytes) -> bytes:
        """One that no page has: in a cluster in the slot of the page ``like``, by a hash tag."""
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
        """How full all nodes that are up are together, as they say; everything they hold counts, whoever wrote it.

        Raises StoreError, OSError: also where the user may not use INFO.
        """
        used = capacity = 0.0
        for node in self._topology.nodes:
            if not node.up:
                continue
            with node.aside() as connection:
                facts = connection.info(b"memory")
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
        """The pages whose copies are not what they should be; looked at again on another thread."""
        for call in calls:
            if call.seen:
                self._bad_pages.suspect(call.key, call.size, call.reason)

    def _aside(self, key: bytes, talk: Callable[[Connection, bytes], _Found | None]) -> _Found | None:
        """What ``talk`` finds under the name of a page, over a connection of its own. Raises NotReadError."""
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
        """For ``BadPages``, as ``remove_bad``."""
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
        """Page by page, whatever is wrong."""
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
        self._write_pages(self._settled([call for call in calls if call.reason == "suspect"], deadline), deadline)
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
        """The stored copies of these pages were cleared: a write would find them and answer EXISTS."""
        removals = [PageCall(call.key, call.name) for call in calls]
        self._run(removals, partial(ask_integers, word=b"UNLINK"), deadline, None)
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
            if verdict.free or (verdict is Verdict.GOOD and not call.seen):
                call.result, call.reason, call.seen = None, "", False
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
        return leading_in_portions(keys, lambda some: self._present(some, deadline), _LEADING_AT_ONCE)

    def _present(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        """EXISTS, and not STRLEN or TYPE: it alone leaves the order of eviction as it is."""
        # Before the server is asked: what is removed meanwhile would have been there and be no suspect any more.
        hidden: list[int] = []
        if self._bad_pages.hides_some or self._clearing.hides_some:
            hidden = [page for page, key in enumerate(keys) if self._bad_pages.hides(key) or self._clearing.hides(key)]
        failed: Counter[str] = Counter()
        if self._topology.is_cluster:
            calls = self._asked(keys, deadline, b"EXISTS", looks=True)
            present, failed = [call.result == 1 for call in calls], _reasons(calls)
        else:
            # There is one server: one call stands for all pages.
            names = page_names_of(self._page_names, keys)
            one = PageCall(b"", names[0])
            self._run([one], partial(ask_presence, names=names), deadline, None, looks=True)
            failed = Counter({one.reason: len(keys)} if one.reason else {})
            present = [False] * len(keys) if failed else [*map(bool, one.result)]
        for page in hidden:
            present[page] = False
        if failed:
            raise UnansweredError(present, failed.total(), len(keys), failed)
        return present

    def _remove(self, keys: Sequence[bytes]) -> int:
        self._bad_pages.clear(keys)
        removals = self._asked(keys, self._deadline(), b"UNLINK")
        self.count_errors(_reasons(removals))
        return sum(call.result for call in removals)

    def _asked(self, keys: Sequence[bytes], deadline: float, word: bytes, *, looks: bool = False) -> list[PageCall]:
        """A command whose answer is an integer, for each page."""
        calls = [PageCall(*one) for one in zip(keys, page_names_of(self._page_names, keys), strict=True)]
        self._run(calls, partial(ask_integers, word=word), deadline, None, hidden=0, looks=looks)
        return calls

    def _clear(self, digests: Sequence[bytes] | None) -> int:
        """See ``Clearing``. The answer counts the identities whose pages were found within a second."""
        found = self._clearing.clear(digests, self._sweep, _CLEAR_WAIT)
        if digests is None:
            self._documents_saved.clear()
        return found

    def _sweep(self, cleared: Cleared) -> None:
        sweep_nodes(cleared, self._topology, self._tier, self.metrics)

    def _part_of(self, key: bytes) -> Endpoint | None:
        """The server that has a page."""
        node = self._topology.node_of(self._page_name(key))
        return None if node is None else node.endpoint

    # -- pages on their way: over nodes and connections --------------------------------------------------------------

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
        """Give every call a result: by ``talk`` with the nodes, and where that fails TIMEOUT or ERROR of ``results``.

        Without ``results`` the answer is 0. ``hidden`` is the result of pages that were cleared; without it they are
        asked for like any other. ``looks``: nothing is changed.
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
        shares = _in_turns((node, pages, self._shares(pages, results)) for node, pages in waiting.items())
        self._threads.run(len(shares), lambda n: self._talk(*shares[n], talk, deadline, results, looks=looks))
        if not (elsewhere := [call for call in calls if call.result is ELSEWHERE]):
            return
        # Their slot is on its way to another node, or there: absent, and not written until the map names it.
        kinds = _reasons(elsewhere)
        self.metrics.add_many("redirect", kinds)
        if kinds["moved"]:
            asked = next(call.name for call in elsewhere if call.reason == "moved")
            self._topology.refresh_soon(self._topology.node_of(asked))
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
        """Results of the pages that need nothing but a healthy server, moved by the native core. None while pages are
        hidden, or writes wait for verdicts.

        Only good news is told: read or stored, and that a page is not there (read) or there already (written). None
        for any other page: ``_run`` finds out what is wrong, and says what it makes of it.
        """
        write, nothing = results is SetResult, [None] * len(batch)
        if self._clearing.hides_some or (write and self._bad_pages.hides_some):
            return nothing
        pages = None if self._tier.tls else NativeCall.of(batch, self._page_names, self._tier.ttl, write=write)
        if pages is None:
            return nothing
        of_nodes: list[tuple[Node, npt.NDArray[np.int64], int]] = []
        for node, positions in self._positions_by_node(batch.keys):
            if node is None or not node.up or (write and node.writes.in_doubt):
                continue
            size = batch.sizes[0]
            # A page to write is hashed before its first byte can be sent: meanwhile other connections send large ones.
            share = _LARGE_SHARE if write and size >= _LARGE_PAGE else _NATIVE_SHARE
            count = max(1, min(node.pages.free, len(positions) * size // share, len(positions)))
            of_nodes.append((node, positions, count))
        shares = _in_turns(of_nodes)

        def move(number: int) -> None:
            node, positions = shares[number]
            try:
                with node.connection(node.pages, deadline) as connection:
                    if connection.descriptor is not None:
                        pages.talk(connection, np.ascontiguousarray(positions))
            except LaneBusyError:
                return
            except (OSError, ProtocolError) as error:
                # Whatever else it is ``_run`` meets again, unless it has passed. It has no time.
                if isinstance(error, TimeoutError):
                    (node.missed_write if write else node.mark_down)(error)

        self._threads.run(len(shares), move)
        return pages.results()

    def _positions_by_node(self, keys: Sequence[bytes]) -> list[tuple[Node | None, npt.NDArray[np.int64]]]:
        if not self._topology.is_cluster:
            return [(self._topology.node_of(b""), np.arange(len(keys), dtype=np.int64))]
        of_nodes = grouped(map(self._topology.node_of, page_names_of(self._page_names, keys)))
        return [(node, np.array(found, np.int64)) for node, found in of_nodes.items()]

    def _shares(self, calls: list[PageCall], results: type | None) -> int:
        """How many connections share the pages of a node; one does for short requests."""
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
        """``looks``: a read or a look-up. Only what one of them meets takes the node from readers."""
        timed_out, failed = (0, 0) if results is None else (results.TIMEOUT, results.ERROR)
        reason, writes = "connection", results is SetResult
        lane = node.requests if results is None else node.pages
        for attempt in range(_ATTEMPTS):
            waiting = [call for call in calls if call.result is None]
            if not waiting:
                return
            if time.monotonic() >= deadline:
                # Used up by others: nothing is known of this node.
                _finish(calls, timed_out, "timeout")
                return
            try:
                now = partial(talk, pause=node.writes.reason) if writes else talk
                with node.connection(lane, deadline, fresh=attempt > 0) as connection:
                    refusal = now(connection, waiting) or ""
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
                if writes and reason not in _OF_SLOTS:
                    node.refused_write(reason)
                elif looks and reason not in _OF_SLOTS:
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

    # -- the rest --------------------------------------------------------------------------------------------------

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
    """Why calls ended so; without a ``result``, why calls that are answered with an integer have none."""
    return Counter([call.reason for call in calls if (call.result is result if result else call.reason)])


def _in_turns(of_nodes: Iterable[tuple[Node, Any, int]]) -> list[tuple[Node, Any]]:
    """The pages of each node in so many shares, one for each connection, the nodes taking turns. Dealt round-robin: the
    pages that came before a call is cut are then nearly a leading run."""
    shares = [(turn, node, pages[turn::count]) for node, pages, count in of_nodes for turn in range(count)]
    return [(node, pages) for _, node, pages in sorted(shares, key=lambda share: share[0])]


def _finish(calls: Sequence[PageCall], result: Any, reason: str) -> None:
    for call in calls:
        if call.result is None:
            call.finish(result, reason)

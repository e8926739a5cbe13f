"""How the pages of a call are spread over nodes and connections, and sent on where a cluster has moved them."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hicache_ext.errors import LaneBusyError, NodeDownError, ProtocolError, RefusedError
from hicache_ext.runtime.log_limit import LimitedLog
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.runtime.threads import ThreadPool
from hicache_ext.storage.contract.store import GetResult, PageBatch, SetResult
from hicache_ext.storage.tiers.redis.clients import short_call
from hicache_ext.storage.tiers.redis.config import RedisTierConfig
from hicache_ext.storage.tiers.redis.connection import Connection
from hicache_ext.storage.tiers.redis.names import page_prefix
from hicache_ext.storage.tiers.redis.node import Lane, Node
from hicache_ext.storage.tiers.redis.page_calls import PageCall, look_for_pages
from hicache_ext.storage.tiers.redis.talk_code import Columns, Limits, PageWords, talk_code
from hicache_ext.storage.tiers.redis.topology import Topology

logger = logging.getLogger(__name__)

Talk = Callable[[Connection, Sequence[PageCall]], str | None]
"""The commands for some pages on one connection (page_calls.py). Of writes, it says why the server takes none."""

_ATTEMPTS = 2
"""Connections tried for one page: the first may have died while it was idle."""
_REDIRECTIONS = 3
_SHARE = 256 * 1024
"""Bytes below which another connection does not pay."""
_COMPILED_SHARE = 8 << 20
_LARGE_SHARE, _LARGE_PAGE = 4 << 20, 512 * 1024
"""The same for compiled code, of which one thread does what a server can; measured in docs/decisions/redis.md."""
_MOST_THREADS = 64
_AWAY = frozenset({"LOADING", "MASTERDOWN", "NOAUTH"})
"""Errors that are a state of the node: it is out of service until a login works again."""


class Dispatch:
    """The threads of one tier that talk to its nodes. Threads: any."""

    def __init__(
        self,
        name: str,
        tier: RedisTierConfig,
        topology: Topology,
        hides: Callable[[bytes], bool],
        metrics: TierMetrics,
    ) -> None:
        """``hides``: the page was cleared. Raises RuntimeError when the machine has no threads left."""
        self._name = name
        self._tier = tier
        self._topology = topology
        self._hides = hides
        self._metrics = metrics
        self._log = LimitedLog(logger)
        self._turns = itertools.count()
        self._page_words: dict[int, PageWords] = {}
        # Loaded, or begun to be compiled, when a tier opens and not by its first call.
        if not tier.tls:
            talk_code()
        nodes = max(3, len(topology.nodes)) if topology.is_cluster else 1
        # One thread for every connection, so that a node that hangs cannot keep the others' pages waiting.
        self._threads = ThreadPool(f"hicache-{name}", min(_MOST_THREADS, tier.connections * nodes))

    def close(self) -> None:
        self._threads.close()

    def run(
        self,
        calls: list[PageCall],
        talk: Talk,
        deadline: float,
        results: type[GetResult] | type[SetResult] | None,
        hidden: Any = None,
        *,
        examines: bool = False,
        looks: bool = False,
    ) -> None:
        """Give every call a result: by ``talk`` with the nodes, and where that fails TIMEOUT or ERROR of ``results``.

        Without ``results`` the answer is 0. ``hidden`` is the result of pages that were cleared; without it they are
        asked for like any other. ``examines``: over connections that are used for nothing else. ``looks``: nothing is
        changed, so that a replica may answer while its primary is down.
        """
        timed_out: Any = 0 if results is None else results.TIMEOUT
        failed: Any = 0 if results is None else results.ERROR
        waiting: dict[Node, list[PageCall]] = {}
        for call in calls:
            node = self._topology.node_of(call.name)
            if looks and node is not None and not node.up:
                node = self._topology.reader_of(node, next(self._turns))
            if node is None:
                call.finish(failed, "no_node")
            elif hidden is not None and self._hides(call.key):
                call.finish(hidden)
            else:
                waiting.setdefault(node, []).append(call)
        for _ in range(1 + _REDIRECTIONS):
            if examines:
                shares = [(node, node.examinations, pages) for node, pages in waiting.items()]
            else:
                shares = self._shares(waiting, short=results is None)
            self._threads.run(len(shares), lambda n: self._talk(*shares[n], talk, deadline, timed_out, failed))  # noqa: B023
            if not self._topology.is_cluster:
                break
            waiting = self._redirected([call for pages in waiting.values() for call in pages], deadline, failed)
            if not waiting:
                return
        # Sent on without end, or by a server that was no cluster when it was last looked at.
        left = [call for pages in waiting.values() for call in pages if call.result is None]
        if left:
            self._topology.refresh_soon()
        for call in left:
            call.finish(failed, "redirected")

    def move(
        self,
        batch: PageBatch,
        names: Callable[[], Sequence[bytes]],
        deadline: float,
        results: type[GetResult] | type[SetResult],
    ) -> list[Any]:
        """Results of the pages that need nothing but a healthy server, moved by compiled code; ``names``: Redis' keys.

        Only good news is told: read or stored, and that a page is not there (read) or there already (written). None
        for any other page: ``run`` finds out what is wrong, and says what it makes of it.
        """
        write, nothing = results is SetResult, [None] * len(batch)
        code = None if self._tier.tls or not len(batch) else talk_code()
        columns = None if code is None else Columns.of(batch, writable=not write)
        if code is None or columns is None:
            return nothing
        talk = code.write if write else code.read
        words = self._words(columns.memory.page_bytes)
        shares: list[tuple[int, Node, npt.NDArray[np.int64], bool]] = []
        of_replicas: list[int] = []
        turn = next(self._turns)
        for primary, positions in self._positions_by_node(len(batch), names):
            # What a replica lacks is left, and asked of its primary.
            node = primary if write else self._topology.reader_of(primary, turn)
            if node is None or not node.up or (write and node.writes.in_doubt):
                continue
            of_replicas += [] if node is primary else positions.tolist()
            size = batch.sizes[0]
            # A page to write is hashed before its first byte can be sent: meanwhile other connections send large ones.
            share = _LARGE_SHARE if write and size >= _LARGE_PAGE else _COMPILED_SHARE
            count = max(1, min(node.pages.free, len(positions) * size // share, len(positions)))
            # Dealt round-robin, as in ``_shares``.
            again = node is primary
            shares += [(first, node, np.ascontiguousarray(positions[first::count]), again) for first in range(count)]
        shares.sort(key=lambda share: share[0])

        def move(number: int) -> None:
            _, node, positions, is_asked_again = shares[number]
            try:
                with node.connection(node.pages, deadline) as connection:
                    descriptor = connection.descriptor
                    if descriptor is None or (write and not connection.answers_questions):
                        return
                    limits = Limits(deadline, connection.window(self._tier.in_flight))
                    talk(descriptor, columns, positions, words, limits)
            except LaneBusyError:
                return
            except (OSError, ProtocolError) as error:
                # Whatever else it is ``run`` meets again, unless it has passed. It asks no replica, and has no time.
                if isinstance(error, TimeoutError) or not is_asked_again:
                    node.mark_down(error)

        self._threads.run(len(shares), move)
        if write:
            return code.results(columns, SetResult.STORED, SetResult.EXISTS)
        moved = code.results(columns, GetResult.HIT, GetResult.MISS)
        for position in of_replicas:
            if moved[position] is GetResult.MISS:
                moved[position] = None
        return moved

    def _words(self, payload: int) -> PageWords:
        words = self._page_words.get(payload)
        if words is None:
            words = self._page_words[payload] = PageWords.of(page_prefix(self._tier.prefix), payload, self._tier.ttl)
        return words

    def _positions_by_node(
        self, pages: int, names: Callable[[], Sequence[bytes]]
    ) -> list[tuple[Node | None, npt.NDArray[np.int64]]]:
        if not self._topology.is_cluster:
            return [(self._topology.node_of(b""), np.arange(pages, dtype=np.int64))]
        positions: dict[Node | None, list[int]] = {}
        for position, name in enumerate(names()):
            positions.setdefault(self._topology.node_of(name), []).append(position)
        return [(node, np.array(found, np.int64)) for node, found in positions.items()]

    def _shares(self, waiting: dict[Node, list[PageCall]], *, short: bool) -> list[tuple[Node, Lane, list[PageCall]]]:
        """The work of one connection each, the nodes taking turns."""
        by_turn: list[tuple[int, Node, Lane, list[PageCall]]] = []
        for node, calls in waiting.items():
            if short:
                by_turn.append((0, node, node.requests, calls))
                continue
            wanted = sum([call.size for call in calls]) // _SHARE
            count = max(1, min(self._tier.connections, wanted, len(calls)))
            # Dealt round-robin: the pages that came before a call is cut are then nearly a leading run.
            by_turn += [(turn, node, node.pages, calls[turn::count]) for turn in range(count)]
        by_turn.sort(key=lambda share: share[0])
        return [share[1:] for share in by_turn]

    def _talk(
        self, node: Node, lane: Lane, calls: list[PageCall], talk: Talk, deadline: float, timed_out: Any, failed: Any
    ) -> None:
        reason = "connection"
        for attempt in range(_ATTEMPTS):
            waiting = [call for call in calls if call.result is None and call.redirect is None]
            if not waiting:
                return
            if time.monotonic() >= deadline:
                # Used up by others: nothing is known of this node.
                _finish(calls, timed_out, "timeout")
                return
            try:
                refusal = node.writes.reason if failed is SetResult.ERROR else ""
                with node.connection(lane, deadline, fresh=attempt > 0) as connection:
                    if refusal:
                        look_for_pages(connection, waiting, refusal)
                        return
                    refusal = talk(connection, waiting) or ""
                if refusal:
                    # Nothing else is wrong with the server: it goes on being read.
                    node.writes.begin(refusal)
                    self._topology.refresh_soon()
                elif failed is SetResult.ERROR and any(call.result is SetResult.STORED for call in waiting):
                    node.writes.end()
                return
            except NodeDownError:
                reason = "down"
                break
            except LaneBusyError:
                _finish(calls, timed_out, "busy")
                return
            except TimeoutError as error:
                node.mark_down(error)
                _finish(calls, timed_out, "timeout")
                return
            except RefusedError as error:
                reason = error.code
                if error.code == "READONLY":
                    node.writes.begin("readonly")
                    self._topology.refresh_soon()
                    break
                if error.code in _AWAY:
                    node.mark_down(error)
                    break
                if error.code == "CLUSTERDOWN":
                    self._topology.refresh_soon()
                    break
            except ProtocolError as error:
                reason = "protocol"
                words = "tier %s: %s does not speak RESP: %s"
                self._log.log(logging.WARNING, "protocol", words, self._name, node.endpoint, error)
            except OSError as error:
                reason = "connection"
                logger.debug("tier %s: %s: %s", self._name, node.endpoint, error)
            self._metrics.add("connection", "lost")
        _finish(calls, failed, reason)

    def _redirected(self, calls: list[PageCall], deadline: float, failed: Any) -> dict[Node, list[PageCall]]:
        """The calls that another node was named for, by that node; ``failed`` where too many strangers were named."""
        waiting: dict[Node, list[PageCall]] = {}
        for call in calls:
            if call.redirect is None:
                continue
            kind, slot, endpoint = call.redirect
            call.redirect = None
            call.asking = kind == "ASK"
            self._metrics.add("redirect", kind.lower())
            known = self._topology.node_of(call.name)
            if not endpoint.host and known is not None:
                # "The same host as the one that was asked."
                endpoint = endpoint._replace(host=known.endpoint.host)
            node = self._topology.asked(endpoint) if call.asking else self._topology.redirected(slot, endpoint)
            if node is None:
                call.finish(failed, "redirected")
                continue
            node.wait_until_tried(min(short_call(self._tier), max(0.0, deadline - time.monotonic())))
            waiting.setdefault(node, []).append(call)
        return waiting


def _finish(calls: Sequence[PageCall], result: Any, reason: str) -> None:
    for call in calls:
        if call.result is None and call.redirect is None:
            call.finish(result, reason)

"""How the pages of a call are spread over nodes and connections, and sent on where a cluster has moved them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from hicache_ext.errors import LaneBusyError, NodeDownError, ProtocolError, RefusedError
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.runtime.threads import ThreadPool
from hicache_ext.storage.contract.store import GetResult, SetResult
from hicache_ext.storage.tiers.redis.clients import short_call
from hicache_ext.storage.tiers.redis.config import RedisTierConfig
from hicache_ext.storage.tiers.redis.connection import Connection
from hicache_ext.storage.tiers.redis.node import Lane, Node
from hicache_ext.storage.tiers.redis.page_calls import PageCall
from hicache_ext.storage.tiers.redis.topology import Topology

logger = logging.getLogger(__name__)

Talk = Callable[[Connection, Sequence[PageCall]], None]
"""The commands for some pages on one connection (page_calls.py)."""

_ATTEMPTS = 2
"""Connections tried for one page: the first may have died while it was idle."""
_REDIRECTIONS = 3
_SHARE = 256 * 1024
"""Bytes below which another connection does not pay."""
_MOST_THREADS = 64
_MEMORY_PAUSE = 1.0
"""Seconds without writes to a node that is out of memory: it answers so only after it received the payload."""
_AWAY = frozenset({"LOADING", "MASTERDOWN", "NOAUTH", "READONLY"})
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
    ) -> None:
        """Give every call a result: by ``talk`` with the nodes, and where that fails TIMEOUT or ERROR of ``results``.

        Without ``results`` the answer is 0. ``hidden`` is the result of pages that were cleared; without it they are
        asked for like any other. ``examines``: over connections that are used for nothing else.
        """
        timed_out: Any = 0 if results is None else results.TIMEOUT
        failed: Any = 0 if results is None else results.ERROR
        waiting: dict[Node, list[PageCall]] = {}
        for call in calls:
            node = self._topology.node_of(call.name)
            if node is None:
                call.finish(failed, "no_node")
            elif hidden is not None and self._hides(call.key):
                call.finish(hidden)
            elif results is SetResult and time.monotonic() < node.writes_rejected_until:
                call.finish(SetResult.REJECTED, "memory")
            else:
                waiting.setdefault(node, []).append(call)
        for _ in range(1 + _REDIRECTIONS):
            if examines:
                shares = [(node, node.examinations, pages) for node, pages in waiting.items()]
            else:
                shares = self._shares(waiting, short=results is None)
            self._threads.run(len(shares), lambda n: self._talk(*shares[n], talk, deadline, timed_out, failed))  # noqa: B023
            if results is SetResult:
                self._note_full_nodes(waiting)
            if not self._topology.is_cluster:
                break
            waiting = self._redirected([call for pages in waiting.values() for call in pages], deadline)
            if not waiting:
                return
        # Sent on without end, or by a server that was no cluster when it was last looked at.
        left = [call for pages in waiting.values() for call in pages if call.result is None]
        if left:
            self._topology.refresh_soon()
        for call in left:
            call.finish(failed, "redirected")

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
            try:
                with node.connection(lane, deadline, fresh=attempt > 0) as connection:
                    talk(connection, waiting)
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
                if error.code in _AWAY:
                    node.mark_down(error)
                    break
                if error.code == "CLUSTERDOWN":
                    self._topology.refresh_soon()
                    break
            except ProtocolError as error:
                reason = "protocol"
                logger.warning("tier %s: %s does not speak RESP: %s", self._name, node.endpoint, error)
            except OSError as error:
                reason = "connection"
                logger.debug("tier %s: %s: %s", self._name, node.endpoint, error)
            self._metrics.add("connection", "lost")
        _finish(calls, failed, reason)

    def _redirected(self, calls: list[PageCall], deadline: float) -> dict[Node, list[PageCall]]:
        """The calls that another node was named for, by that node."""
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
            node.wait_until_tried(min(short_call(self._tier), max(0.0, deadline - time.monotonic())))
            waiting.setdefault(node, []).append(call)
        return waiting

    def _note_full_nodes(self, waiting: dict[Node, list[PageCall]]) -> None:
        for node, calls in waiting.items():
            if any(call.reason == "memory" for call in calls):
                if time.monotonic() >= node.writes_rejected_until + _MEMORY_PAUSE:
                    logger.warning("tier %s: %s is out of memory; writes to it pause", self._name, node.endpoint)
                node.writes_rejected_until = time.monotonic() + _MEMORY_PAUSE


def _finish(calls: Sequence[PageCall], result: Any, reason: str) -> None:
    for call in calls:
        if call.result is None and call.redirect is None:
            call.finish(result, reason)

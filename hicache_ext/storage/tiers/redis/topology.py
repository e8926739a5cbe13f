"""The map from keys to nodes, and the loop that keeps it up to date.

A key's slot is CRC16-XMODEM of the key modulo 16384 (redis.io/docs/latest/operate/oss_and_stack/reference/
cluster-spec). The map comes from CLUSTER SLOTS, sent to one node at a time. Sentinels are asked for the primary.
Nodes and Sentinels are ``Node`` objects, each of which connects on its own thread: one that is dead, or whose name
resolution hangs, delays no one. Replicas are not read: they may lack what was just written.
"""

from __future__ import annotations

import binascii
import contextlib
import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from hicache_ext.errors import (
    ClearLaterError,
    ConfigError,
    ProtocolError,
    RefusedError,
    StoreError,
    StoreSetupError,
)
from hicache_ext.runtime.background import BackgroundLoop
from hicache_ext.runtime.log_limit import LimitedLog
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.storage.contract import abilities
from hicache_ext.storage.contract.abilities import LARGEST_DOCUMENT, LARGEST_SUM, document_in
from hicache_ext.storage.contract.clearing import Cleared
from hicache_ext.storage.tiers.redis.config import Endpoint, RedisTierConfig
from hicache_ext.storage.tiers.redis.connection import (
    LONGEST_LINE,
    MOST_RECEIVED,
    Answer,
    Connection,
    ErrorReply,
    TlsContexts,
    command,
    identity_name,
    is_hex,
    page_key,
    page_name,
    page_prefix,
    short_call,
)
from hicache_ext.storage.tiers.redis.node import Node, error_words

logger = logging.getLogger(__name__)

SLOTS = 16384

MOST_NODES = 2000
"""Maximum nodes in a map: Redis recommends at most 1,000, Valkey 2,000."""

_REFRESH_INTERVAL = 30.0
"""Seconds between two reads of the map when nothing seems wrong."""
_SENTINEL_INTERVAL = 5.0
"""The same with Sentinels: an old primary may go on answering for a while."""
_REFRESH_PAUSE = 0.5
"""Minimum seconds between two reads, however many pages have moved."""
_NAMES_INTERVAL = 30.0
"""Seconds between two resolutions of the nodes' names."""
_LOG_INTERVAL = 60.0
"""Seconds between two log messages about the same problem."""
_LONGEST_FAREWELL = 5.0

_Map = list[Endpoint | None]
"""The primary of each slot; None if it has no primary with a usable name."""


class Topology:
    """The nodes of a tier. Threads: any; ``node_of`` costs a list access and, in a cluster, a checksum of the key."""

    def __init__(self, name: str, tier: RedisTierConfig, tls: TlsContexts | None, metrics: TierMetrics) -> None:
        """Reach a server and learn the map, within the tier's timeout.

        Raises StoreSetupError if no server can be reached and the tier is ``required``, and always if the server
        contradicts the configuration. If the tier is not required, the keeper goes on trying.
        """
        self._name = name
        self._tier = tier
        self._tls = tls
        self._metrics = metrics
        self._nodes: dict[Endpoint, Node] = {}
        """The nodes in the map and those that are asked for a map. Only the keeper changes this."""
        self._sentinels: list[Node] = []
        self._slots: list[Node | None] = [None]
        """The node of each slot; a single entry for all keys if the server is not a cluster."""
        self._last_look = -_REFRESH_INTERVAL
        self._refresh_wanted = False
        self._told_by: Node | None = None
        """The node that last reported a stale map."""
        self._problem: BaseException | None = None
        """Why the last attempt to learn the map failed."""
        self._looked = threading.Event()
        self._interval = _REFRESH_INTERVAL if tier.service is None else _SENTINEL_INTERVAL
        self._log = LimitedLog(logger, _LOG_INTERVAL)
        self._names = BackgroundLoop(f"hicache-{name}-names", self._follow_names)
        self._keeper = BackgroundLoop(f"hicache-{name}-keeper", self._keep)
        if not self._keeper.wake():
            raise StoreSetupError(name, "there is no thread to keep its topology with")
        reached = self._looked.wait(tier.longest_call)
        problem = self._problem if reached else TimeoutError(f"no answer within {tier.longest_call:g} s")
        if isinstance(problem, StoreSetupError) or (problem is not None and tier.required):
            self.close()
            if isinstance(problem, StoreSetupError):
                raise problem
            servers = ", ".join(str(endpoint) for endpoint in tier.endpoints)
            raise StoreSetupError(name, f"redis at {servers}: {error_words(problem)}")
        if problem is not None:
            logger.warning("tier %s: not reachable yet: %s", name, error_words(problem))

    # -- used by page calls ----------------------------------------------------------------------------------------

    @property
    def is_cluster(self) -> bool:
        return len(self._slots) > 1

    @property
    def nodes(self) -> list[Node]:
        """The nodes that hold pages."""
        return list({id(node): node for node in self._slots if node is not None}.values())

    def node_of(self, redis_key: bytes) -> Node | None:
        """Return the node that holds a key; None if its slot has no node. Our keys have no hash tag."""
        slots = self._slots
        return slots[slot_of(redis_key) if len(slots) > 1 else 0]

    def slots_without_node(self) -> int:
        """Return the number of slots without a node: their pages are misses."""
        return self._slots.count(None)

    def refresh_soon(self, told_by: Node | None = None) -> None:
        """Have the keeper read the map again, first from ``told_by``, the node that reported a stale map."""
        self._told_by = told_by
        self._refresh_wanted = True
        self._keeper.wake()

    def close(self) -> None:
        """Stop the threads. Waits for work in progress, but at most a few seconds: name resolution may hang."""
        deadline = time.monotonic() + _LONGEST_FAREWELL
        self._names.stop(0)
        self._keeper.stop(_LONGEST_FAREWELL)
        nodes = [*self._nodes.values(), *self._sentinels]
        for node in nodes:
            node.close(0)
        for node in nodes:
            node.close(max(0.0, deadline - time.monotonic()))
        self._names.stop(max(0.0, deadline - time.monotonic()))

    def _node(self, endpoint: Endpoint) -> Node:
        """Return the node at ``endpoint``, created if new; a new node is down until it is reached."""
        node = self._nodes.get(endpoint)
        if node is None:
            node = self._nodes[endpoint] = Node(self._tier, endpoint, self._tls, self._metrics, self.refresh_soon)
        return node

    # -- the keeper ------------------------------------------------------------------------------------------------

    def _keep(self) -> float:
        left = self._last_look + self._pause() - time.monotonic()
        if left > 0:
            return left
        self._refresh_wanted = False
        self._last_look = time.monotonic()
        self._names.wake(_NAMES_INTERVAL)
        try:
            problem = self._learn()
        except StoreSetupError as error:
            problem = error
        except Exception as error:  # noqa: BLE001 - the keeper must go on
            problem = error
            words = "tier %s: learning the topology ended in an error that nobody expected"
            self._log.log(logging.ERROR, "learning", words, self._name, exc_info=error)
        if self._tier.required and isinstance(problem, TimeoutError) and not self._looked.is_set():
            # A slow server gets the tier's whole timeout, since startup depends on it.
            self._refresh_wanted = True
        else:
            self._problem = problem
            self._looked.set()
        return self._pause()

    def _follow_names(self) -> None:
        for node in [*self._nodes.values(), *self._sentinels]:
            if node.up:
                node.follow_name()

    def _pause(self) -> float:
        """Return the seconds until the next read of the map, given the current state."""
        wanted = self._refresh_wanted or not self.nodes or any(not node.up for node in self.nodes)
        return _REFRESH_PAUSE if wanted else self._interval

    def _learn(self) -> BaseException | None:
        """Ask nodes until one knows every slot, or ask all Sentinels and take the majority's answer. Return why nothing
        could be learnt, or None."""
        problem: BaseException | None = None
        best: _Map | None = None
        named: Counter[Endpoint | None] = Counter()
        for node in self._informants():
            answer = self._ask(node)
            if isinstance(answer, BaseException):
                problem = problem or answer
            elif node in self._sentinels:
                named.update(answer)
            # A node that restarted without its cluster state knows no slots and must not empty the map.
            elif best is None or answer.count(None) < best.count(None):
                best = answer
            if self._keeper.stopping or (best is not None and None not in best):
                break
        if named:
            best = [named.most_common(1)[0][0]]
        return (problem or ConnectionError("no server")) if best is None else self._use(best)

    def _informants(self) -> Iterator[Node]:
        """Yield the Sentinels, if configured. Otherwise yield the known nodes and, if they do not suffice, those in the
        configuration, all of which connect in parallel."""
        if self._tier.service is None:
            yield from sorted(self._nodes.values(), key=lambda node: (not node.up, node is not self._told_by))
            yield from [self._node(endpoint) for endpoint in self._tier.endpoints]
            return
        if not self._sentinels:
            # A Sentinel has no database, and the metrics must not count it as a node.
            login = {"username": self._tier.sentinel_username, "password": self._tier.sentinel_password, "database": 0}
            tier, metrics = self._tier.model_copy(update=login), TierMetrics(self._name)
            self._sentinels = [Node(tier, one, self._tls, metrics, self.refresh_soon) for one in tier.endpoints]
        yield from self._sentinels

    def _ask(self, node: Node) -> _Map | BaseException:
        """Return the map according to a node, or why it gives none."""
        if (problem := node.problem()) is not None:
            return problem
        try:
            return self._map_of(node)
        except StoreSetupError:
            raise
        except (StoreError, OSError, ConfigError) as error:
            if isinstance(error, TimeoutError) and node in self._sentinels:
                # Otherwise a hanging Sentinel would cost every attempt a second: page calls never detect it.
                node.mark_down(error)
            return error
        except Exception as error:  # noqa: BLE001 - a malformed answer may raise anything in the code that parses it
            kind, who = type(error).__name__, node.endpoint
            words = "tier %s: %s answers what no Redis does (%s)"
            self._log.log(logging.WARNING, f"answer {who}", words, self._name, who, kind)
            return ConnectionError(f"an answer that no Redis gives ({kind})")

    def _map_of(self, node: Node) -> _Map:
        """Return the map from a node; it has one slot if it comes from a Sentinel or the server is not a cluster.
        Raises StoreError, OSError, ConfigError, and ValueError or TypeError for a malformed answer."""
        service = self._tier.service
        if service is None and self._tier.cluster is False:
            return [node.endpoint]
        with node.connection(node.requests, time.monotonic() + short_call(self._tier)) as connection:
            if service is not None:
                address: Any = connection.tell(b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", service.encode())
                if not address:
                    raise ConnectionError(f"the Sentinel knows no service {service}")
                host, port = address
                return [Endpoint.named(host, port)]
            connection.send(command(b"CLUSTER", b"SLOTS"))
            answer = connection.reader.answer(lists=True)
        if not isinstance(answer, ErrorReply):
            return _map_in(answer, node.endpoint)
        # Only ERR means "no cluster"; other codes mean that it is still loading (LOADING) or forbids this (NOPERM).
        if answer.code != "ERR":
            raise RefusedError(answer.code, b"CLUSTER SLOTS")
        if self._tier.cluster is True:
            problem = f"redis at {node.endpoint} is not a cluster, and cluster is true"
            raise StoreSetupError(self._name, problem, ["leave cluster out, or set it to false"])
        if self.is_cluster:
            raise ConnectionError(f"{node.endpoint} is in no cluster any more")
        return [node.endpoint]

    def _use(self, named: _Map) -> BaseException | None:
        """Route pages by the map ``named``; keep the old route until the primary named by Sentinels is reachable."""
        nodes = {endpoint: self._node(endpoint) for endpoint in set(named) if endpoint is not None}
        if len(named) == 1 and (problem := next(iter(nodes.values())).problem()) is not None:
            return problem
        self._slots = [None if endpoint is None else nodes[endpoint] for endpoint in named]
        for endpoint in self._nodes.keys() - nodes.keys():
            self._nodes.pop(endpoint).close(0)
        problems = [node.problem() for node in self.nodes]
        return None if None in problems else next(iter(problems), ConnectionError("it has no slots"))


def slot_of(redis_key: bytes) -> int:
    return binascii.crc_hqx(redis_key, 0) % SLOTS


def _map_in(answer: Any, asked: Endpoint) -> _Map:
    """Parse the reply to CLUSTER SLOTS. Raises ValueError or TypeError if it is malformed."""
    primaries: _Map = [None] * SLOTS
    named: set[Endpoint] = set()
    free = bytearray(b"\1") * SLOTS
    for first, last, *nodes in answer:
        if not 0 <= int(first) <= int(last) < SLOTS or 0 in free[first : last + 1]:
            raise ValueError("slots that are none, or twice there")
        free[first : last + 1] = bytes(last + 1 - first)
        (host, port, *_), *_ = nodes
        # Pages in slots whose primary has no usable name are misses until it has one.
        if (primary := _named(host, port, asked)) is not None:
            primaries[first : last + 1] = [primary] * (last + 1 - first)
            named.add(primary)
        if len(named) > MOST_NODES:
            raise ValueError("more nodes than a cluster has")
    return primaries


def _named(host: object, port: Any, asked: Endpoint) -> Endpoint | None:
    """Return the endpoint that a server names; None without a usable name, such as "?" if no host is announced."""
    try:
        # A node that does not know its own address leaves it empty: it is the node that answered.
        return Endpoint.named(host, port) if host else asked._replace(port=int(port))
    except (TypeError, ValueError):
        return None


# -- hints -------------------------------------------------------------------------------------------------------------
#
# Hints are kept in a Redis stream of bounded length, ``<prefix>hints``, which expires some time after the last write.


_FIELD = b"h"
_BEFORE_ALL = b"0-0"
_ENTRY = re.compile(rb"[0-9]{1,19}-[0-9]{1,19}")


def post_hint(tier: RedisTierConfig, topology: Topology, hint: bytes) -> None:
    keep, lifetime = b"%d" % abilities.KEPT_HINTS, b"%d" % int(2000 * abilities.HINTS_LAST)
    with _board(tier, topology, "no hint was left") as (connection, name):
        requests = [command(b"XADD", name, b"MAXLEN", keep, b"*", _FIELD, hint), command(b"PEXPIRE", name, lifetime)]
        _without_errors(connection.ask(requests), b"XADD")


def read_hints(tier: RedisTierConfig, topology: Topology, since: bytes | None) -> tuple[bytes, list[bytes]]:
    longest = abilities.LONGEST_HINT
    # Retry one by one if other writers have left hints longer than ours and the reply is too long.
    for most in (max(2, min(abilities.AT_ONCE, MOST_RECEIVED // (longest + LONGEST_LINE))), 1):
        try:
            with _board(tier, topology, "hints cannot be read") as (connection, name):
                if since is None:
                    found: Any = connection.tell(b"XREVRANGE", name, b"+", b"-", b"COUNT", b"1")
                else:
                    found = connection.tell(b"XRANGE", name, b"(" + since, b"+", b"COUNT", b"%d" % most)
                last = found[-1][0] if found else since or _BEFORE_ALL
                if not _ENTRY.fullmatch(last):
                    raise ValueError("no entry of a stream")
                hints = [dict(zip(fields[::2], fields[1::2], strict=False)).get(_FIELD) for _, fields in found or []]
                fit = [hint for hint in hints if isinstance(hint, bytes) and len(hint) <= longest]
            break
        except StoreError as error:
            if most == 1 or not isinstance(error.__cause__, ProtocolError):
                raise
    return last, [] if since is None else fit


@contextlib.contextmanager
def _board(tier: RedisTierConfig, topology: Topology, failure: str) -> Iterator[tuple[Connection, bytes]]:
    """Yield a connection to the node that holds the stream, and the stream's name. Raises StoreError: ``failure`` and
    the reason."""
    name = tier.prefix.encode() + b"hints"
    node = topology.node_of(name)
    if node is None or not node.up:
        raise StoreError("the node that holds the hints is down")
    try:
        with node.connection(node.requests, time.monotonic() + short_call(tier)) as connection:
            yield connection, name
    except (OSError, ProtocolError, RefusedError, TypeError, ValueError, IndexError) as error:
        raise StoreError(f"{failure}: {type(error).__name__}") from error


# -- scanning ----------------------------------------------------------------------------------------------------------
#
# SCAN iterates over the keys of a node for clear(), which removes pages by UNLINK, and for a tier's identity documents.
#
# It takes about a second per million keys of any kind. docs/decisions/several-tiers.md explains why the keys hold no
# generation.


_SCAN_COUNT = b"2000"
_MOST_SCANS = 1_000_000
"""Maximum requests per scan, enough for two billion keys: a faulty server may never report the end."""
_DIGEST_DIGITS = 32
_DIGITS = b"?" * _DIGEST_DIGITS
_GLOB_SPECIAL = re.compile(rb"[\\*?\[\]]")


def sweep_nodes(cleared: Cleared, topology: Topology, tier: RedisTierConfig, metrics: TierMetrics) -> None:
    """Remove cleared pages from every node; the pages of a node that left the cluster are gone with it.

    Raises ClearLaterError while a node is down or not yet known.
    """
    nodes = topology.nodes
    left = [] if nodes and not topology.slots_without_node() else ["pages have no node yet"]
    for node in nodes:
        if cleared.is_finished(node.endpoint):
            continue
        if not node.up:
            left.append(f"{node.endpoint} is down")
            continue
        try:
            with node.aside() as connection:
                _sweep_node(cleared, connection, tier, metrics)
        except (StoreError, OSError, ConfigError) as error:
            metrics.add("error", "clear")
            left.append(f"{node.endpoint}: {type(error).__name__}")
        else:
            cleared.finish(node.endpoint)
    if left:
        raise ClearLaterError(", ".join(left))


def _sweep_node(cleared: Cleared, connection: Connection, tier: RedisTierConfig, metrics: TierMetrics) -> None:
    pages = page_prefix(tier.prefix)
    # A single scan for any number of identities, since each scan visits every key of the server.
    digests = cleared.digests or ()
    only = next(iter(digests)).hex().encode() if len(digests) == 1 else b""
    only = (only or _DIGITS) + b":" + 2 * _DIGITS
    for names in scan(connection, pages, only, tier.longest_call):
        keys = [key for name in names if (key := page_key(pages, name)) is not None and cleared.has(key[:16])]
        with cleared.old_pages(keys) as old:
            metrics.add("cleared", "", _unlink(connection, [page_name(pages, key) for key in old]))
        if cleared.closing:
            return
    if cleared.digests is None:
        identities = identity_name(tier.prefix, b"")
        for names in scan(connection, identities, _DIGITS, tier.longest_call):
            _unlink(connection, [name for name in names if is_hex(name.removeprefix(identities), _DIGEST_DIGITS)])


def stored_identities(name: str, tier: RedisTierConfig, nodes: Sequence[Node]) -> dict[bytes, dict[str, Any]]:
    """Return digest -> document for the identity documents stored on all ``nodes``, for tools. Raises StoreError if a
    node cannot be asked."""
    prefix = identity_name(tier.prefix, b"")
    documents: dict[bytes, dict[str, Any]] = {}
    for node in nodes:
        try:
            with node.aside() as connection:
                room = LARGEST_SUM
                found = scan(connection, prefix, _DIGITS, tier.longest_call)
                for digest in (name.removeprefix(prefix) for names in found for name in names):
                    if not is_hex(digest, _DIGEST_DIGITS):
                        continue
                    stored = _document(connection, prefix + digest)
                    if (room := room - len(stored)) < 0:
                        break
                    if (document := document_in(stored)) is not None:
                        documents[bytes.fromhex(digest.decode())] = document
        except (StoreError, OSError, ConfigError) as error:
            raise StoreError(
                f"tier {name!r}: {node.endpoint} cannot be asked which identities it has ({type(error).__name__})"
            ) from None
    return documents


def _document(connection: Connection, name: bytes) -> bytes:
    """Return the stored document; empty if there is none or the value is something else, which any writer may leave."""
    (length,) = connection.ask([command(b"STRLEN", name)])
    if isinstance(length, ErrorReply) and length.code == "WRONGTYPE":
        return b""
    _without_errors([length], b"STRLEN")
    if not isinstance(length, int) or length > LARGEST_DOCUMENT:
        return b""
    stored = connection.tell(b"GET", name)
    return stored if isinstance(stored, bytes) else b""


def _unlink(connection: Connection, names: Sequence[bytes]) -> int:
    # One key per request: in a cluster the keys of one request must share a slot.
    replies = _without_errors(connection.ask([command(b"UNLINK", name) for name in names]), b"UNLINK")
    return sum(reply for reply in replies if isinstance(reply, int))


def _without_errors(replies: Sequence[Answer], word: bytes) -> Sequence[Answer]:
    """Return the replies to ``word``. Raises RefusedError for the first error among them."""
    for reply in replies:
        if isinstance(reply, ErrorReply):
            raise RefusedError(reply.code, word)
    return replies


def scan(connection: Connection, prefix: bytes, more: bytes, seconds: float) -> Iterator[list[bytes]]:
    """Yield portions of a node's key names that match ``prefix`` + ``more``; each portion, with the caller's requests
    for it, may take ``seconds``. The pattern ``more`` fixes the length: long foreign names would overflow a reply."""
    pattern = _GLOB_SPECIAL.sub(rb"\\\g<0>", prefix) + more
    cursor: Any = b"0"
    for _ in range(_MOST_SCANS):
        answer = connection.tell(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", _SCAN_COUNT, within=seconds)
        match answer:
            case [bytes(cursor), list(names)]:
                yield [name for name in names if isinstance(name, bytes)]
            case _:
                raise ProtocolError("SCAN was not answered as Redis does")
        if cursor == b"0":
            return
    raise ProtocolError("a scan without end")

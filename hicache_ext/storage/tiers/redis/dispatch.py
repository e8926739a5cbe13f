"""How the pages of a call are spread over nodes and connections, and sent on where a cluster has moved them."""

from __future__ import annotations

import hashlib
import itertools
import logging
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hicache_ext.errors import LaneBusyError, NodeDownError, OversizedValueError, ProtocolError, RefusedError
from hicache_ext.page import envelope
from hicache_ext.runtime.log_limit import LimitedLog
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.runtime.threads import ThreadPool
from hicache_ext.storage.contract.bad_pages import Removal, Sighting, Stored
from hicache_ext.storage.contract.store import GetResult, PageBatch, SetResult
from hicache_ext.storage.tiers.redis.clients import page_prefix, short_call
from hicache_ext.storage.tiers.redis.config import Endpoint, RedisTierConfig
from hicache_ext.storage.tiers.redis.connection import Connection, ErrorReply, Reply, Status, command, command_of_equals
from hicache_ext.storage.tiers.redis.node import Lane, Node
from hicache_ext.storage.tiers.redis.talk_code import Columns, Limits, PageWords, talk_code
from hicache_ext.storage.tiers.redis.topology import Topology

logger = logging.getLogger(__name__)

# -- page calls --------------------------------------------------------------------------------------------------------
#
# The commands on one connection to read, write, find and remove pages.
#
# Each function takes pages through ``PageCall`` and sets their ``result`` one by one, so that a connection that breaks
# in the middle leaves exactly the pages without a result to be asked for again. A page whose slot has moved gets a
# ``redirect`` instead.


HEADER_LENGTH = envelope.FIELDS_LENGTH
MOST_IN_FLIGHT = 8 << 20
"""Bytes under way on one connection; as a rule fewer are, by its round trip."""

_MOST_AT_ONCE = 256
"""Pages in one request for their presence."""
_FEW = 16
"""Pages that are asked for one by one."""
_MOST_PIPELINED = 256
_SENT_AT_ONCE = 256 * 1024
"""Bytes of small pages gathered for one system call."""
_ASKING = command(b"ASKING")
_REDIRECT = re.compile(r"(MOVED|ASK) ([0-9]{1,5}) (.*):([0-9]{1,5})", re.ASCII)

_REMOVE_IF_SAME = b"""
local length = redis.pcall('STRLEN', KEYS[1])
if type(length) == 'table' then
  if ARGV[1] ~= '-1' or not string.find(length.err, 'WRONGTYPE') then return 0 end
else
  if length ~= tonumber(ARGV[1]) then return 0 end
  local seen = tonumber(ARGV[2])
  if seen > 0 and redis.sha1hex(redis.call('GETRANGE', KEYS[1], 0, seen - 1)) ~= ARGV[3] then return 0 end
end
return redis.call('UNLINK', KEYS[1])
"""
"""The server compares: what is removed is what was seen, and no copy that came since, and nothing that only looked bad
on its way here. 0 also where nothing is there."""
_REFUSALS = {"OOM": "memory", "READONLY": "readonly"}
"""Errors by which a server refuses every write, and answers everything else."""
_WITHOUT_SCRIPTS = frozenset({"NOPERM", "ERR"})
"""A user without EVAL, or something that only speaks like Redis."""


class PageCall:
    """One page on its way: what is asked, and what became of it."""

    __slots__ = (
        "asking",
        "key",
        "name",
        "reason",
        "redirect",
        "result",
        "seen",
        "segments",
        "size",
    )

    def __init__(self, key: bytes, name: bytes, segments: Sequence[memoryview] = (), payload: int = 0) -> None:
        self.key = key
        self.name = name
        self.segments = segments
        self.size = HEADER_LENGTH + payload
        self.result: Any = None
        """GetResult, SetResult, or what was answered; None while it is not known."""
        self.reason = ""
        """Why it is CORRUPT, REJECTED or an ERROR: a word for the metrics."""
        self.redirect: tuple[str, int, Endpoint] | None = None
        self.asking = False
        self.seen: Sighting | None = None
        """Of a copy that is not this page."""

    def request(self, word: bytes) -> bytes:
        """A command whose only argument is the page's name; ``_asked`` in haste, since it is made for every page."""
        asked = b"*2\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n" % (len(word), word, len(self.name), self.name)
        return _ASKING + asked if self.asking else asked

    def finish(self, result: Any, reason: str = "") -> None:
        self.result = result
        self.reason = reason


def read_pages(connection: Connection, calls: Sequence[PageCall]) -> None:
    """GET into the pages' memory, with at most ``MOST_IN_FLIGHT`` bytes of replies asked for (or one page)."""
    header = memoryview(bytearray(HEADER_LENGTH))
    in_flight = min(MOST_IN_FLIGHT, connection.wire.window())
    sent = flying = 0
    for number, call in enumerate(calls):
        if sent < len(calls) and (sent == number or flying <= in_flight // 2):
            requests = []
            while sent < len(calls) and sent - number < _MOST_PIPELINED:
                if flying and flying + calls[sent].size > in_flight:
                    break
                requests.append(calls[sent].request(b"GET"))
                flying += calls[sent].size
                sent += 1
            if requests:
                connection.send([b"".join(requests)])
        _read_page(connection, call, header)
        flying -= call.size


def _read_page(connection: Connection, call: PageCall, header: memoryview) -> None:
    _pass_asking(connection, call)
    try:
        length = connection.reader.page_into(header, call.segments)
    except OversizedValueError as error:
        call.seen = Sighting(error.length)
        call.finish(GetResult.CORRUPT, "longer")
        raise
    except ProtocolError:
        call.finish(GetResult.ERROR, "protocol")
        raise
    if length is None:
        call.finish(GetResult.MISS)
    elif isinstance(length, ErrorReply):
        if _is_redirect(call, length):
            return
        if length.code == "WRONGTYPE":
            call.seen = Sighting(-1)
            call.finish(GetResult.CORRUPT, "type")
            return
        call.finish(GetResult.ERROR, length.code)
        raise RefusedError(length.code)
    else:
        if length != call.size:
            reason: str | None = "truncated" if length < call.size else "longer"
        else:
            reason = envelope.reason_to_refuse(header, call.key, call.segments)
        if reason is None:
            call.finish(GetResult.HIT)
        else:
            # A value of another length was thrown away, all but its beginning.
            arrived = [header, *call.segments] if length == call.size else [header[: min(length, HEADER_LENGTH)]]
            call.seen = Sighting.of(length, arrived)
            call.finish(GetResult.CORRUPT, reason)


def write_pages(connection: Connection, calls: Sequence[PageCall], ttl: int | None) -> str:
    """SET NX of the pages that are not there. A copy of another length is REJECTED, and ``seen``: the caller looks.

    Which are there is asked first: the payload of those need not be sent, and STRLEN renews their recency. The answer
    is why the server takes no writes (``_REFUSALS``), mostly nothing.
    """
    missing = _pages_missing(connection, calls)
    try:
        refusal, raced = _set_pages(connection, missing, ttl)
        connection.confirm()
    except BaseException:
        # Not confirmed: they are asked for again.
        for call in missing:
            if call.result in (SetResult.STORED, SetResult.EXISTS):
                call.result = None
        raise
    # Mostly another writer's page. Whatever it is: EXISTS means that it can be read.
    for call in _pages_missing(connection, raced):
        call.seen = Sighting(0)
        call.finish(SetResult.REJECTED, "suspect")
    return refusal


def look_for_pages(connection: Connection, calls: Sequence[PageCall], refusal: str) -> str:
    """``write_pages`` while the server takes no writes: those that are there are EXISTS, the others REJECTED."""
    for call in _pages_missing(connection, calls):
        call.finish(SetResult.REJECTED, refusal)
    return ""


def _set_pages(connection: Connection, missing: Sequence[PageCall], ttl: int | None) -> tuple[str, list[PageCall]]:
    """Why the server takes no writes, and the pages that were there when they came."""
    options = (
        b"\r\n$2\r\nNX\r\n" if ttl is None else b"\r\n$2\r\nNX\r\n$2\r\nEX\r\n$%d\r\n%d\r\n" % (len(str(ttl)), ttl)
    )
    words = 4 if ttl is None else 6
    unanswered: deque[PageCall] = deque()
    raced: list[PageCall] = []
    gathered: list[memoryview | bytes] = []
    flying = gathered_bytes = 0

    def send() -> None:
        nonlocal gathered_bytes
        if gathered:
            connection.send(gathered)
            gathered.clear()
            gathered_bytes = 0

    def take_reply() -> str:
        nonlocal flying
        call = unanswered.popleft()
        flying -= call.size
        return _written(connection, call, raced)

    refusal = ""
    in_flight = min(MOST_IN_FLIGHT, connection.wire.window())
    created_ms = int(time.time() * 1000)
    for call in missing:
        while not refusal and unanswered and flying + call.size > in_flight:
            send()
            refusal = take_reply()
        if refusal:
            break
        payload = call.size - HEADER_LENGTH
        header = envelope.encode_page(call.key, call.segments, payload, created_ms)
        asking = _ASKING if call.asking else b""
        head = b"%b*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (asking, words, len(call.name), call.name, call.size)
        gathered += [head + header, *call.segments, options]
        gathered_bytes += call.size
        flying += call.size
        unanswered.append(call)
        if gathered_bytes >= _SENT_AT_ONCE:
            send()
    send()
    while unanswered:
        refusal = take_reply() or refusal
    if refusal:
        for call in missing:
            if call.result is None and call.redirect is None and call not in raced:
                call.finish(SetResult.REJECTED, refusal)
    return refusal, raced


def _pages_missing(connection: Connection, calls: Sequence[PageCall]) -> list[PageCall]:
    missing = []
    for call, reply in zip(calls, _ask(connection, calls, b"STRLEN"), strict=True):
        if isinstance(reply, ErrorReply):
            if _is_redirect(call, reply):
                continue
            if reply.code != "WRONGTYPE":
                call.finish(SetResult.ERROR, reply.code)
                raise RefusedError(reply.code)
            length = -1
        elif (length := _integer(reply)) == call.size:
            call.finish(SetResult.EXISTS)
            continue
        if length:
            call.seen = Sighting(length)
            call.finish(SetResult.REJECTED, "suspect")
        else:
            missing.append(call)
    return missing


def _written(connection: Connection, call: PageCall, raced: list[PageCall]) -> str:
    """Why the server refused it, if it did."""
    _pass_asking(connection, call)
    reply = connection.reader.reply()
    if isinstance(reply, Status) and reply == b"OK":
        call.finish(SetResult.STORED)
    elif reply is None:
        raced.append(call)
    elif not isinstance(reply, ErrorReply):
        call.finish(SetResult.ERROR, "protocol")
        raise ProtocolError("SET was not answered as Redis does")
    elif refusal := _REFUSALS.get(reply.code):
        call.finish(SetResult.REJECTED, refusal)
        return refusal
    elif not _is_redirect(call, reply):
        call.finish(SetResult.ERROR, reply.code)
        raise RefusedError(reply.code)
    return ""


def ask_integers(connection: Connection, calls: Sequence[PageCall], word: bytes) -> None:
    """One request without payload per page (EXISTS, UNLINK) whose answer is an integer."""
    for call, reply in zip(calls, _ask(connection, calls, word), strict=True):
        if isinstance(reply, ErrorReply):
            if not _is_redirect(call, reply):
                raise RefusedError(reply.code)
        else:
            call.finish(_integer(reply))


def ask_presence(connection: Connection, calls: Sequence[PageCall], names: Sequence[bytes]) -> None:
    """EXISTS of many pages of one server, which is no node of a cluster; the one call's result is the ``bytearray`` of
    ones and zeros. Groups of them in one request, and only those of which it has some are asked for in smaller ones:
    chains are there to one page, and absent from it on."""
    (call,) = calls
    present = bytearray(len(names))
    groups = [(first, names[first : first + _MOST_AT_ONCE]) for first in range(0, len(names), _MOST_AT_ONCE)]
    while groups:
        replies = connection.ask([command_of_equals(b"EXISTS", group) for _, group in groups])
        asked, groups = groups, []
        for (first, group), reply in zip(asked, replies, strict=True):
            length = len(group)
            if isinstance(reply, ErrorReply):
                if length == 1:
                    if _is_redirect(call, reply):
                        return
                    raise RefusedError(reply.code)
                # A cluster that is not known as one yet, or a proxy that takes one key at a time.
                part = 1
            elif (count := _integer(reply)) == length:
                present[first : first + length] = b"\1" * length
                continue
            elif count and length > 1:
                part = 1 if length <= _FEW else length // 2
            else:
                # Also what no server says of one page.
                continue
            groups += [(first + at, group[at : at + part]) for at in range(0, length, part)]
    call.finish(present)


def read_again(connection: Connection, call: PageCall, most: int) -> None:
    """The first ``most`` bytes of whatever has the page's name, as ``Stored``; None where there is nothing."""
    (length,) = _ask(connection, [call], b"STRLEN")
    if isinstance(length, ErrorReply):
        if length.code == "WRONGTYPE":
            call.finish(Stored(-1, memoryview(b"")))
        elif not _is_redirect(call, length):
            raise RefusedError(length.code)
        return
    length = _integer(length)
    if length == 0 and _ask(connection, [call], b"EXISTS") == [0]:
        call.finish(GetResult.MISS)
        return
    data = memoryview(bytearray(min(length, most)))
    beginning = b"GETRANGE", call.name, b"0", b"%d" % (most - 1)
    connection.send([call.request(b"GET") if length <= most else _asked(call, *beginning)])
    _pass_asking(connection, call)
    if connection.reader.page_into(data, []) != len(data):
        raise ProtocolError("not as many bytes as the value has")
    call.finish(Stored(length, data))


def remove_bad(connection: Connection, call: PageCall, bad: Stored) -> None:
    """Remove the value if it still is ``bad``: the result is a ``Removal``."""
    digest = hashlib.sha1(bad.data, usedforsecurity=False).hexdigest().encode()
    numbers = (b"%d" % bad.length, b"%d" % len(bad.data))
    (reply,) = _replies(connection, [call], [_asked(call, b"EVAL", _REMOVE_IF_SAME, b"1", call.name, *numbers, digest)])
    if isinstance(reply, ErrorReply) and reply.code in _WITHOUT_SCRIPTS:
        # Two reads over two connections found the same; only the server's comparison is missing.
        (reply,) = _ask(connection, [call], b"UNLINK")
    if isinstance(reply, ErrorReply):
        if not _is_redirect(call, reply):
            raise RefusedError(reply.code)
    else:
        call.finish(Removal.REMOVED if _integer(reply) else Removal.CHANGED)


def _asked(call: PageCall, *words: bytes) -> bytes:
    return _ASKING + command(*words) if call.asking else command(*words)


def _ask(connection: Connection, calls: Sequence[PageCall], word: bytes) -> list[Reply]:
    return _replies(connection, calls, [call.request(word) for call in calls])


def _replies(connection: Connection, calls: Sequence[PageCall], requests: Sequence[bytes]) -> list[Reply]:
    if not any(call.asking for call in calls):
        return connection.ask(requests)
    replies: list[Reply] = []
    for call, request in zip(calls, requests, strict=True):
        connection.send([request])
        _pass_asking(connection, call)
        replies.append(connection.reader.reply())
    connection.confirm()
    return replies


def _pass_asking(connection: Connection, call: PageCall) -> None:
    if call.asking and connection.reader.reply() != b"OK":
        raise ProtocolError("ASKING was not answered as Redis does")


def _integer(reply: Reply) -> int:
    if not isinstance(reply, int):
        raise ProtocolError("not the integer that was asked for")
    return reply


def _is_redirect(call: PageCall, error: ErrorReply) -> bool:
    found = _REDIRECT.fullmatch(error.line)
    try:
        # Without a host: that of the server that was asked.
        named = None if found is None else Endpoint.named(found[3] or "-", found[4])
    except ValueError:
        named = None
    if found is None or named is None:
        return False
    call.redirect = (found[1], int(found[2]), named._replace(host=found[3]))
    return True


Talk = Callable[[Connection, Sequence[PageCall]], str | None]
"""The commands for some pages on one connection. Of writes, it says why the server takes none."""

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
                    descriptor = connection.wire.descriptor
                    if descriptor is None or (write and not connection.answers_questions):
                        return
                    limits = Limits(deadline, min(MOST_IN_FLIGHT, connection.wire.window()))
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

"""clear(): out of sight in this process at once, found by SCAN and removed with UNLINK in the background.

Walking the keys takes seconds for millions of pages, and clear() is called on SGLang's scheduler thread. Until a node
has been walked, this process neither reads nor writes the cleared identities there; a node that is down stays out of
sight until it is back and has been walked. Other processes see the pages go one by one, which is harmless: they are
right pages. (A generation in the key would clear at once for everybody; it would also make every page unreachable
whenever the one key that holds it is evicted, or the cluster node that has it is lost.)
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import redis

from hicache_ext.errors import ConfigError
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.storage.tiers.redis.node import Node
from hicache_ext.storage.tiers.redis.settings import Endpoint, RedisSettings
from hicache_ext.storage.tiers.redis.topology import Topology

logger = logging.getLogger(__name__)

_SCAN_COUNT = 2000
_WAITED_FOR = 1.0
"""Seconds after which clear() leaves the rest to its thread."""
_FIRST_PAUSE = 0.2
_LONGEST_PAUSE = 5.0

_GLOB_SPECIAL = re.compile(rb"[\\*?\[\]]")
_DIGEST_LENGTH = 16


def page_prefix(prefix: str) -> bytes:
    return prefix.encode() + b"page:"


def page_name(page_names: bytes, key: bytes) -> bytes:
    """The Redis key of a page: prefix, identity digest and page hash in hex, and no hash tag, so that a cluster
    spreads the pages of one conversation over all nodes."""
    return b"%b%b:%b" % (page_names, key[:_DIGEST_LENGTH].hex().encode(), key[_DIGEST_LENGTH:].hex().encode())


def identity_name(prefix: str, digest: bytes) -> bytes:
    return b"%bidentity:%b" % (prefix.encode(), digest.hex().encode())


class _Job:
    def __init__(self, digests: frozenset[bytes] | None, nodes: Sequence[Node]) -> None:
        self.digests = digests
        self.pending: dict[Endpoint, Node] = {node.endpoint: node for node in nodes}
        self.found: set[bytes] = set()
        self.finished = threading.Event()

    def hides(self, digest: bytes, endpoint: Endpoint) -> bool:
        return endpoint in self.pending and (self.digests is None or digest in self.digests)


class Clearing:
    """Threads: any. Never raises for what a server does."""

    def __init__(self, name: str, settings: RedisSettings, topology: Topology, metrics: TierMetrics) -> None:
        self._name = name
        self._settings = settings
        self._topology = topology
        self._metrics = metrics
        self._lock = threading.Lock()
        self._jobs: list[_Job] = []
        self._threads: list[threading.Thread] = []
        self._closing = threading.Event()

    def hides(self, key: bytes, node: Node) -> bool:
        """The page is being cleared: to this process it is absent and cannot be written yet."""
        return bool(self._jobs) and any(job.hides(key[:_DIGEST_LENGTH], node.endpoint) for job in self._jobs)

    def clear(self, digests: Sequence[bytes] | None) -> int:
        """Take the pages of these identities (None: of all) out of sight; the identities found within a second."""
        job = _Job(None if digests is None else frozenset(digests), self._topology.nodes)
        if job.digests == frozenset():
            return 0
        thread = threading.Thread(target=self._run, args=(job,), name=f"hicache-{self._name}-clear", daemon=True)
        with self._lock:
            self._jobs = [*self._jobs, job]
            try:
                thread.start()
            except RuntimeError as error:
                # No thread to be had: better slow than never.
                logger.warning("tier %s: clearing without a thread: %s", self._name, error)
                started = False
            else:
                started = True
                self._threads = [other for other in self._threads if other.is_alive()] + [thread]
        if not started:
            self._run(job)
        job.finished.wait(_WAITED_FOR)
        return len(job.found.copy())

    def close(self) -> None:
        """Waits for the nodes that are up; those that are not keep their pages."""
        self._closing.set()
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join()

    def _run(self, job: _Job) -> None:
        pause = _FIRST_PAUSE
        try:
            while job.pending:
                for endpoint, node in list(job.pending.items()):
                    if self._clear_node(job, node):
                        del job.pending[endpoint]
                # A node that has left the cluster has taken its pages with it.
                known = {node.endpoint for node in self._topology.nodes}
                for endpoint in [endpoint for endpoint in job.pending if endpoint not in known]:
                    del job.pending[endpoint]
                if job.pending and self._closing.wait(pause):
                    break
                pause = min(_LONGEST_PAUSE, pause * 2)
        finally:
            with self._lock:
                self._jobs = [other for other in self._jobs if other is not job]
            job.finished.set()

    def _clear_node(self, job: _Job, node: Node) -> bool:
        """Whether the node has been walked to the end."""
        if not node.up:
            return False
        try:
            client = self._settings.admin_client(node.endpoint, self._settings.timeout)
            try:
                for names in self._names(client, job):
                    self._unlink(client, names)
                if job.digests is None:
                    prefix = identity_name(self._settings.prefix, b"")
                    for names in scan(client, prefix, b""):
                        self._unlink(client, [name for name in names if is_hex(name.removeprefix(prefix), 32)])
            finally:
                client.close()
        except (redis.RedisError, OSError, ConfigError) as error:
            self._metrics.add("error", "clear")
            logger.warning("tier %s: clearing %s: %s", self._name, node.endpoint, type(error).__name__)
            return False
        return True

    def _names(self, client: redis.Redis, job: _Job) -> Iterator[list[bytes]]:
        """Names of pages to remove, as SCAN finds them; notes whose they are."""
        prefix = page_prefix(self._settings.prefix)
        # One walk whatever the number of identities: each walk looks at every key of the server.
        only = b"" if job.digests is None or len(job.digests) != 1 else next(iter(job.digests)).hex().encode()
        for names in scan(client, prefix, only):
            wanted = []
            for name in names:
                digest = digest_of(prefix, name)
                if digest is not None and (job.digests is None or digest in job.digests):
                    job.found.add(digest)
                    wanted.append(name)
            yield wanted

    def _unlink(self, client: redis.Redis, names: list[bytes]) -> None:
        if not names:
            return
        # One key per request: in a cluster the keys of one request must share a slot.
        pipeline = client.pipeline(transaction=False)
        for name in names:
            pipeline.unlink(name)
        removed = pipeline.execute()
        self._metrics.add("cleared", "", sum(removed))


def digest_of(page_names: bytes, name: bytes) -> bytes | None:
    """The identity digest in the name of a page of ours; None for any other key."""
    rest = name.removeprefix(page_names)
    if rest == name or rest[32:33] != b":" or not is_hex(rest[:32], 32) or not is_hex(rest[33:], 64):
        return None
    return bytes.fromhex(rest[:32].decode())


def is_hex(text: bytes, length: int) -> bool:
    """Whether ``text`` is that many lower-case hex digits."""
    return len(text) == length and not text.strip(b"0123456789abcdef")


def scan(client: redis.Redis, prefix: bytes, more: bytes) -> Iterator[list[bytes]]:
    """The names of one node that begin with ``prefix`` and ``more``, portion by portion."""
    pattern = _GLOB_SPECIAL.sub(rb"\\\g<0>", prefix) + more + b"*"
    scan: Callable[..., Any] = client.scan
    cursor = 0
    while True:
        cursor, names = scan(cursor, match=pattern, count=_SCAN_COUNT)
        yield list(names)
        if cursor == 0:
            return

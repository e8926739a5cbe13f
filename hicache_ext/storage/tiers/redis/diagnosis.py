"""The findings of ``hicache-ext doctor`` on how each node of a Redis tier is set up; the round trip is elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from hicache_ext.config.values import format_size, rounded_size
from hicache_ext.errors import ConfigError, RefusedError, StoreError
from hicache_ext.storage.contract.diagnosis import Finding, Level, moves_of
from hicache_ext.storage.tiers.redis.config import RedisTierConfig
from hicache_ext.storage.tiers.redis.connection import Connection
from hicache_ext.storage.tiers.redis.node import Node
from hicache_ext.storage.tiers.redis.topology import SLOTS, Topology

LARGEST_SKEW = 1.0
"""Seconds of clock skew between client and server above which the pages' ages and TTLs are misleading."""

_GOOD_POLICIES = ("allkeys-lru", "allkeys-lfu")


def diagnose(tier: RedisTierConfig, topology: Topology) -> list[Finding]:
    """Return findings about the tier and each node. Never raises; the tier's timeout bounds every step."""
    nodes = topology.nodes
    findings: list[Finding] = []
    if not tier.tls:
        findings.append(moves_of("docs/redis.md"))
    if not nodes:
        servers = ", ".join(str(endpoint) for endpoint in tier.endpoints)
        remedy = "start it, or correct url and login"
        return [*findings, Finding(servers, Level.ERROR, "no server has been reached", remedy)]
    if topology.is_cluster:
        findings.append(_coverage(topology))
    for node in nodes:
        findings.extend(_node_findings(tier, node))
    return findings


def _coverage(topology: Topology) -> Finding:
    subject = "cluster"
    uncovered = topology.slots_without_node()
    if uncovered:
        seen = f"{uncovered} of {SLOTS} slots have no node: their pages are misses"
        return Finding(subject, Level.WARNING, seen, "replace the node that is lost")
    return Finding(subject, Level.OK, f"{len(topology.nodes)} masters hold all {SLOTS} slots")


def _node_findings(tier: RedisTierConfig, node: Node) -> Iterator[Finding]:
    subject = str(node.endpoint)
    if not node.up:
        yield Finding(subject, Level.ERROR, "cannot be reached", "start it; the tier attaches by itself")
        return
    looks: dict[str, Callable[[str, Connection], Iterator[Finding]]] = {
        "TIME": _clock,
        "INFO": partial(_server_facts, tier),
        "CONFIG GET": _cluster_settings,
    }
    try:
        with node.aside() as connection:
            for words, look in looks.items():
                try:
                    yield from look(subject, connection)
                except RefusedError:
                    # The command is forbidden or renamed; the tier does not need it.
                    remedy = f"nothing has to be done; what {words} tells is not examined"
                    yield Finding(subject, Level.NOTE, f"{words} is refused", remedy)
    except (StoreError, OSError, ConfigError, TypeError, ValueError) as error:
        yield Finding(subject, Level.ERROR, f"does not answer ({type(error).__name__})", "look at the server's log")


def _clock(subject: str, connection: Connection) -> Iterator[Finding]:
    before = time.time()
    now: Any = connection.tell(b"TIME")
    after = time.time()
    skew = int(now[0]) + int(now[1]) / 1e6 - (before + after) / 2
    # An answer that took long may have been given at any moment of that time.
    if abs(skew) - (after - before) / 2 > LARGEST_SKEW:
        yield Finding(subject, Level.WARNING, f"its clock is off by {skew:+.1f} s", "synchronise both with NTP")
    else:
        yield Finding(subject, Level.OK, f"its clock agrees within {abs(skew) * 1000:.0f} ms")


def _server_facts(tier: RedisTierConfig, subject: str, connection: Connection) -> Iterator[Finding]:
    facts = connection.info()
    engine = "valkey" if "valkey_version" in facts else "redis"
    yield Finding(subject, Level.OK, f"{engine} {facts.get('valkey_version') or facts.get('redis_version', 'unknown')}")
    if facts.get("role") == "slave":
        yield Finding(subject, Level.ERROR, "is a replica and takes no writes", "name the master in url")
    yield _memory(subject, tier, facts)
    if int(facts.get("aof_enabled", 0)):
        yield Finding(subject, Level.WARNING, "each write goes to its append-only file, too", "appendonly no")
    if int(facts.get("evicted_keys", 0)):
        yield Finding(subject, Level.NOTE, f"{facts['evicted_keys']} keys evicted since it started")


def _memory(subject: str, tier: RedisTierConfig, facts: dict[str, str]) -> Finding:
    limit, policy = int(facts.get("maxmemory", 0)), facts.get("maxmemory_policy", "unknown")
    used = rounded_size(int(facts.get("used_memory", 0)))
    if limit == 0:
        seen, remedy = f"maxmemory is not set, {used} used", "set maxmemory, and maxmemory-policy allkeys-lru"
        return Finding(subject, Level.WARNING, seen, remedy)
    seen = f"maxmemory {format_size(limit)}, policy {policy}, {used} used"
    if policy in _GOOD_POLICIES:
        return Finding(subject, Level.OK, seen)
    if policy == "noeviction" and tier.ttl is None:
        return Finding(subject, Level.WARNING, f"{seen}: once full, it takes no more pages", "allkeys-lru, or a ttl")
    if policy.startswith("volatile") and tier.ttl is None:
        return Finding(subject, Level.WARNING, f"{seen}: pages without ttl are never evicted", "allkeys-lru, or a ttl")
    return Finding(subject, Level.NOTE, seen, "allkeys-lru keeps the pages that are used")


def _cluster_settings(subject: str, connection: Connection) -> Iterator[Finding]:
    answer: Any = connection.tell(b"CONFIG", b"GET", b"save") + connection.tell(  # type: ignore[operator]
        b"CONFIG", b"GET", b"cluster-require-full-coverage"
    )
    settings = dict(zip(answer[::2], answer[1::2], strict=True))
    if saves := settings.get(b"save"):
        seen = f"it saves snapshots ({saves.decode(errors='replace')}): each copies its memory"
        yield Finding(subject, Level.WARNING, seen, 'save ""')
    enabled = int(connection.info(b"cluster").get("cluster_enabled", 0))
    if enabled and settings.get(b"cluster-require-full-coverage") == b"yes":
        seen = "one lost node stops the whole cluster"
        yield Finding(subject, Level.WARNING, seen, "cluster-require-full-coverage no")

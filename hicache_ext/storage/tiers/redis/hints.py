"""Hints as a Redis stream of bounded length, ``<prefix>hints``; it goes by itself when nobody has written for long."""

from __future__ import annotations

from typing import Any

import redis

from hicache_ext.errors import ConfigError, StoreError
from hicache_ext.storage.contract.hint_board import AT_ONCE, BoardLimits
from hicache_ext.storage.tiers.redis.clients import admin_client
from hicache_ext.storage.tiers.redis.config import RedisTierConfig
from hicache_ext.storage.tiers.redis.topology import Topology

_FIELD = b"h"
_BEFORE_ALL = b"0-0"


def post_hint(tier: RedisTierConfig, topology: Topology, hint: bytes, limits: BoardLimits) -> None:
    name = stream_name(tier)
    try:
        with _client(tier, topology, name) as client, client.pipeline(transaction=False) as pipeline:
            pipeline.xadd(name, {_FIELD: hint}, maxlen=limits.keep, approximate=False)
            pipeline.pexpire(name, int(2000 * limits.lifetime))
            pipeline.execute()
    except redis.RedisError as error:
        raise StoreError(f"no hint was left: {type(error).__name__}") from error


def read_hints(
    tier: RedisTierConfig, topology: Topology, since: bytes | None, limits: BoardLimits
) -> tuple[bytes, list[bytes]]:
    name = stream_name(tier)
    try:
        with _client(tier, topology, name) as client:
            if since is None:
                newest: Any = client.xrevrange(name, count=1)
                return (newest[0][0] if newest else _BEFORE_ALL), []
            entries: Any = client.xrange(name, min=b"(" + since, count=AT_ONCE)
    except redis.RedisError as error:
        raise StoreError(f"hints cannot be read: {type(error).__name__}") from error
    hints = [fields.get(_FIELD, b"") for _, fields in entries]
    return (entries[-1][0] if entries else since), [hint for hint in hints if len(hint) <= limits.longest]


def stream_name(tier: RedisTierConfig) -> bytes:
    return tier.prefix.encode() + b"hints"


def _client(tier: RedisTierConfig, topology: Topology, name: bytes) -> Any:
    """redis-py's client of the node that has the stream. Raises StoreError."""
    node = topology.node_of(name)
    if node is None or not node.up:
        raise StoreError("the node that holds the hints is down")
    try:
        return admin_client(tier, node.endpoint)
    except ConfigError as error:
        raise StoreError(str(error)) from error

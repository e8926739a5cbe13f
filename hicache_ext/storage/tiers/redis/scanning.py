"""SCAN over the keys of a node: for clear(), which removes pages by UNLINK, and for other names of a tier.

It takes about a second per million keys. Why there is no generation in the keys: docs/decisions/clear.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import redis

from hicache_ext.errors import ClearLaterError, ConfigError
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.storage.contract.clearing import Cleared
from hicache_ext.storage.tiers.redis.names import identity_name, is_hex, page_key, page_name, page_prefix
from hicache_ext.storage.tiers.redis.node import Node
from hicache_ext.storage.tiers.redis.settings import RedisSettings

_SCAN_COUNT = 2000
_GLOB_SPECIAL = re.compile(rb"[\\*?\[\]]")


def sweep_nodes(cleared: Cleared, nodes: Sequence[Node], settings: RedisSettings, metrics: TierMetrics) -> None:
    """Remove cleared pages from every node; the pages of a node that left the cluster are gone with it.

    Raises ClearLaterError while a node is down.
    """
    left = []
    for node in nodes:
        if cleared.is_finished(node.endpoint):
            continue
        if not node.up:
            left.append(f"{node.endpoint} is down")
            continue
        try:
            client = settings.admin_client(node.endpoint, settings.timeout)
            try:
                _sweep_node(cleared, client, settings.prefix, metrics)
            finally:
                client.close()
        except (redis.RedisError, OSError, ConfigError) as error:
            metrics.add("error", "clear")
            left.append(f"{node.endpoint}: {type(error).__name__}")
        else:
            cleared.finish(node.endpoint)
    if left:
        raise ClearLaterError(", ".join(left))


def _sweep_node(cleared: Cleared, client: redis.Redis, prefix: str, metrics: TierMetrics) -> None:
    pages = page_prefix(prefix)
    # One walk whatever the number of identities: each walk looks at every key of the server.
    digests = cleared.digests or ()
    only = next(iter(digests)).hex().encode() if len(digests) == 1 else b""
    for names in scan(client, pages, only):
        keys = [key for name in names if (key := page_key(pages, name)) is not None and cleared.has(key[:16])]
        with cleared.old_pages(keys) as old:
            metrics.add("cleared", "", _unlink(client, [page_name(pages, key) for key in old]))
        if cleared.closing:
            return
    if cleared.digests is None:
        identities = identity_name(prefix, b"")
        for names in scan(client, identities, b""):
            _unlink(client, [name for name in names if is_hex(name.removeprefix(identities), 32)])


def _unlink(client: redis.Redis, names: Sequence[bytes]) -> int:
    if not names:
        return 0
    # One key per request: in a cluster the keys of one request must share a slot.
    pipeline = client.pipeline(transaction=False)
    for name in names:
        pipeline.unlink(name)
    return sum(pipeline.execute())


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

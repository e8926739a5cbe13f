"""SCAN over the keys of a node: for clear(), which removes pages by UNLINK, and for the identity documents of a tier.

It takes about a second per million keys, whatever they are. Why the keys hold no generation:
docs/decisions/what-waits-for-a-tier.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import redis

from hicache_ext.errors import ClearLaterError, ConfigError, StoreError
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.storage.contract.clearing import Cleared
from hicache_ext.storage.contract.identity_documents import LARGEST_DOCUMENT, LARGEST_SUM, document_in
from hicache_ext.storage.tiers.redis.clients import admin_client
from hicache_ext.storage.tiers.redis.config import RedisTierConfig
from hicache_ext.storage.tiers.redis.names import identity_name, is_hex, page_key, page_name, page_prefix
from hicache_ext.storage.tiers.redis.node import Node

_SCAN_COUNT = 2000
_MOST_SCANS = 1_000_000
"""Requests of one walk, for two billion keys: a server may never say that it has come to an end."""
_DIGEST_DIGITS = 32
_GLOB_SPECIAL = re.compile(rb"[\\*?\[\]]")


def sweep_nodes(cleared: Cleared, nodes: Sequence[Node], tier: RedisTierConfig, metrics: TierMetrics) -> None:
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
            with admin_client(tier, node.endpoint, tier.longest_call) as client:
                _sweep_node(cleared, client, tier.prefix, metrics)
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
            _unlink(client, [name for name in names if is_hex(name.removeprefix(identities), _DIGEST_DIGITS)])


def stored_identities(name: str, tier: RedisTierConfig, nodes: Sequence[Node]) -> dict[bytes, dict[str, Any]]:
    """Digest -> document, as servers have left them on all ``nodes``, for tools. Raises StoreError where a node cannot
    be asked."""
    prefix = identity_name(tier.prefix, b"")
    documents: dict[bytes, dict[str, Any]] = {}
    for node in nodes:
        try:
            with admin_client(tier, node.endpoint, tier.longest_call) as client:
                room = LARGEST_SUM
                for names in scan(client, prefix, b""):
                    for digest in [name.removeprefix(prefix) for name in names]:
                        if not is_hex(digest, _DIGEST_DIGITS):
                            continue
                        stored = _document(client, prefix + digest)
                        if (room := room - len(stored)) < 0:
                            break
                        if (document := document_in(stored)) is not None:
                            documents[bytes.fromhex(digest.decode())] = document
                    if room < 0:
                        break
        except (redis.RedisError, OSError, ConfigError) as error:
            raise StoreError(
                f"tier {name!r}: {node.endpoint} cannot be asked which identities it has ({type(error).__name__})"
            ) from None
    return documents


def _document(client: Any, name: bytes) -> bytes:
    """Empty where there is none, or something else: whoever may write may leave anything there."""
    try:
        return client.get(name) or b"" if client.strlen(name) <= LARGEST_DOCUMENT else b""
    except redis.ResponseError as error:
        if "WRONGTYPE" in str(error):
            return b""
        raise


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
    for _ in range(_MOST_SCANS):
        cursor, names = scan(cursor, match=pattern, count=_SCAN_COUNT)
        yield list(names)
        if cursor == 0:
            return
    raise redis.InvalidResponse("a scan without end")

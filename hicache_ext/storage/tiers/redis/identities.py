"""The identity documents that servers have left in Redis, for tools: they say what the pages there are."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import redis

from hicache_ext.errors import ConfigError, StoreError
from hicache_ext.storage.tiers.redis.names import identity_name, is_hex
from hicache_ext.storage.tiers.redis.node import Node
from hicache_ext.storage.tiers.redis.scanning import scan
from hicache_ext.storage.tiers.redis.settings import RedisSettings

_DIGEST_DIGITS = 32


def stored_identities(tier: str, settings: RedisSettings, nodes: Iterable[Node]) -> dict[bytes, dict[str, Any]]:
    """Digest -> document, of all ``nodes``. SCAN looks at every key: about a second per million pages.

    Raises StoreError where a node cannot be asked.
    """
    prefix = identity_name(settings.prefix, b"")
    documents: dict[bytes, dict[str, Any]] = {}
    for node in nodes:
        try:
            client = settings.admin_client(node.endpoint, settings.timeout)
            try:
                for names in scan(client, prefix, b""):
                    for digest in [name.removeprefix(prefix) for name in names]:
                        if not is_hex(digest, _DIGEST_DIGITS):
                            continue
                        document = _document(client.get(prefix + digest))
                        if document is not None:
                            documents[bytes.fromhex(digest.decode())] = document
            finally:
                client.close()
        except (redis.RedisError, OSError, ConfigError) as error:
            raise StoreError(
                f"tier {tier!r}: {node.endpoint} cannot be asked which identities it has ({type(error).__name__})"
            ) from None
    return documents


def _document(text: Any) -> dict[str, Any] | None:
    try:
        document = json.loads(text)
    except (TypeError, ValueError):
        return None
    return document if isinstance(document, dict) else None

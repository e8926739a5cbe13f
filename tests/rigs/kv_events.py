"""A publisher and subscribers of KV events in one process, over real sockets."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hicache_ext.config.model import EventsConfig
from hicache_ext.page.envelope import IDENTITY_LENGTH
from hicache_ext.storage.serving.events import Change, EventPublisher, Kind, Look
from hicache_ext.testing.server import free_port

MEDIA = {"private": "DISK", "shared": "EXTERNAL"}
LONG = 30.0
_EXAMPLE = Path(__file__).parents[2] / "examples" / "kv_events_subscriber.py"
_NAMES = {Kind.STORED: "BlockStored", Kind.REMOVED: "BlockRemoved", Kind.CLEARED: "AllBlocksCleared"}


def subscriber_class() -> Any:
    """``Subscriber`` of the example that routers' authors copy."""
    spec = importlib.util.spec_from_file_location("kv_events_subscriber", _EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Subscriber


def encode(changes: Sequence[Change]) -> bytes:
    """The batch that SGLang's structs make, without SGLang; tests/backend/test_kv_events.py compares the two."""
    import msgspec

    events: list[dict[str, Any]] = []
    for change in changes:
        event: dict[str, Any] = {"type": _NAMES[change.kind]}
        if change.kind is not Kind.CLEARED:
            event |= {"block_hashes": change.blocks.tolist(), "medium": change.medium}
        events.append(event)
    return msgspec.msgpack.encode([time.time(), events, 0])


def events_config(**settings: Any) -> EventsConfig:
    ports = [free_port(), free_port()]
    endpoint, replay = (f"tcp://127.0.0.1:{port}" for port in ports)
    return EventsConfig(**{"endpoint": endpoint, "replay_endpoint": replay, **settings})


def publisher(config: EventsConfig, look: Look) -> EventPublisher:
    return EventPublisher(config, 0, look, encode)


def subscriber(config: EventsConfig) -> Any:
    return subscriber_class()(config.endpoint, config.replay_endpoint, config.topic)


def follow_until(subscriber: Any, wanted: dict[str, set[int]], seconds: float = LONG) -> dict[str, set[int]]:
    """Let a subscriber follow until its index is this, or the time is up; its index, without empty media."""
    deadline = time.monotonic() + seconds
    while True:
        known = {medium: blocks for medium, blocks in subscriber.index.items() if blocks}
        if known == wanted or time.monotonic() > deadline:
            return known
        subscriber.follow(0.05)


def block_of(key: bytes) -> int:
    """What SGLang calls the block hash of a page: the first 64 bits of its page hash, signed."""
    return int.from_bytes(key[IDENTITY_LENGTH:][:8], "big", signed=True)

"""An index made from events alone equals what ``hicache-ext ls`` counts, whoever changed the tier, however it ended."""

from __future__ import annotations

import random
import time
from collections import Counter
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from hicache_ext.config.model import EventsConfig
from hicache_ext.storage.serving.events import EventPublisher, blocks_in
from hicache_ext.storage.tiers.file.multipath import SpreadStore
from hicache_ext.testing.conformance.pages import IDENTITY
from tests.rigs.event_tier import CAPACITY, PAGE, act, blocks_listed, open_tier, write_until_killed
from tests.rigs.kv_events import LONG, MEDIA, events_config, publisher, subscriber
from tests.rigs.workers import Worker

pytest.importorskip("zmq", reason="missing: pyzmq")
pytest.importorskip("msgspec", reason="missing: msgspec")

OPERATIONS = 1000
PER_ROUND = 50
"""Operations between two kills, after which everything must agree."""
ROUNDS = OPERATIONS // PER_ROUND


def _publish(config: EventsConfig, store: SpreadStore) -> EventPublisher:
    return publisher(config, lambda: blocks_in([store], [IDENTITY], **MEDIA))


def _end_abruptly(opened: EventPublisher) -> None:
    """As kill -9 does, which says nothing to anybody."""
    opened._loop.stop()
    opened._publish.close(0)
    opened._replay.close(0)


def _disturb(following: Any, chance: random.Random) -> None:
    """What may happen to a subscriber: it loses some batches, or all that it knows."""
    what = chance.random()
    if what < 0.3:
        while following._live.poll(50):
            following._live.recv_multipart()
    elif what < 0.4:
        following.forget()
    else:
        following.follow(0)


def _agree(following: Any, place: Path) -> tuple[set[int], set[int]]:
    """What the index and ``ls`` say once nobody changes anything; they may first agree after some time."""
    deadline = time.monotonic() + LONG
    while True:
        index, listed = following.index["DISK"], blocks_listed(place)
        if (index == listed and not following.follow(0.2)) or time.monotonic() > deadline:
            return index, listed
        following.follow(0.05)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("layout", ["slab", "pages"])
def test_after_a_thousand_operations_evictions_and_kills_the_index_equals_ls(layout: str, tmp_path: Path) -> None:
    chance = random.Random(19)
    place = tmp_path / "tier"
    config = events_config()
    done: Counter[str] = Counter()
    sizes = []
    with ExitStack() as resources:
        store = resources.enter_context(closing(open_tier(layout, place)))
        opened = _publish(config, store)
        following = subscriber(config)
        resources.callback(following.close)
        resources.callback(lambda: opened.close())
        for number in range(ROUNDS):
            with Worker(write_until_killed, layout, str(place), number) as writer:
                assert writer.answer(LONG) == "open"
                for _ in range(PER_ROUND):
                    done[act(store, place, chance)] += 1
                    _disturb(following, chance)
                writer.kill()
            if number % 5 == 4:
                _end_abruptly(opened)
                done[act(store, place, chance)] += 1
                opened = _publish(config, store)
            index, listed = _agree(following, place)
            assert index == listed, f"round {number}: {len(index - listed)} too many, {len(listed - index)} too few"
            sizes.append(len(listed))
        assert store.metrics.total("evicted") > 0
        assert store.metrics.total("corrupt") > 0
    assert done.total() >= OPERATIONS
    assert min(done[what] for what in ("set", "get", "remove", "damage", "clear", "tool")) > 0
    assert max(sizes) > CAPACITY // PAGE // 4


@pytest.mark.parametrize("layout", ["slab", "pages"])
def test_what_another_process_wrote_before_it_was_killed_is_told(layout: str, tmp_path: Path) -> None:
    place, config = tmp_path / "tier", events_config()
    with ExitStack() as resources:
        store = resources.enter_context(closing(open_tier(layout, place)))
        resources.enter_context(closing(_publish(config, store)))
        following = resources.enter_context(closing(subscriber(config)))
        with Worker(write_until_killed, layout, str(place), 1) as writer:
            assert writer.answer(LONG) == "open"
            deadline = time.monotonic() + LONG
            while not blocks_listed(place):
                assert time.monotonic() < deadline
            writer.kill()
        index, listed = _agree(following, place)
        assert index == listed != set()

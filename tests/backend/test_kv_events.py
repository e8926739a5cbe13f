"""Events of a backend over real pools, read with SGLang's own decoder."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hicache_ext.errors import ConfigError
from hicache_ext.sglang import model_weights
from hicache_ext.storage.serving import events as publisher_module
from hicache_ext.storage.serving.events import Change, Kind
from hicache_ext.testing.conformance.storage_backend import PAGE_SIZE, page_keys
from hicache_ext.testing.host_pools import mha_pools, page_indices
from hicache_ext.testing.server import free_port
from tests.rigs.kv_events import LONG, encode, follow_until, subscriber_class
from tests.waiting import wait_until

pytestmark = pytest.mark.sglang

KEYS = page_keys(3)
INDICES = page_indices(PAGE_SIZE, [0, 1, 2])


@pytest.fixture(autouse=True)
def _short_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher_module, "HEARTBEAT", 0.2)
    monkeypatch.setattr(publisher_module, "LOOK_INTERVAL", 0.05)


@pytest.fixture
def events() -> dict[str, Any]:
    port, replay = free_port(), free_port()
    return {"endpoint": f"tcp://127.0.0.1:{port}", "replay_endpoint": f"tcp://127.0.0.1:{replay}"}


@pytest.fixture
def following(events: dict[str, Any]) -> Any:
    opened = subscriber_class()(events["endpoint"], events["replay_endpoint"])
    yield opened
    opened.close()


def blocks_of(keys: list[str]) -> set[int]:
    from sglang.srt.mem_cache.utils import hash_str_to_int64

    return {hash_str_to_int64(key) for key in keys}


def test_what_sglang_decodes_are_its_own_structs_with_its_own_block_hashes(
    open_backend: Callable[..., Any], events: dict[str, Any], following: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import msgspec
    from sglang.srt.disaggregation.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
    from sglang.srt.mem_cache.utils import hash_str_to_int64

    decoder, batches = msgspec.msgpack.Decoder(type=KVEventBatch), []
    apply = following._apply
    monkeypatch.setattr(following, "_apply", lambda n, batch: (batches.append(decoder.decode(batch)), apply(n, batch)))
    backend = open_backend(mha_pools(page_size=PAGE_SIZE).host, ours={"events": events})
    assert backend.batch_set_v1(KEYS, INDICES) == [True] * 3
    assert follow_until(following, {"DISK": blocks_of(KEYS)}) == {"DISK": blocks_of(KEYS)}
    backend._store.remove([backend.served.usable("kv").digests[0] + bytes.fromhex(KEYS[1])])
    assert follow_until(following, {"DISK": blocks_of([KEYS[0], KEYS[2]])}) == {"DISK": blocks_of([KEYS[0], KEYS[2]])}
    told = [event for batch in batches for event in batch.events]
    assert {type(event) for event in told} == {AllBlocksCleared, BlockStored, BlockRemoved}
    assert all(batch.attn_dp_rank == 0 for batch in batches)
    stored = [event for event in told if isinstance(event, BlockStored)]
    assert all((event.block_size, event.token_ids, event.lora_id) == (PAGE_SIZE, [], None) for event in stored)
    (removed,) = (event for event in told if isinstance(event, BlockRemoved))
    assert removed == BlockRemoved(block_hashes=[hash_str_to_int64(KEYS[1])], medium="DISK")


def test_the_block_hashes_are_those_that_sglang_publishes_of_the_same_tokens() -> None:
    from sglang.srt.mem_cache.events import KVCacheEventRecorder
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    key = RadixKey(list(range(3 * PAGE_SIZE)), None)
    root = SimpleNamespace(parent=None, key=RadixKey([], None), hash_value=[])
    node = SimpleNamespace(parent=root, key=key, hash_value=None)
    recorder = KVCacheEventRecorder(enabled=True, page_size=PAGE_SIZE)
    recorder.record_store(node)
    (published,) = recorder.take()
    assert set(published.block_hashes) == blocks_of(get_storage_hash_str(key, None, page_size=PAGE_SIZE))


def test_what_the_tests_of_storage_encode_by_hand_reads_as_what_sglang_encodes() -> None:
    import msgspec

    from hicache_ext.sglang.announcements import _encoder

    stored, removed = np.array([1, -2]), np.array([3])
    changes = [Change(Kind.CLEARED), Change(Kind.STORED, "DISK", stored), Change(Kind.REMOVED, "EXTERNAL", removed)]
    ours = msgspec.msgpack.decode(encode(changes))
    theirs = msgspec.msgpack.decode(_encoder(lambda: 16, 0)(changes))
    assert ours[2] == theirs[2]
    for event, whole in zip(ours[1], theirs[1], strict=True):
        assert event.items() <= whole.items()


def test_nothing_is_stored_while_nothing_may_be_served_and_pages_of_old_weights_are_removed(
    open_backend: Callable[..., Any], events: dict[str, Any], following: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_weights, "updated_to", None)
    monkeypatch.setattr(model_weights, "flushed", True)
    backend = open_backend(mha_pools(page_size=PAGE_SIZE).host, ours={"events": events})
    backend.batch_set_v1(KEYS, INDICES)
    everything = {"DISK": blocks_of(KEYS)}
    assert follow_until(following, everything) == everything
    backend.served.suspended = True
    assert follow_until(following, {}) == {}
    backend.served.suspended = False
    assert follow_until(following, everything) == everything
    backend.served.advance_weights_epoch("another")
    assert follow_until(following, {}) == {}
    backend.batch_set_v1(KEYS[:1], INDICES[:PAGE_SIZE])
    assert follow_until(following, {"DISK": blocks_of(KEYS[:1])}) == {"DISK": blocks_of(KEYS[:1])}


def test_a_server_that_lets_go_of_storage_says_that_nothing_is_stored(
    open_backend: Callable[..., Any], events: dict[str, Any], following: Any
) -> None:
    backend = open_backend(mha_pools(page_size=PAGE_SIZE).host, ours={"events": events})
    backend.batch_set_v1(KEYS, INDICES)
    assert follow_until(following, {"DISK": blocks_of(KEYS)}) == {"DISK": blocks_of(KEYS)}
    backend.close()
    assert follow_until(following, {}) == {}
    # And it may be attached again at once.
    open_backend(mha_pools(page_size=PAGE_SIZE).host, ours={"events": events})
    assert follow_until(following, {"DISK": blocks_of(KEYS)}) == {"DISK": blocks_of(KEYS)}


def tells_events(backend: Any) -> bool:
    """Whether this process has a publisher, as its metrics say."""
    return "events" in {source.tier for source in backend._export_sources()}


def test_events_are_off_where_nothing_is_said(open_backend: Callable[..., Any]) -> None:
    assert not tells_events(open_backend(mha_pools(page_size=PAGE_SIZE).host))


@pytest.mark.parametrize("rank", ["tp_rank", "pp_rank", "attn_cp_rank"])
def test_one_rank_speaks_for_all(open_backend: Callable[..., Any], events: dict[str, Any], rank: str) -> None:
    sizes = {"tp_size": 2, "pp_size": 2, "attn_cp_size": 2}
    assert tells_events(open_backend(ours={"events": events}, **sizes))
    assert not tells_events(open_backend(ours={"events": events}, **sizes, **{rank: 1}))


def test_each_replica_has_a_port_of_its_own(
    open_backend: Callable[..., Any], events: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hicache_ext.sglang.announcements._replica", lambda ranks: ranks.dp_rank)
    address, _, port = events["endpoint"].rpartition(":")
    open_backend(mha_pools(page_size=PAGE_SIZE).host, ours={"events": events}, dp_rank=0)
    backend = open_backend(mha_pools(page_size=PAGE_SIZE).host, ours={"events": events}, dp_rank=3)
    backend.batch_set_v1(KEYS, INDICES)
    replay, _, replay_port = events["replay_endpoint"].rpartition(":")
    second = subscriber_class()(f"{address}:{int(port) + 3}", f"{replay}:{int(replay_port) + 3}")
    assert follow_until(second, {"DISK": blocks_of(KEYS)}) == {"DISK": blocks_of(KEYS)}
    second.close()


def test_a_port_in_use_stops_the_start_and_leaves_no_tier_open(
    open_backend: Callable[..., Any], events: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher_module, "_BIND_WAIT", 0.1)
    first = open_backend(mha_pools(page_size=PAGE_SIZE).host, ours={"events": events})
    closed = []
    from hicache_ext.storage.tiering.reload import ReloadableStore

    close = ReloadableStore.close
    monkeypatch.setattr(ReloadableStore, "close", lambda store: (closed.append(store), close(store)))
    with pytest.raises(ConfigError, match=r"^hicache_ext\.events\.endpoint: .* cannot be bound"):
        open_backend(ours={"events": events})
    assert len(closed) == 1
    assert closed != [first._store]


def test_the_scheduler_never_waits_for_events(
    open_backend: Callable[..., Any], events: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a look does, calls of SGLang go on: here it never ends."""
    import threading

    release = threading.Event()
    monkeypatch.setattr("hicache_ext.sglang.announcements.blocks_in", lambda *_: release.wait(LONG) and {})
    monkeypatch.setattr(publisher_module, "_CLOSE_TIMEOUT", 0.05)
    backend = open_backend(mha_pools(page_size=PAGE_SIZE).host, ours={"events": events})
    begun = time.monotonic()
    assert backend.batch_set_v1(KEYS, INDICES) == [True] * 3
    assert backend.batch_exists(KEYS) == 3
    assert backend.get_stats() is not None
    assert backend.clear() is True
    backend.close()
    assert time.monotonic() - begun < LONG / 2
    release.set()


def test_a_kv_pool_without_bytes_is_named_in_the_log(
    open_backend: Callable[..., Any], events: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    backend = open_backend(ours={"events": events})
    backend.register_mem_pool_host(
        SimpleNamespace(kv_buffer=None, page_size=16, get_page_buffer_meta=lambda indices: None)
    )
    wait_until(lambda: "has no bytes of its own" in caplog.text)
    time.sleep(0.3)
    assert caplog.text.count("has no bytes of its own") == 1

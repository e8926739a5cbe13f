"""What requests say about KV, from SGLang's request to the tiers: the hook on its scheduler, and a backend."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from hicache_ext.testing.sglang_cpu import prepare_process

prepare_process()

from hicache_ext.page.hashes import namespaced_extra_key  # noqa: E402
from hicache_ext.sglang import scheduler_hooks  # noqa: E402
from hicache_ext.sglang.decode_manager import PageChain, said_of, skip_unstored  # noqa: E402
from hicache_ext.sglang.process import attached_backends  # noqa: E402
from hicache_ext.sglang.releases import comes_with, installed_release  # noqa: E402
from hicache_ext.sglang.scheduler_hooks import around_unfinished, before_queued  # noqa: E402
from hicache_ext.storage.contract import tenancy, tenants  # noqa: E402
from hicache_ext.storage.contract.abilities import ability  # noqa: E402
from hicache_ext.storage.tiers.file.multipath import SpreadStore  # noqa: E402
from hicache_ext.storage.tiers.file.pins import read_pins  # noqa: E402
from hicache_ext.testing.conformance.storage_backend import PAGE_SIZE  # noqa: E402
from hicache_ext.testing.host_pools import mha_pools  # noqa: E402
from tests.waiting import wait_until  # noqa: E402

pytestmark = pytest.mark.sglang

PROMPT = array("q", range(PAGE_SIZE * 5 + 3))
RETAIN = {"action_id": "1", "action_type": "kv.retain", "action_version": "1.0", "payload": {"ttl_seconds": 60}}
NO_STORE = {"action_id": "2", "action_type": "kv.no_store", "action_version": "1.0", "payload": {}}
UNKNOWN = {"action_id": "3", "action_type": "kv.fetch", "action_version": "1.0", "payload": {"block_hashes": [1]}}


def request(*actions: dict[str, Any], custom: Any = None, **more: Any) -> Any:
    from sglang.srt.managers.kv_hints import decode_kv_hints_envelope
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    envelope = {"protocol_version": "0.1", "message_id": "m", "actions": list(actions)}
    hints = decode_kv_hints_envelope(envelope) if actions else None
    parameters = SamplingParams(max_new_tokens=1, custom_params=custom)
    return Req("rid", "", PROMPT, parameters, kv_hints=hints, vocab_size=256, **more)


def queue(made: Any, **scheduler: Any) -> None:
    plain = SimpleNamespace(is_eagle=lambda: False), SimpleNamespace(supports_mamba=lambda: False)
    known = dict(zip(("spec_algorithm", "tree_cache"), plain, strict=True)) | scheduler
    before_queued(SimpleNamespace(**known), made)


@pytest.fixture
def backend(open_backend: Callable[..., Any]) -> Any:
    prepare_process()
    return open_backend(mha_pools(page_size=PAGE_SIZE).host, ours={"longest_lease": "30s"})


def leases(backend: Any) -> list[Any]:
    disk = ability(backend._store.tiers[0], SpreadStore)
    assert disk is not None
    return read_pins(disk._parts[0].path)


def test_a_lease_is_on_the_pages_as_sglang_names_them_and_is_made_on_another_thread(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hicache_ext.storage.tiers.file import pins

    threads: list[int] = []
    add = pins.add_lease
    monkeypatch.setattr(pins, "add_lease", lambda *what: threads.append(threading.get_ident()) or add(*what))
    key = namespaced_extra_key("tenant")
    queue(request(RETAIN, UNKNOWN, extra_key=key, cache_salt="salt"))
    wait_until(lambda: leases(backend), "the lease is there")
    chain = PageChain(PAGE_SIZE, extra_key=key, cache_salt="salt")
    chain.extend(PROMPT)
    (lease,) = leases(backend)
    assert [page_hash.hex() for page_hash in lease.hashes] == chain.hashes(0, 5)
    assert lease.until - lease.created == pytest.approx(30.0)
    assert threads and threading.get_ident() not in threads
    counted = backend._kv_hints.metrics
    assert (counted.value("action", "retain"), counted.value("ignored", "unknown")) == (1, 1)


def test_the_pages_of_a_request_are_its_tenant_s_and_so_is_what_is_written_behind_them(backend: Any) -> None:
    tenancy.put_in_force({"team-a": tenants.Tenant(), "b": tenants.Tenant()})
    try:
        owners = tenants.in_force()
        assert owners is not None
        said = {"hicache_ext": {"tenant": "b"}}
        # What is no mapping says nothing, and hides no tenant.
        for key, custom, expected in (("team-a/z", 5, "team-a"), ("team-a/x", None, "team-a"), ("y", said, "b")):
            queue(request(extra_key=key, custom=custom))
            chain = PageChain(PAGE_SIZE, extra_key=key, cache_salt=None)
            chain.extend(PROMPT)
            first, _, third, *_ = map(bytes.fromhex, chain.hashes(0, 5))
            wait_until(lambda page=first, expected=expected: owners.owner(page) == expected, "it is noted")
            new = "ab" * 32 if expected == "b" else "cd" * 32
            backend.batch_set_v1([new], None, SimpleNamespace(prefix_keys=[third.hex()]))
            assert owners.owner(bytes.fromhex(new)) == expected
    finally:
        tenancy.put_in_force(None)


@pytest.mark.parametrize(
    "said",
    [
        {"actions": [NO_STORE]},
        {"custom": {"hicache_ext": {"hints": [{"action_type": "no_store"}]}}},
    ],
    ids=["envelope", "custom_params"],
)
def test_no_store_keeps_a_request_out_of_the_tree_and_out_of_the_decode_writer(backend: Any, said: Any) -> None:
    made = request(*said.get("actions", ()), custom=said.get("custom"))
    queue(made)
    assert made.skip_radix_cache_insert is True
    assert said_of(made).store is False


def test_without_a_backend_of_ours_and_without_hints_a_request_stays_as_it_is(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The last one is about what a decode node generates alone.
    for custom in ({"other": 1}, {"hicache_ext": {"store": False}}):
        quiet = request(custom=custom)
        queue(quiet)
        assert quiet.skip_radix_cache_insert is False
    backend.close()
    assert backend not in attached_backends()
    monkeypatch.setattr(scheduler_hooks, "attached_backends", list)  # other tests may have left theirs
    made = request(NO_STORE)
    queue(made)
    assert made.skip_radix_cache_insert is False


def test_a_rank_that_does_not_act_keeps_out_of_the_tree_all_the_same(open_backend: Callable[..., Any]) -> None:
    prepare_process()
    second = open_backend(mha_pools(page_size=PAGE_SIZE).host, tp_rank=1, tp_size=2)
    made = request(RETAIN, NO_STORE)
    queue(made)
    assert made.skip_radix_cache_insert is True and second._kv_hints is None


def test_sglangs_own_decode_offload_and_a_recording_leave_it_out(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    private, other = request(NO_STORE), request()
    queue(private)
    queue(other)
    offloaded: list[Any] = []
    manager = SimpleNamespace(offload_kv_cache=lambda req: offloaded.append(req) or True)
    skip_unstored(manager)
    for one in (private, other):
        assert manager.offload_kv_cache(one) is (one is other)
    assert offloaded == [other]
    asked: list[str] = []
    monkeypatch.setattr(scheduler_hooks, "_requests", {"private": private, "other": other})

    def record(rid: str) -> None:
        operation = SimpleNamespace(all_hash_values=["00"], request_id=rid, last_hash=None)
        scheduler_hooks._record(SimpleNamespace(ask=lambda rid, *_, **__: asked.append(rid)), operation, 0, {})

    record("private")
    record("other")
    # Aborted, and dropped by SGLang, before its look-up.
    (aborted := request(NO_STORE)).rid = "aborted"
    queue(aborted)
    del aborted
    record("aborted")
    assert asked == ["other"]


def test_where_a_release_asks_for_it_a_part_of_a_prompt_goes_on_without_the_tree(backend: Any) -> None:
    """Of 0.5.21; later releases do so themselves."""
    private, other, calls = request(NO_STORE), request(), []
    queue(private)
    tree = SimpleNamespace(advance_unpublished_req=lambda req, chunked: calls.append((req, chunked)))
    for one, how in ((private, {"chunked": True}), (private, {}), (other, {"chunked": True})):
        around_unfinished(lambda req, _, **__: calls.append(req), one, tree, **how)
    assert calls == [(private, True), private, other]


def test_bigrams_of_a_draft_have_other_hashes_and_no_lease(backend: Any) -> None:
    queue(request(RETAIN), spec_algorithm=SimpleNamespace(is_eagle=lambda: True))
    assert backend._kv_hints.metrics.value("ignored", "unsupported") == 1
    assert not backend._kv_hints._waiting


def test_a_request_that_comes_to_the_queue_again_is_not_heard_again(backend: Any) -> None:
    made = request(RETAIN)
    queue(made)
    queue(made)
    assert backend._kv_hints.metrics.value("action", "retain") == 1


@pytest.mark.parametrize("window", [False, True])
def test_recurrent_states_beside_windows_are_stored_all_the_same(backend: Any, window: bool) -> None:
    queue(
        made := request(NO_STORE), tree_cache=SimpleNamespace(supports_mamba=lambda: True, supports_swa=lambda: window)
    )
    stored = window or not comes_with(installed_release(), "0.5.22")
    assert made.skip_radix_cache_insert is not stored
    assert backend._kv_hints.metrics.value("ignored", "unsupported") == stored


@pytest.mark.parametrize("broken", [None, object(), SimpleNamespace(sampling_params=None), SimpleNamespace()])
def test_the_hook_never_raises(backend: Any, broken: Any) -> None:
    queue(broken)
    before_queued(None, request(RETAIN, NO_STORE))
    assert not leases(backend)

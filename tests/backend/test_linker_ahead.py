"""Pages are read while their request waits in SGLang's queue, and its scheduler waits for no store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from hicache_ext.sglang.releases import comes_with, installed_release
from tests.backend import linker_rig as rig
from tests.backend.ahead_rig import TIMEOUT, Rig, Waiting
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(not comes_with(installed_release(), "0.5.23"), reason="SGLang has no linker of others"),
]

SLACK = 5.0
"""Seconds that a call may take beyond its deadline on a busy machine."""


def test_a_request_is_held_back_until_its_pages_are_in_memory_and_then_no_store_is_asked(
    open_rig: Callable[..., Rig],
) -> None:
    one = open_rig()
    one.store(10)
    request = one.request("r")
    assert one.held(request) == {"r"}
    one.wait_for(request)
    assert request.asked == 1
    one.stores[0].mode = "hang"
    begun = time.monotonic()
    assert one.linker.lookup("r", [rig.transfer("kv", one.keys)]) == list(range(1, 11))
    targets = list(range(40, 50))
    assert rig.loaded(one.linker, "r", [rig.pages(one.device, "kv", one.keys, targets)])
    assert time.monotonic() - begun < SLACK
    assert one.device.content("kv", targets) == one.device.content("kv", one.numbers)
    assert rig.staging_in_use(one.linker) == 0
    assert one.ahead("read") == 1


def test_the_scheduler_is_never_kept_by_a_store_that_hangs(open_rig: Callable[..., Rig]) -> None:
    one = open_rig()
    one.store(4)
    one.stores[0].mode = "hang"
    first, other = one.request("first"), Waiting(one.linker, "nothing of it can be stored")
    begun, longest = time.monotonic(), 0.0
    while one.held(first, other) and time.monotonic() - begun < TIMEOUT + SLACK:
        longest = max(longest, _seconds_of(lambda: one.held(first, other)))
        assert one.held(first, other) <= {"first"}
        time.sleep(0.001)
    assert time.monotonic() - begun >= TIMEOUT
    assert longest < TIMEOUT, "a round waited for the store"
    assert one.ahead("late") == 1
    # It is computed, and so is everything else until that read has come back: no other one is tried.
    reads = one.stores[0].reads
    assert one.linker.lookup("first", [rig.transfer("kv", one.keys)]) == []
    for number in range(20):
        request = one.request(f"r{number}")
        one.held(request)
        assert one.held(request) == set()
        assert one.linker.lookup(request.rid, [rig.transfer("kv", one.keys)]) == []
    assert one.stores[0].reads == reads
    one.stores[0].mode = "well"
    wait_until(lambda: not one.linker._threads.left_behind)
    again = one.request("again")
    one.wait_for(again)
    assert one.linker.lookup("again", [rig.transfer("kv", one.keys)]) == [1, 2, 3, 4]
    one.held()
    wait_until(lambda: rig.staging_in_use(one.linker) == 0)


def test_a_request_that_nobody_asked_about_before_is_computed_and_no_store_is_asked(
    open_rig: Callable[..., Rig],
) -> None:
    one = open_rig()
    one.store(4)
    before = one.device.content("kv", list(range(rig.PAGES)))
    calls = one.stores[0].look_ups, one.stores[0].reads
    assert one.linker.lookup("r", [rig.transfer("kv", one.keys)]) == []
    assert not one.linker.load("r", [rig.pages(one.device, "kv", one.keys, [60, 61, 62, 63])])
    assert (one.stores[0].look_ups, one.stores[0].reads) == calls
    assert one.linker._metrics.value("load", "missing") == 1
    assert one.linker.start_layer_wise_loading() == -1
    assert one.device.content("kv", list(range(rig.PAGES))) == before


def test_look_ups_and_loads_answer_at_once_while_every_call_of_the_store_hangs(
    open_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long a request may wait in the queue: the scheduler's thread serves everybody."""
    one = open_rig(load_timeout="600s")
    one.store(8)
    one.wait_for(one.request("was read", one.keys[:4]))
    store, go_on = one.stores[0], threading.Event()

    def hang(*_: Any) -> None:
        go_on.wait(60)
        raise OSError("on purpose")

    for call in ("contains", "count_leading", "get", "set"):
        monkeypatch.setattr(store, call, hang)
    asked = rig.transfer("kv", one.keys)
    was_read, under_way = one.request("was read", one.keys[:4]), one.request("under way")
    begun = time.monotonic()
    try:
        assert one.held(was_read, under_way) == {"under way"}
        assert [one.linker.lookup(rid, [asked]) for rid in ("never held", "under way")] == [[], []]
        for rid in ("never held", "under way", "was read"):
            assert not one.linker.load(rid, [rig.pages(one.device, "kv", one.keys, list(range(60, 68)))])
        assert time.monotonic() - begun < SLACK
    finally:
        go_on.set()
    one.held()
    wait_until(lambda: rig.staging_in_use(one.linker) == 0)


def test_stores_are_called_by_other_threads_than_the_schedulers(open_rig: Callable[..., Rig]) -> None:
    one = open_rig("mamba")
    last = rig.hashes(6)[-1:]
    one.store(6, rig.pages(one.device, "mamba", last, [9]))
    asked = [rig.transfer("kv", one.keys), rig.transfer("mamba", last, trailing=True)]
    assert rig.waited(one.linker, "r", asked) == [6]
    targets = [rig.pages(one.device, "kv", one.keys, list(range(20, 26))), rig.pages(one.device, "mamba", last, [30])]
    assert rig.loaded(one.linker, "r", targets)
    assert one.stores[0].callers
    assert threading.current_thread() not in one.stores[0].callers


def test_a_prompt_whose_beginning_left_the_device_is_read_again_where_it_waits_on(open_rig: Callable[..., Rig]) -> None:
    one = open_rig()
    one.store(6)
    one.wait_for(one.request("r", one.keys[3:]))
    assert one.linker.lookup("r", [rig.transfer("kv", one.keys)]) == []
    assert rig.staging_in_use(one.linker) == 0
    request = one.request("r")
    assert one.held(request) == {"r"}
    one.wait_for(request)
    assert one.linker.lookup("r", [rig.transfer("kv", one.keys)]) == [1, 2, 3, 4, 5, 6]
    assert rig.loaded(one.linker, "r", [rig.pages(one.device, "kv", one.keys, list(range(60, 66)))])
    assert one.device.content("kv", list(range(60, 66))) == one.device.content("kv", one.numbers)
    # A policy that looks up what is behind it does not make it wait again.
    one.wait_for(request)
    assert one.linker.lookup("r", [rig.transfer("kv", rig.hashes(1, 7))]) == []
    assert one.held(request) == set()


def test_a_request_that_leaves_the_queue_leaves_no_memory_behind(open_rig: Callable[..., Rig]) -> None:
    one = open_rig()
    one.store(8)
    request = one.request("aborted")
    one.wait_for(request)
    assert rig.staging_in_use(one.linker) == 8
    assert one.held() == set()
    assert rig.staging_in_use(one.linker) == 0
    one.stores[0].mode = "slow"
    assert one.held(one.request("aborted while it is read")) != set()
    assert one.held() == set()
    wait_until(lambda: rig.staging_in_use(one.linker) == 0)


def test_of_a_prompt_larger_than_staging_memory_the_beginning_is_restored_and_the_scheduler_waits_for_nothing(
    open_rig: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    one = open_rig()
    staging = one.linker._staging
    room = staging.limits["kv"]
    one.store(staging.limits["kv"] + 6)
    request = one.request("r")
    one.wait_for(request)
    assert one.ahead("partly") == 1
    assert f"{room} of {len(one.keys)} pages" in caplog.text
    one.stores[0].mode = "hang"
    begun = time.monotonic()
    assert one.linker.lookup("r", [rig.transfer("kv", one.keys)]) == list(range(1, room + 1))
    targets = list(range(50, 50 + room))
    assert rig.loaded(one.linker, "r", [rig.pages(one.device, "kv", one.keys[:room], targets)])
    assert time.monotonic() - begun < SLACK
    assert one.device.content("kv", targets) == one.device.content("kv", one.numbers[:room])
    assert rig.staging_in_use(one.linker) == 0


@pytest.mark.parametrize("beside", ["swa", "mamba"])
def test_of_a_hybrid_prompt_larger_than_staging_memory_an_earlier_boundary_is_restored(
    beside: str, open_rig: Callable[..., Rig]
) -> None:
    one = open_rig(beside)
    one.store(one.linker._staging.limits["kv"] + 6)
    states = one.device.content(beside, [8])
    for boundary, state in ((3, 8), (len(one.keys), 9)):
        pages = [rig.pages(one.device, "kv", one.keys[:boundary], one.numbers[:boundary])]
        assert one.linker.offload([*pages, rig.pages(one.device, beside, [one.keys[boundary - 1]], [state])])
        assert rig.stored(one.linker)
    last = rig.transfer(beside, one.keys[-1:], trailing=True)
    one.wait_for(one.request("r", None, last))
    one.stores[0].mode = "hang"
    assert one.linker.lookup("r", [rig.transfer("kv", one.keys), last]) == [3]
    targets = [
        rig.pages(one.device, "kv", one.keys[:3], [60, 61, 62]),
        rig.pages(one.device, beside, one.keys[2:3], [30]),
    ]
    assert rig.loaded(one.linker, "r", targets)
    assert one.device.content("kv", [60, 61, 62]) == one.device.content("kv", [1, 2, 3])
    assert one.device.content(beside, [30]) == states
    assert rig.staging_in_use(one.linker) == 0


def test_two_requests_that_do_not_fit_together_are_both_served(open_rig: Callable[..., Rig]) -> None:
    one = open_rig(load_timeout="20s")
    most = one.linker._staging.limits["kv"]
    one.store(most)
    requests = [one.request("a"), one.request("b", one.keys[: most - 1])]
    wait_until(lambda: one.held(*requests) != {"a", "b"})
    ready = "a" if one.held(*requests) == {"b"} else "b"
    # Its turn comes when the first one's pages have moved on.
    assert one.held(*requests)
    for rid in (ready, "b" if ready == "a" else "a"):
        keys = one.keys if rid == "a" else one.keys[: most - 1]
        left = [request for request in requests if request.rid == rid or rid == ready]
        wait_until(lambda rid=rid, left=left: rid not in one.held(*left))
        assert one.linker.lookup(rid, [rig.transfer("kv", keys)])[-1] == len(keys)
        targets = list(range(50, 50 + len(keys)))
        assert rig.loaded(one.linker, rid, [rig.pages(one.device, "kv", keys, targets)])
        assert one.device.content("kv", targets) == one.device.content("kv", one.numbers[: len(keys)])
    assert one.ahead("read") == 2
    assert rig.staging_in_use(one.linker) == 0


def test_pages_that_came_to_the_device_meanwhile_are_not_loaded(open_rig: Callable[..., Rig]) -> None:
    one = open_rig()
    one.store(10)
    request = one.request("r")
    one.wait_for(request)
    before = one.device.content("kv", list(range(rig.PAGES)))
    rest = one.keys[4:]
    assert one.linker.lookup("r", [rig.transfer("kv", rest)]) == [1, 2, 3, 4, 5, 6]
    reads = one.stores[0].reads
    assert rig.loaded(one.linker, "r", [rig.pages(one.device, "kv", rest, list(range(60, 66)))])
    assert one.stores[0].reads == reads
    after = one.device.content("kv", list(range(rig.PAGES)))
    assert after[60:66] == before[5:11]
    assert (after[:60], after[66:]) == (before[:60], before[66:])
    assert rig.staging_in_use(one.linker) == 0


def test_another_prompt_under_the_same_name_is_not_answered_from_what_was_read(open_rig: Callable[..., Rig]) -> None:
    one = open_rig()
    one.store(4)
    request = one.request("r")
    one.wait_for(request)
    others = rig.hashes(4, 500)
    assert one.linker.lookup("r", [rig.transfer("kv", others)]) == []
    assert not one.linker.load("r", [rig.pages(one.device, "kv", others, [60, 61, 62, 63])])
    assert rig.staging_in_use(one.linker) == 0


def test_pages_that_were_read_under_other_weights_are_not_loaded(open_rig: Callable[..., Rig]) -> None:
    one = open_rig()
    one.store(4)
    request = one.request("r")
    one.wait_for(request)
    before = one.device.content("kv", list(range(rig.PAGES)))
    one.linker._backend.served.advance_weights_epoch("next")
    assert not one.linker.load("r", [rig.pages(one.device, "kv", one.keys, [60, 61, 62, 63])])
    assert one.device.content("kv", list(range(rig.PAGES))) == before
    assert rig.staging_in_use(one.linker) == 0


def test_a_flush_forgets_what_was_read(open_rig: Callable[..., Rig]) -> None:
    one = open_rig()
    one.store(4)
    request = one.request("r")
    one.wait_for(request)
    one.linker.reset()
    assert rig.staging_in_use(one.linker) == 0
    one.wait_for(request)
    assert request.asked == 2
    assert one.linker.lookup("r", [rig.transfer("kv", one.keys)]) == [1, 2, 3, 4]


@pytest.mark.parametrize(("kind", "beside"), [("swa", "swa"), ("mamba", "mamba")])
def test_the_pools_beside_are_read_ahead_too(kind: str, beside: str, open_rig: Callable[..., Rig]) -> None:
    one = open_rig(kind)
    last = rig.hashes(6)[-1:]
    one.store(6, rig.pages(one.device, beside, last, [9]))
    kv, states = one.device.content("kv", one.numbers), one.device.content(beside, [9])
    request = one.request("r", None, rig.transfer(beside, last, trailing=True))
    one.wait_for(request)
    one.stores[0].mode = "hang"
    asked = [rig.transfer("kv", one.keys), rig.transfer(beside, last, trailing=True)]
    assert one.linker.lookup("r", asked) == [6]
    targets = [
        rig.pages(one.device, "kv", one.keys, list(range(20, 26))),
        rig.pages(one.device, beside, last, [30]),
    ]
    assert rig.loaded(one.linker, "r", targets)
    assert (one.device.content("kv", list(range(20, 26))), one.device.content(beside, [30])) == (kv, states)
    assert rig.staging_in_use(one.linker) == 0


def test_a_long_queue_waits_for_its_turn(open_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache_ext.sglang.linker_ahead.MAX_CONCURRENT", 2)
    one = open_rig()
    one.store(6)
    requests = [one.request(f"r{number}", one.keys[: number + 1]) for number in range(6)]
    assert one.held(*requests) == {request.rid for request in requests}
    assert [request.asked for request in requests] == [1, 1, 0, 0, 0, 0]
    one.wait_for(*requests)
    assert [request.asked for request in requests] == [1] * 6


def test_what_is_held_back_is_what_all_ranks_agree_upon(open_rig: Callable[..., Rig]) -> None:
    one = open_rig()
    one.store(4)
    request = one.request("r")
    others = [False]
    one.linker._ahead._agreed = lambda mine: [ours and theirs for ours, theirs in zip(mine, others, strict=True)]
    one.held(request)
    time.sleep(0.2)
    assert one.held(request) == {"r"}, "another rank still reads"
    others = [True]
    one.wait_for(request)
    # A rank that refuses a request waits for the others all the same.
    others = [False]
    one.linker._ahead._threads._left_behind.append(None)
    refused = one.request("refused here")
    assert one.held(request, refused) == {"refused here"}
    assert one.held(request, refused) == {"refused here"}
    others = [True]
    assert one.held(request, refused) == set()
    one.linker._ahead._threads._left_behind.clear()


def _seconds_of(call: Callable[[], Any]) -> float:
    begun = time.monotonic()
    call()
    return time.monotonic() - begun


def test_a_prompt_that_was_on_the_device_and_has_left_it_is_read(open_rig: Callable[..., Rig]) -> None:
    one = open_rig()
    one.store(6)
    assert one.held(Waiting(one.linker, "r")) == set(), "SGLang asks its linker nothing"
    request = one.request("r")
    assert one.linker.lookup("r", [rig.transfer("kv", one.keys)]) == []
    one.wait_for(request)
    assert one.linker.lookup("r", [rig.transfer("kv", one.keys)]) == [1, 2, 3, 4, 5, 6]


def test_pages_that_sglang_did_not_take_are_not_read_a_second_time(open_rig: Callable[..., Rig]) -> None:
    """Another rank could not load them, and there is no room to compute them yet."""
    one = open_rig()
    one.store(6)
    request = one.request("r")
    one.wait_for(request)
    assert one.linker.lookup("r", [rig.transfer("kv", one.keys)]) == [1, 2, 3, 4, 5, 6]
    reads = one.stores[0].reads
    others = rig.hashes(6, 500)
    assert not one.linker.load("r", [rig.pages(one.device, "kv", others, [40, 41, 42, 43, 44, 45])])
    for _ in range(5):
        assert one.held(request) == set()
        assert one.linker.lookup("r", [rig.transfer("kv", one.keys)]) == []
    assert one.stores[0].reads == reads and rig.staging_in_use(one.linker) == 0
    one.held()
    one.wait_for(request)
    assert one.linker.lookup("r", [rig.transfer("kv", one.keys)]) == [1, 2, 3, 4, 5, 6], "it came again"

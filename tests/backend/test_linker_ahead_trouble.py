"""What is read ahead under trouble: memory that is short, calls that raise, ranks that differ, sessions, policies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from hicache_ext.sglang.releases import comes_with, installed_release
from tests.backend import linker_rig as rig
from tests.backend.ahead_rig import Rig
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(not comes_with(installed_release(), "0.5.23"), reason="SGLang has no linker of others"),
]


def test_a_rank_that_does_not_know_its_weights_yet_holds_back_what_the_others_do(
    open_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank reads its weights on a thread of its own. One that settles alone would leave the others waiting in
    a collective call for ever."""
    one = open_rig()
    one.store(4)
    asked: list[int] = []

    def agreed(mine: Sequence[bool]) -> list[bool]:
        asked.append(len(mine))
        return [False] * len(mine)

    one.linker._ahead._agreed = agreed
    monkeypatch.setattr(type(one.linker._backend.served), "unavailable", property(lambda pools: True))
    request = one.request("r")
    assert one.held(request) == {"r"}
    assert one.held(request) == {"r"}
    assert asked == [1]
    one.linker._ahead._agreed = lambda mine: [True] * len(mine)
    wait_until(lambda: one.held(request) == set())
    assert one.linker.lookup("r", [rig.transfer("kv", one.keys)]) == []


def test_the_device_has_picked_the_places_before_anything_may_be_copied_there(
    open_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are picked by a kernel on the scheduler's stream: a copy that waits for less may use places of nobody."""
    from hicache_ext.sglang.model_pools import Portion

    one = open_rig()
    one.store(4)
    request = one.request("r")
    one.wait_for(request)
    steps: list[str] = []
    assign_slots, scatter = Portion.assign_slots, one.linker._staging.scatter
    picked = SimpleNamespace(synchronize=lambda: steps.append("waited for"))

    def places(portion: Portion, wanted: Any) -> None:
        steps.append("places")
        assign_slots(portion, wanted)

    def recorded() -> list[Any]:
        steps.append("event")
        return [picked]

    def copied(*arguments: Any) -> None:
        steps.append("copy")
        scatter(*arguments)

    monkeypatch.setattr(Portion, "assign_slots", places)
    monkeypatch.setattr(one.linker, "record_offload_ready", recorded)
    monkeypatch.setattr(one.linker._staging, "scatter", copied)
    assert rig.loaded(one.linker, "r", [rig.pages(one.device, "kv", one.keys, [40, 41, 42, 43])])
    assert list(dict.fromkeys(steps)) == ["places", "event", "waited for", "copy"]


def test_a_load_that_raises_leaves_no_memory_behind(
    open_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = open_rig()
    one.store(4)
    request = one.request("r")
    one.wait_for(request)

    from hicache_ext.sglang.model_pools import Portion

    def out_of_memory(*_: Any) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(Portion, "assign_slots", out_of_memory)
    assert not one.linker.load("r", [rig.pages(one.device, "kv", one.keys, [40, 41, 42, 43])])
    assert one.linker._metrics.value("load", "error") == 1
    assert one.linker.start_layer_wise_loading() == -1
    assert rig.staging_in_use(one.linker) == 0


def test_what_was_read_of_a_pool_that_the_load_does_not_name_goes_nowhere(open_rig: Callable[..., Rig]) -> None:
    one = open_rig("mamba")
    last = rig.hashes(6)[-1:]
    one.store(6, rig.pages(one.device, "mamba", last, [9]))
    request = one.request("r", None, rig.transfer("mamba", last, trailing=True))
    one.wait_for(request)
    states = one.device.content("mamba", list(range(rig.PAGES)))
    assert rig.loaded(one.linker, "r", [rig.pages(one.device, "kv", one.keys, list(range(20, 26)))])
    assert one.device.content("mamba", list(range(rig.PAGES))) == states
    assert one.device.content("kv", list(range(20, 26))) == one.device.content("kv", one.numbers)
    assert rig.staging_in_use(one.linker) == 0


def test_memory_of_pages_that_came_to_the_device_meanwhile_is_free_at_once(open_rig: Callable[..., Rig]) -> None:
    one = open_rig()
    portion = one.linker._staging.portion_pages("kv")
    one.store(portion + 2)
    request = one.request("r")
    one.wait_for(request)
    assert one.linker.load("r", [rig.pages(one.device, "kv", one.keys[portion:], [60, 61])])
    assert rig.staging_in_use(one.linker) == 2
    assert one.linker.cancel_queued_load("r")


def test_a_turn_of_a_streaming_session_is_computed_from_what_the_session_has(open_rig: Callable[..., Rig]) -> None:
    """SGLang's look-up lends it the session's KV and frees what is beyond its prompt: not before it is admitted."""
    one = open_rig()
    one.store(4)
    request = one.request("turn")
    request.session = SimpleNamespace(streaming=True)
    assert one.held(request) == set()
    assert request.asked == 0
    look_ups = one.stores[0].look_ups
    assert one.linker.lookup("turn", [rig.transfer("kv", one.keys)]) == []
    assert one.stores[0].look_ups == look_ups
    other = one.request("of a session that is none of those")
    other.session = SimpleNamespace(streaming=False)
    assert one.held(request, other) == {other.rid}


def test_requests_that_find_no_memory_are_computed_and_no_store_is_taken_for_one_that_hangs(
    open_rig: Callable[..., Rig],
) -> None:
    one = open_rig(load_timeout="2s")
    one.store(one.linker._staging.limits["kv"])
    first = one.request("has all of it, and is not admitted")
    one.wait_for(first)
    others = [one.request(f"r{number}", one.keys[:3]) for number in range(15)]
    one.wait_for(first, *others)
    assert (one.ahead("read"), one.ahead("partly"), one.ahead("late")) == (1, 15, 0)
    for other in others:
        assert one.linker.lookup(other.rid, [rig.transfer("kv", one.keys[:3])]) == []
    # Memory is free again.
    one.held(*others)
    again = one.request("again", one.keys[:3])
    one.wait_for(*others, again)
    assert one.linker.lookup("again", [rig.transfer("kv", one.keys[:3])]) == [1, 2, 3]


def test_a_read_that_raises_while_it_takes_memory_leaves_none_behind(
    open_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = open_rig()
    staging = one.linker._staging
    one.store(staging.portion_pages("kv") + 1)
    take, calls = staging.take, []

    def failing(side: str, pages: Any, seconds: float) -> Any:
        calls.append(pages)
        if len(calls) > 1:
            raise RuntimeError("on purpose")
        return take(side, pages, seconds)

    monkeypatch.setattr(staging, "take", failing)
    one.wait_for(one.request("r"))
    assert one.ahead("error") == 1
    assert rig.staging_in_use(one.linker) == 0


def test_requests_that_leave_while_a_store_hangs_do_not_each_leave_a_thread_behind(
    open_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hicache_ext.sglang.linker_ahead._MAX_READS", 4)
    one = open_rig(load_timeout="20s")
    one.store(4)
    one.stores[0].mode = "hang"
    reads = one.stores[0].reads
    for number in range(20):
        one.held(one.request(f"r{number}"))
        wait_until(lambda begun=number + 1: one.stores[0].reads >= reads + min(begun, 4))
    assert len([thread for thread in threading.enumerate() if "hicache-link-load" in thread.name]) == 4
    one.stores[0].mode = "well"
    wait_until(lambda: not one.linker._ahead._reading)
    again = one.request("again")
    one.wait_for(again)
    assert one.linker.lookup("again", [rig.transfer("kv", one.keys)]) == [1, 2, 3, 4]


def test_what_is_being_read_keeps_a_load_that_is_in_memory_from_nothing(
    open_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others fill staging memory, and their store has not answered yet."""
    one = open_rig(load_timeout="60s")
    most = one.linker._staging.limits["kv"]
    one.store(most)
    ready = one.request("ready", one.keys[:2])
    one.wait_for(ready)
    read_whole, go_on = one.linker._backend.read_whole, threading.Event()

    def slow(*arguments: Any) -> bool:
        go_on.wait(60)
        return bool(read_whole(*arguments))

    monkeypatch.setattr(one.linker._backend, "read_whole", slow)
    reading, waits = one.request("is being read", one.keys[: most - 2]), one.request("finds no memory")
    try:
        assert one.held(ready, reading) == {"is being read"}
        wait_until(lambda: rig.staging_in_use(one.linker) == most)
        assert one.held(ready, reading, waits) == {"is being read", "finds no memory"}
        assert rig.loaded(one.linker, "ready", [rig.pages(one.device, "kv", one.keys[:2], [50, 51])])
        assert one.device.content("kv", [50, 51]) == one.device.content("kv", one.numbers[:2])
    finally:
        go_on.set()
    one.wait_for(reading)
    one.held()
    wait_until(lambda: rig.staging_in_use(one.linker) == 0)


@pytest.mark.parametrize(("asked", "answer"), [((0, 5), [1, 2, 3, 4]), ((2, 5), [1, 2]), ((0, 3), [1, 2, 3])])
def test_a_policy_that_asks_for_more_or_less_of_a_prompt_is_answered_from_memory(
    asked: tuple[int, int], answer: list[int], open_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longest prefix first looks up whole prompts: at the end of a page that is one more than what is admitted."""
    one = open_rig()
    one.store(5)
    request = one.request("r", one.keys[:4])
    one.wait_for(request)
    monkeypatch.setattr(one.linker._backend, "batch_exists_v2", lambda *_: pytest.fail("the store was asked"))
    assert one.linker.lookup("r", [rig.transfer("kv", one.keys[slice(*asked)])]) == answer


def test_what_lies_beside_a_prompt_that_finds_no_memory_takes_none(open_rig: Callable[..., Rig]) -> None:
    one = open_rig("mamba", load_timeout="2s")
    staging = one.linker._staging
    count = staging.limits["kv"]
    keys = rig.hashes(count)
    one.store(count, rig.pages(one.device, "mamba", keys[-1:], [9]))
    asked = rig.transfer("mamba", keys[-1:], trailing=True)
    first, second = one.request("first", None, asked), one.request("second", None, asked)
    one.wait_for(first)
    in_use = rig.staging_in_use(one.linker)
    one.wait_for(first, second)
    assert (one.ahead("read"), one.ahead("partly")) == (1, 1)
    assert rig.staging_in_use(one.linker) == in_use
    assert one.linker.lookup("second", [rig.transfer("kv", one.keys), asked]) == []

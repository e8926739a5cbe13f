"""Pages are read while their request waits in SGLang's queue, and its scheduler waits for no store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hicache_ext.sglang.linker_hooks import around_new_batch
from hicache_ext.sglang.linking.staging import Portion
from hicache_ext.sglang.releases import comes_with, installed_release
from tests.backend import linker_rig as rig

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(not comes_with(installed_release(), "0.5.23"), reason="SGLang has no linker of others"),
]

TIMEOUT = 0.5
SLACK = 5.0
"""Seconds that a call may take beyond its deadline on a busy machine."""


class Waiting:
    """A request of SGLang's queue whose tree asks for ``transfers`` when it is looked up."""

    def __init__(self, linker: Any, rid: str, *transfers: Any) -> None:
        self.rid = rid
        self.session: Any = None
        self.asked = 0
        self._linker = linker
        self._transfers = list(transfers)

    def init_next_round_input(self, tree: Any, cow_mamba: bool) -> None:
        assert cow_mamba is False
        self.asked += 1
        if self._transfers:
            assert self._linker.lookup(self.rid, self._transfers) == []


class Rig:
    """A linker over a store in trouble, on whose device pages 1 to ``count`` were computed and stored."""

    def __init__(self, device: rig.Device, directory: Path, stores: list[rig.TroubledStore], **linker: Any) -> None:
        ours = {"linker": {"staging": "1MiB", "load_timeout": TIMEOUT, **linker}}
        self.device, self.stores = device, stores
        self.linker = rig.linker_of(device, rig.extra_config(directory, **ours))
        device.fill()
        self.keys: list[str] = []

    def store(self, count: int, *beside: Any) -> None:
        self.keys = rig.hashes(count)
        self.numbers = list(range(1, count + 1))
        assert self.linker.offload([rig.pages(self.device, "kv", self.keys, self.numbers), *beside])
        assert rig.stored(self.linker)

    def request(self, rid: str, keys: Sequence[str] | None = None, *beside: Any) -> Waiting:
        wanted = self.keys if keys is None else list(keys)
        return Waiting(self.linker, rid, rig.transfer("kv", wanted), *beside)

    def held(self, *queue: Waiting) -> set[str]:
        return set(self.linker.requests_to_hold(queue, None))

    def wait_for(self, *queue: Waiting) -> None:
        """Until none of them is held back."""
        _until(lambda: not self.held(*queue))

    def ahead(self, outcome: str) -> float:
        return float(self.linker._metrics.value("ahead", outcome))


@pytest.fixture
def open_rig(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    opened: list[Rig] = []
    with rig.server_context(), rig.troubled_stores() as stores:

        def open_(kind: str = "mha", **linker: Any) -> Rig:
            opened.append(Rig(rig.DEVICES[kind](), tmp_path / "l3", stores, **linker))
            return opened[-1]

        yield open_
        for store in stores:
            store.mode = "well"
        for one in opened:
            one.linker.close()


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
    _until(lambda: not one.linker._threads.left_behind)
    again = one.request("again")
    one.wait_for(again)
    assert one.linker.lookup("again", [rig.transfer("kv", one.keys)]) == [1, 2, 3, 4]
    one.held()
    _until(lambda: rig.staging_in_use(one.linker) == 0)


@pytest.mark.parametrize("mode", ["fail", "raise"])
def test_what_cannot_be_read_ahead_is_computed(mode: str, open_rig: Callable[..., Rig]) -> None:
    one = open_rig()
    one.store(4)
    one.stores[0].mode = mode
    request = one.request("r")
    one.wait_for(request)
    assert one.linker.lookup("r", [rig.transfer("kv", one.keys)]) == []
    assert rig.staging_in_use(one.linker) == 0


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
    _until(lambda: rig.staging_in_use(one.linker) == 0)


def test_a_prompt_larger_than_staging_memory_is_read_ahead_in_part(open_rig: Callable[..., Rig]) -> None:
    one = open_rig()
    most = one.linker._staging.most_pages("kv")
    count = most + 6
    one.store(count)
    request = one.request("r")
    one.wait_for(request)
    assert one.ahead("partly") == 1
    assert one.linker.lookup("r", [rig.transfer("kv", one.keys)])[-1] == count
    targets = list(range(50, 50 + count))
    assert rig.loaded(one.linker, "r", [rig.pages(one.device, "kv", one.keys, targets)])
    assert one.device.content("kv", targets) == one.device.content("kv", one.numbers)
    assert rig.staging_in_use(one.linker) == 0


def test_two_requests_that_do_not_fit_together_are_both_served(open_rig: Callable[..., Rig]) -> None:
    one = open_rig(load_timeout="20s")
    most = one.linker._staging.most_pages("kv") - one.linker._staging.reserved_pages("kv")
    one.store(most)
    requests = [one.request("a"), one.request("b", one.keys[: most - 1])]
    _until(lambda: one.held(*requests) != {"a", "b"})
    ready = "a" if one.held(*requests) == {"b"} else "b"
    # Its turn comes when the first one's pages have moved on.
    assert one.held(*requests)
    for rid in (ready, "b" if ready == "a" else "a"):
        keys = one.keys if rid == "a" else one.keys[: most - 1]
        left = [request for request in requests if request.rid == rid or rid == ready]
        _until(lambda rid=rid, left=left: rid not in one.held(*left))
        assert one.linker.lookup(rid, [rig.transfer("kv", keys)])[-1] == len(keys)
        targets = list(range(50, 50 + len(keys)))
        assert rig.loaded(one.linker, rid, [rig.pages(one.device, "kv", keys, targets)])
        assert one.device.content("kv", targets) == one.device.content("kv", one.numbers[: len(keys)])
    assert one.ahead("read") == 2
    assert rig.staging_in_use(one.linker) == 0


def test_memory_that_waits_for_nobody_makes_place_for_a_load(open_rig: Callable[..., Rig]) -> None:
    one = open_rig()
    one.store(one.linker._staging.most_pages("kv"))
    waiting = one.request("waits")
    one.wait_for(waiting)
    targets = list(range(50, 50 + len(one.keys)))
    assert rig.loaded(one.linker, "never held", [rig.pages(one.device, "kv", one.keys, targets)])
    assert rig.loaded(one.linker, "waits", [rig.pages(one.device, "kv", one.keys, targets)])
    assert one.device.content("kv", targets) == one.device.content("kv", one.numbers)
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
    one.linker._backend.advance_weights_epoch("next")
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
    monkeypatch.setattr("hicache_ext.sglang.linking.ahead.AT_ONCE", 2)
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
    monkeypatch.setattr(one.linker._backend, "served_pool", lambda name: None)
    monkeypatch.setattr(type(one.linker._backend._pools), "unavailable", property(lambda pools: True))
    request = one.request("r")
    assert one.held(request) == {"r"}
    assert one.held(request) == {"r"}
    assert asked == [1]
    one.linker._ahead._agreed = lambda mine: [True] * len(mine)
    _until(lambda: one.held(request) == set())
    assert one.linker.lookup("r", [rig.transfer("kv", one.keys)]) == []


def test_the_device_has_picked_the_places_before_anything_may_be_copied_there(
    open_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are picked by a kernel on the scheduler's stream: a copy that waits for less may use places of nobody."""
    one = open_rig()
    one.store(4)
    request = one.request("r")
    one.wait_for(request)
    steps: list[str] = []
    give_places, record = Portion.give_places, one.linker.record_offload_ready

    def places(portion: Portion, wanted: Any) -> list[str]:
        steps.append("places")
        return give_places(portion, wanted)

    def recorded() -> Any:
        steps.append("events")
        return record()

    monkeypatch.setattr(Portion, "give_places", places)
    monkeypatch.setattr(one.linker, "record_offload_ready", recorded)
    assert one.linker.load("r", [rig.pages(one.device, "kv", one.keys, [40, 41, 42, 43])])
    assert steps[0] == "places"
    assert steps[-1] == "events"


@pytest.mark.parametrize("broken", ["give_places", "record_offload_ready"])
def test_a_load_that_raises_leaves_no_memory_behind(
    broken: str, open_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = open_rig()
    one.store(4)
    request = one.request("r")
    one.wait_for(request)

    def out_of_memory(*_: Any) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(Portion if broken == "give_places" else one.linker, broken, out_of_memory)
    assert not one.linker.load("r", [rig.pages(one.device, "kv", one.keys, [40, 41, 42, 43])])
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


def test_a_turn_of_a_streaming_session_is_not_looked_up_before_sglang_does(open_rig: Callable[..., Rig]) -> None:
    """SGLang's look-up lends it the session's KV and frees what is beyond its prompt."""
    one = open_rig()
    one.store(4)
    request = one.request("turn")
    request.session = SimpleNamespace(streaming=True)
    assert one.held(request) == set()
    assert request.asked == 0
    other = one.request("of a session that is none of those")
    other.session = SimpleNamespace(streaming=False)
    assert one.held(request, other) == {other.rid}


def test_requests_that_find_no_memory_are_not_taken_for_a_store_that_hangs(open_rig: Callable[..., Rig]) -> None:
    one = open_rig(load_timeout="2s")
    one.store(one.linker._staging.most_pages("kv"))
    first = one.request("has all of it, and is not admitted")
    one.wait_for(first)
    others = [one.request(f"r{number}", one.keys[:3]) for number in range(15)]
    one.wait_for(first, *others)
    assert one.ahead("late") == 0
    for other in others:
        assert one.linker.lookup(other.rid, [rig.transfer("kv", one.keys[:3])]) == [1, 2, 3]
    assert rig.loaded(one.linker, "r0", [rig.pages(one.device, "kv", one.keys[:3], [60, 61, 62])])
    assert one.device.content("kv", [60, 61, 62]) == one.device.content("kv", one.numbers[:3])


def test_a_read_that_raises_while_it_takes_memory_leaves_none_behind(
    open_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = open_rig()
    staging = one.linker._staging
    one.store(staging.portion_pages("kv") + 1)
    take, calls = staging.take, []

    def failing(side: str, pages: Any, seconds: float = 0.0) -> Any:
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
    monkeypatch.setattr("hicache_ext.sglang.linking.ahead._MOST_READS", 4)
    one = open_rig(load_timeout="20s")
    one.store(4)
    one.stores[0].mode = "hang"
    for number in range(20):
        one.held(one.request(f"r{number}"))
    assert len([thread for thread in threading.enumerate() if "hicache-link-load" in thread.name]) == 4
    one.stores[0].mode = "well"
    _until(lambda: not one.linker._ahead._reading)
    again = one.request("again")
    one.wait_for(again)
    assert one.linker.lookup("again", [rig.transfer("kv", one.keys)]) == [1, 2, 3, 4]


def test_what_is_being_read_ahead_keeps_no_load_from_its_pages(
    open_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory cannot be had before its store has answered."""
    one = open_rig(load_timeout="20s")
    one.store(one.linker._staging.most_pages("kv"))
    read_whole, reading, go_on = one.linker._backend.read_whole, threading.Event(), threading.Event()

    def slow_once(pool: Any, keys: Sequence[str], host_indices: Any) -> bool:
        if keys[0] == one.keys[0] and not reading.is_set():
            reading.set()
            go_on.wait(20)
        return bool(read_whole(pool, keys, host_indices))

    monkeypatch.setattr(one.linker._backend, "read_whole", slow_once)
    slow = one.request("is being read")
    try:
        assert one.held(slow)
        assert reading.wait(20)
        others = one.keys[1:]
        targets = list(range(50, 50 + len(others)))
        assert rig.loaded(one.linker, "other", [rig.pages(one.device, "kv", others, targets)])
        assert one.device.content("kv", targets) == one.device.content("kv", one.numbers[1:])
    finally:
        go_on.set()
    one.wait_for(slow)
    one.held()
    assert rig.staging_in_use(one.linker) == 0


@pytest.mark.parametrize(("asked", "answer"), [((0, 5), [1, 2, 3, 4]), ((2, 5), [1, 2]), ((0, 3), [1, 2, 3])])
def test_a_policy_that_asks_for_more_or_less_of_a_prompt_is_answered_from_memory(
    asked: tuple[int, int], answer: list[int], open_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longest prefix first looks up whole prompts: at the end of a page that is one more than what is admitted."""
    one = open_rig()
    one.store(5)
    request = one.request("r", one.keys[:4])
    one.wait_for(request)
    monkeypatch.setattr(one.linker._look_ups, "_find", lambda keys, beside: pytest.fail("the store was asked"))
    assert one.linker.lookup("r", [rig.transfer("kv", one.keys[slice(*asked)])]) == answer


# -- the hook ----------------------------------------------------------------------------------------------------------


class Scheduler:
    """What the hook sees of SGLang's."""

    def __init__(self, queue: Sequence[str], held: set[str]) -> None:
        self.waiting_queue = [SimpleNamespace(rid=rid) for rid in queue]
        self.naps = 0
        self.seen_when_added: list[str] = []
        self.asked: list[str] = []
        linker = SimpleNamespace(requests_to_hold=lambda queue, tree: self._hold(queue, held), nap=self._nap)
        self.tree_cache = SimpleNamespace(linker=SimpleNamespace(cache_linker=linker))
        self.running_batch = SimpleNamespace(is_empty=lambda: True)
        self.chunked_req = None
        self.last_batch: Any = None
        self.require_mlp_sync = False
        self.enable_priority_scheduling = False
        self.schedule_low_priority_values_first = False

    def _hold(self, queue: Sequence[Any], held: set[str]) -> set[str]:
        self.asked = [request.rid for request in queue]
        return held

    def _nap(self) -> None:
        self.naps += 1

    def _add_request_to_queue(self, request: Any, is_retracted: bool = False) -> None:
        self.seen_when_added.append("".join(self.rids))
        self.waiting_queue.append(request)

    @property
    def rids(self) -> list[str]:
        return [request.rid for request in self.waiting_queue]


def test_sglang_sees_its_queue_without_what_is_held_and_has_it_back_in_order() -> None:
    scheduler = Scheduler("abcde", {"a", "d"})
    seen: list[str] = []

    def choose(scheduler: Any, running: str) -> str:
        seen.extend(scheduler.rids)
        scheduler.waiting_queue = [request for request in scheduler.waiting_queue if request.rid != "c"]
        scheduler._add_request_to_queue(SimpleNamespace(rid="x"))
        return f"after {running}"

    assert around_new_batch(choose, scheduler, "one") == "after one"
    assert seen == ["b", "c", "e"]
    assert scheduler.rids == ["a", "b", "d", "e", "x"]
    assert scheduler.naps == 0


@pytest.mark.parametrize("held", [set(), {"a", "b"}])
def test_a_request_that_comes_while_a_batch_is_chosen_comes_to_the_whole_queue_and_is_looked_up_first(
    held: set[str],
) -> None:
    """Its grammar is ready, or it was preempted. SGLang's limit counts the whole queue."""
    scheduler = Scheduler("abc", held)
    seen: list[str] = []

    def choose(scheduler: Any) -> None:
        scheduler._add_request_to_queue(SimpleNamespace(rid="x"), is_retracted=True)
        seen.extend(scheduler.rids)

    around_new_batch(choose, scheduler)
    assert "x" not in seen
    assert scheduler.seen_when_added == ["abc"]
    assert scheduler.rids == ["a", "b", "c", "x"]
    scheduler._add_request_to_queue(SimpleNamespace(rid="y"))
    assert scheduler.rids == ["a", "b", "c", "x", "y"], "as before"


def test_a_choice_that_raises_leaves_the_queue_as_it_was() -> None:
    scheduler = Scheduler("abc", {"b"})

    def choose(scheduler: Any) -> None:
        raise OSError("on purpose")

    with pytest.raises(OSError, match="on purpose"):
        around_new_batch(choose, scheduler)
    assert scheduler.rids == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("state", "naps"),
    [
        ({}, 1),
        ({"running_batch": SimpleNamespace(is_empty=lambda: False)}, 0),
        ({"chunked_req": object()}, 0),
        ({"last_batch": object()}, 0),
        ({"require_mlp_sync": True}, 0),
    ],
    ids=["idle", "running", "between chunks", "a result is due", "others wait for it"],
)
def test_only_a_scheduler_that_keeps_nobody_waiting_takes_a_nap(state: dict[str, Any], naps: int) -> None:
    scheduler = Scheduler("ab", {"a", "b"})
    for name, value in state.items():
        setattr(scheduler, name, value)
    around_new_batch(lambda scheduler: None, scheduler)
    assert scheduler.naps == naps


@pytest.mark.parametrize(("low_first", "order"), [(True, "badc"), (False, "cadb")])
def test_who_has_priority_is_read_first(low_first: bool, order: str) -> None:
    scheduler = Scheduler("abcd", {"a"})
    scheduler.enable_priority_scheduling, scheduler.schedule_low_priority_values_first = True, low_first
    for request, priority in zip(scheduler.waiting_queue, (5, 1, 9, 5), strict=True):
        request.priority = priority
    around_new_batch(lambda scheduler: None, scheduler)
    assert "".join(scheduler.asked) == order
    assert scheduler.rids == ["a", "b", "c", "d"]


def test_another_cache_is_left_alone() -> None:
    for tree in (None, SimpleNamespace(), SimpleNamespace(linker=None), SimpleNamespace(linker=SimpleNamespace())):
        scheduler = SimpleNamespace(tree_cache=tree, waiting_queue=object())
        assert around_new_batch(lambda scheduler, number: number, scheduler, 3) == 3


def _seconds_of(call: Callable[[], Any]) -> float:
    begun = time.monotonic()
    call()
    return time.monotonic() - begun


def _until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)

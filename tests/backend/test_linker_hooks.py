"""The hook that keeps requests whose pages are being read out of SGLang's sight."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from hicache_ext.sglang.scheduler_hooks import around_new_batch

pytestmark = pytest.mark.sglang


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

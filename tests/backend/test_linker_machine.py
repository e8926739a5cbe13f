"""Any sequence of SGLang's calls on the linker over a store in trouble, against a model.

No completion is lost, no call of the scheduler's waits for the store or comes there, device slots are written by the
load that owns them and by nothing else, and never after SGLang was told that it is over; what is said to have landed is
right, and nothing is loaded that was not read while its request waited.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hicache_ext.sglang.releases import comes_with, installed_release
from hicache_ext.testing.sglang_cpu import prepare_process
from tests.backend import linker_rig as rig

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.skipif(not comes_with(installed_release(), "0.5.23"), reason="SGLang has no linker of others"),
]

KEYS = 24
SOURCES = range(1, 1 + KEYS)
"""Device page of each key: what was computed."""
TARGETS = list(range(40, 90))
LOAD_TIMEOUT = 0.3
MODES = st.sampled_from(["well", "well", "well", "fail", "raise", "slow", "hang"])
"""How the store is from a call on."""
SLACK = 5.0
"""Seconds that a call may take on a busy machine."""


def asked_for(keys: Sequence[int]) -> Any:
    return rig.transfer("kv", [rig.hashes(KEYS)[key] for key in keys])


@dataclass
class Waiting:
    """A request of SGLang's queue, of whose prompt ``on_device`` pages are on the device."""

    linker: Any
    rid: str
    end: int
    on_device: int
    asked_from: int = KEYS
    """The first page that was not on the device when it was looked up last."""
    session: None = None

    def init_next_round_input(self, tree: Any, cow_mamba: bool) -> None:
        self.asked_from = self.on_device
        if keys := self.keys():
            assert self.linker.lookup(self.rid, [asked_for(keys)]) == []

    def keys(self) -> list[int]:
        return list(range(self.on_device, self.end))


class LinkerMachine(RuleBasedStateMachine):
    @initialize()
    def open(self) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.stack = ExitStack()
        self.stack.enter_context(rig.server_context())
        self.stores = self.stack.enter_context(rig.troubled_stores())
        self.device = rig.mha_device()
        self.device.fill()
        self.content = dict(zip(range(KEYS), self.device.content("kv", list(SOURCES)), strict=True))
        self.expected = self.device.content("kv", list(range(rig.PAGES)))
        ours = {"linker": {"staging": "1MiB", "load_timeout": LOAD_TIMEOUT}}
        self.linker = rig.linker_of(self.device, rig.extra_config(Path(self.directory.name), **ours))
        some = list(range(16))
        names = [rig.hashes(KEYS)[key] for key in some]
        assert self.linker.offload([rig.pages(self.device, "kv", names, [SOURCES[key] for key in some])])
        assert rig.stored(self.linker)
        self.outstanding = 0
        self.pending: dict[str, tuple[list[int], list[int]]] = {}
        """Request -> keys, device pages."""
        self.queue: dict[str, Waiting] = {}
        """Requests that SGLang has not admitted."""
        self.free = list(TARGETS)
        self.count = 0

    # -- what SGLang does ------------------------------------------------------------------------------------------

    @rule(first=st.integers(0, KEYS - 1), count=st.integers(1, KEYS), mode=MODES)
    def offload(self, first: int, count: int, mode: str) -> None:
        self.stores[0].mode = mode
        keys = list(range(first, min(KEYS, first + count)))
        names = [rig.hashes(KEYS)[key] for key in keys]
        taken = self._soon(
            lambda: self.linker.offload([rig.pages(self.device, "kv", names, [SOURCES[key] for key in keys])])
        )
        assert taken or self.outstanding
        self.outstanding += taken

    @rule()
    def take_results(self) -> None:
        for _ in range(self.linker.num_completed_offloads()):
            self.linker.pop_completed_offload()
            self.outstanding -= 1
        assert self.outstanding >= 0

    @rule(first=st.integers(0, 15), count=st.integers(1, 16), mode=MODES)
    def ask_for_what_nobody_asked_about_before(self, first: int, count: int, mode: str) -> None:
        self.stores[0].mode = mode
        if len(self.free) < KEYS:
            self.run_batch()
        keys = list(range(first, min(KEYS, first + count)))
        slots, rid = self.free[: len(keys)], self._name("n")
        assert self._soon(lambda: self.linker.lookup(rid, [asked_for(keys)])) == []
        assert not self._load(rid, keys, slots)

    @rule(count=st.integers(1, 16), device=st.integers(0, 3), mode=MODES)
    def arrive(self, count: int, device: int, mode: str) -> None:
        """Mostly with pages that are stored from the start."""
        self.stores[0].mode = mode
        rid = self._name("q")
        self.queue[rid] = Waiting(self.linker, rid, count, device)
        self._round()

    def _round(self) -> set[str]:
        return set(self._soon(lambda: self.linker.requests_to_hold(list(self.queue.values()), None)))

    @precondition(lambda self: bool(self.queue))
    @rule(device=st.integers(0, 3), wait=st.booleans(), room=st.booleans())
    def admit(self, device: int, wait: bool, room: bool) -> None:
        """SGLang looks up the first request that it sees, of which other pages may be on the device by now, and takes
        it where there is room."""
        held = self._round()
        deadline = time.monotonic() + LOAD_TIMEOUT + SLACK
        while wait and len(held) == len(self.queue):
            assert time.monotonic() < deadline, "a request was held back for ever"
            time.sleep(0.005)
            held = self._round()
        request = next((request for rid, request in self.queue.items() if rid not in held), None)
        if request is None:
            return
        if len(self.free) < KEYS:
            self.run_batch()
        request.on_device = device
        keys = request.keys()
        found = self._soon(lambda: self.linker.lookup(request.rid, [asked_for(keys)])) if keys else []
        assert found == sorted(set(found))
        assert not found or device >= request.asked_from, "its beginning was not read"
        if not room:
            event("looked up, and goes on waiting")
            return
        del self.queue[request.rid]
        if not found:
            event("admitted without stored pages")
            return
        keys = keys[: found[-1]]
        assert self._load(request.rid, keys, self.free[: len(keys)]), "what was promised"
        event("admitted with pages that were read")

    def _load(self, rid: str, keys: list[int], slots: list[int]) -> bool:
        names = [rig.hashes(KEYS)[key] for key in keys]
        loaded = bool(self._soon(lambda: self.linker.load(rid, [rig.pages(self.device, "kv", names, slots)])))
        if loaded:
            self.free = self.free[len(keys) :]
            self.pending[rid] = (keys, slots)
        return loaded

    def _name(self, kind: str) -> str:
        self.count += 1
        return f"{kind}{self.count}"

    @precondition(lambda self: bool(self.queue))
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        del self.queue[data.draw(st.sampled_from(sorted(self.queue)))]
        self._round()

    @precondition(lambda self: bool(self.pending))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(sorted(self.pending)))
        assert self.linker.cancel_queued_load(rid)
        _, slots = self.pending.pop(rid)
        self._forget(slots)
        self.free += slots

    @rule()
    def run_batch(self) -> None:
        batch, self.pending = self.pending, {}
        index = self._soon(self.linker.start_layer_wise_loading)
        assert (index >= 0) == bool(batch)
        if not batch:
            return
        landed = self._soon(lambda: rig.forward(self.linker, index, lambda layer: self._is_there(layer, batch)))
        assert landed
        for keys, slots in batch.values():
            assert self.device.content("kv", slots) == [self.content[key] for key in keys]
            self._forget(slots)
            self.free += slots

    def _is_there(self, layer: int, batch: dict[str, tuple[list[int], list[int]]]) -> None:
        """What the forward reads of a layer once it was told that it is there."""
        for keys, slots in batch.values():
            computed = self.device.layer_content(layer, [SOURCES[key] for key in keys])
            assert self.device.layer_content(layer, slots) == computed

    @rule()
    def flush(self) -> None:
        self._soon(self.linker.reset)
        assert self.linker.num_completed_offloads() == 0
        # SGLang gives the pages to others at once: what is read of the device from here on would be somebody else's.
        self.device.fill(seed=2, only=list(SOURCES))
        time.sleep(0.002)
        self.device.fill(only=list(SOURCES))
        self.outstanding = 0
        for _, slots in self.pending.values():
            self._forget(slots)
            self.free += slots
        self.pending = {}

    @rule()
    def everything_completes(self) -> None:
        """However the store is: once it answers again, everything that was handed over is answered, in order."""
        self.stores[0].mode = "well"
        for _ in range(self.outstanding):
            rig.stored(self.linker)
        self.outstanding = 0

    # -- what holds always -----------------------------------------------------------------------------------------

    def _soon(self, call: Any) -> Any:
        begun = time.monotonic()
        answer = call()
        assert time.monotonic() - begun < SLACK
        return answer

    def _forget(self, slots: list[int]) -> None:
        """Nobody owns these any more: what they hold now they are to hold from here on."""
        for slot, content in zip(slots, self.device.content("kv", slots), strict=True):
            self.expected[slot] = content

    @invariant()
    def only_the_slots_of_loads_change(self) -> None:
        if not hasattr(self, "linker"):
            return
        owned = {slot for _, slots in self.pending.values() for slot in slots}
        now = self.device.content("kv", list(range(rig.PAGES)))
        changed = [page for page in range(rig.PAGES) if now[page] != self.expected[page] and page not in owned]
        assert not changed

    @invariant()
    def the_scheduler_never_comes_to_a_store(self) -> None:
        if hasattr(self, "linker"):
            assert threading.current_thread() not in self.stores[0].callers

    def teardown(self) -> None:
        if not hasattr(self, "linker"):
            return
        try:
            for rid in list(self.pending):
                self.linker.cancel_queued_load(rid)
            self.queue.clear()
            self._round()
            self.stores[0].mode = "well"
            deadline = time.monotonic() + 20
            while rig.staging_in_use(self.linker) and time.monotonic() < deadline:
                time.sleep(0.01)
            assert rig.staging_in_use(self.linker) == 0
            self.linker.close()
            left = [thread.name for thread in threading.enumerate() if "hicache-link" in thread.name]
            assert left == []
        finally:
            self.linker.close()
            self.stack.close()
            self.directory.cleanup()


prepare_process()
TestLinkerMachine = LinkerMachine.TestCase
TestLinkerMachine.settings = settings(
    max_examples=20,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)

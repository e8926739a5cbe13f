"""Any sequence of SGLang's calls on the linker over a store in trouble, against a model.

No completion is lost, no call blocks for longer than its deadline, device slots are written by the load that owns them
and by nothing else, and never after SGLang was told that it is over; what is said to have landed is right.
"""

from __future__ import annotations

import tempfile
import threading
import time
from contextlib import ExitStack
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
"""Seconds that a call may take beyond its deadline on a busy machine."""


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
        self.free = list(TARGETS)
        self.count = 0
        self.stop = threading.Event()
        self.raised: list[BaseException] = []
        self.asking = threading.Thread(target=self._ask, daemon=True)
        self.asking.start()

    def _ask(self) -> None:
        """Another thread that only looks."""
        keys = rig.hashes(KEYS)
        while not self.stop.is_set():
            try:
                found = self.linker.lookup("looks", [rig.transfer("kv", keys)])
                assert found == list(range(1, len(found) + 1))
                assert self.linker.num_completed_offloads() >= 0
            except BaseException as error:  # noqa: BLE001
                self.raised.append(error)
                return
            time.sleep(0.002)

    # -- what SGLang does ------------------------------------------------------------------------------------------

    @rule(first=st.integers(0, KEYS - 1), count=st.integers(1, KEYS), mode=MODES)
    def offload(self, first: int, count: int, mode: str) -> None:
        self.stores[0].mode = mode
        keys = list(range(first, min(KEYS, first + count)))
        names = [rig.hashes(KEYS)[key] for key in keys]
        taken = self._soon(
            lambda: self.linker.offload([rig.pages(self.device, "kv", names, [SOURCES[key] for key in keys])]), 0
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
    def load(self, first: int, count: int, mode: str) -> None:
        """Mostly of pages that are there from the start."""
        self.stores[0].mode = mode
        if len(self.free) < KEYS:
            self.run_batch()
        keys = list(range(first, min(KEYS, first + count)))
        slots, rid = self.free[: len(keys)], f"r{self.count}"
        self.count += 1
        names = [rig.hashes(KEYS)[key] for key in keys]
        if self._soon(lambda: self.linker.load(rid, [rig.pages(self.device, "kv", names, slots)]), LOAD_TIMEOUT):
            self.free = self.free[len(keys) :]
            event(f"loaded while the store is {mode}")
            self.pending[rid] = (keys, slots)
        else:
            event(f"not loaded while the store is {mode}")
            self._forget(slots)

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
        index = self._soon(self.linker.start_layer_wise_loading, 0)
        assert (index >= 0) == bool(batch)
        if not batch:
            return
        landed = self._soon(lambda: rig.forward(self.linker, index, lambda layer: self._is_there(layer, batch)), 0)
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
        self._soon(self.linker.reset, 0)
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

    def _soon(self, call: Any, seconds: float) -> Any:
        begun = time.monotonic()
        answer = call()
        assert time.monotonic() - begun < seconds + SLACK
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
        assert not self.raised

    def teardown(self) -> None:
        if not hasattr(self, "linker"):
            return
        try:
            self.stop.set()
            self.asking.join(10)
            for rid in list(self.pending):
                self.linker.cancel_queued_load(rid)
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

"""A linker over a store in trouble, with requests that wait in SGLang's queue."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.backend import linker_rig as rig
from tests.waiting import wait_until

TIMEOUT = 0.5


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
        wait_until(lambda: not self.held(*queue))

    def ahead(self, outcome: str) -> float:
        return float(self.linker._metrics.value("ahead", outcome))

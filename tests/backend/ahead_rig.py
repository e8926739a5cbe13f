"""A linker over a store in trouble, with requests that wait in SGLang's queue."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.backend import linker_rig as rig
from tests.backend.linker_rig import Waiting

TIMEOUT = 0.5


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
        rig.wait_for(self.linker, queue)

    def ahead(self, outcome: str) -> float:
        return float(self.linker._metrics.value("ahead", outcome))

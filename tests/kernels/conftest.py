"""What the tests of copy engines share: SGLang on the CPU, and every engine under its hooks."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from hicache_ext.kernels.engine import CopyEngine, ReferenceEngine
from hicache_ext.kernels.selection import Selector
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.sglang import kernel_hooks as sglang_hooks
from hicache_ext.sglang.releases import comes_with, installed_release
from hicache_ext.testing.sglang_cpu import prepare_process
from tests.kernels import pools
from tests.rigs.fake_cuda import FakeGpu
from tests.rigs.interpreted_triton import InterpretedTritonEngine

REGISTERED = "_sglang_cuda_host_registered_ranges"


@pytest.fixture(scope="session")
def sglang() -> Iterator[None]:
    """SGLang's host pools, usable in this process."""
    if importlib.util.find_spec("sglang") is None:  # not importorskip: the import has to wait for prepare_process
        pytest.skip("missing: sglang")
    if not comes_with(installed_release(), "0.5.23"):
        pytest.skip(
            "these pools are built as SGLang does since 0.5.23; tests/backend/test_copies.py has the older ones"
        )
    prepare_process()
    from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope

    # SGLang keeps 10 GiB of host memory free, which a small machine does not have.
    with host_memory_budget_scope(1 << 32):
        yield


@dataclass(slots=True)
class Rig:
    """One engine under the hooks. ``gpu`` is the machine it thinks it has."""

    name: str
    gpu: FakeGpu = field(default_factory=lambda: FakeGpu((), ()))
    metrics: TierMetrics = field(default_factory=lambda: TierMetrics("test"))

    def engine(self) -> CopyEngine:
        makers: dict[str, Callable[[], CopyEngine]] = {
            "reference": ReferenceEngine,
            "batched_dma": self.gpu.engine,
            "triton": lambda: InterpretedTritonEngine(programs=3),
        }
        return makers[self.name]()

    def install(self) -> None:
        """Let this engine serve the hooks."""
        engine = self.engine()
        sglang_hooks.use(Selector({engine.name: lambda: engine}, engine=engine.name, metrics=self.metrics))

    def attach(self, pool: Any, *, borders: tuple[int, ...] = ()) -> Any:
        """Make ``pool`` look registered, in several calls if there are ``borders`` (bytes); the pool."""
        start, size = pool.kv_buffer.data_ptr(), pool.kv_buffer.numel() * pool.kv_buffer.element_size()
        cuts = [0, *borders, size]
        ranges = [(start + begin, end - begin) for begin, end in itertools.pairwise(cuts)]
        setattr(pool.kv_buffer, REGISTERED, ranges)
        pool.pin_memory = True
        self.gpu.registrations = ranges
        self.gpu.allocations = [(tensor.data_ptr(), tensor.numel()) for tensor in pools.device_storages(pool)]
        return pool


ENGINES = ("reference", "batched_dma", "triton")


@pytest.fixture
def own_selector() -> Iterator[None]:
    """Whatever a test does to the hooks' selection ends with it."""
    yield
    sglang_hooks.use(None)


@pytest.fixture(params=ENGINES)
def rig(request: pytest.FixtureRequest, sglang: None, own_selector: None) -> Rig:
    """Each engine under the hooks, in turn."""
    rig = Rig(request.param)
    rig.install()
    return rig

"""Layer-wise loads and write-backs without SGLang, on the CPU's streams that do nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hicache_ext.errors import CopyError
from hicache_ext.kernels.engine import CopyEngine, Direction, Operation, ReferenceEngine, Submit
from hicache_ext.kernels.geometry import page_tokens
from hicache_ext.kernels.selection import Selector
from hicache_ext.runtime.metrics import TierMetrics
from tests.kernels.stacks import PlainMemory, plain_memory
from tests.rigs.fake_cuda import FakeGpu
from tests.rigs.interpreted_triton import InterpretedTritonEngine
from tests.rigs.layerwise import LayerwiseLoader

PAGES = [6, 0, 1]
SLOTS = [2, 4, 5]


def selector(engine: CopyEngine, metrics: TierMetrics | None = None) -> Selector:
    return Selector(
        {engine.name: lambda: engine},
        engine=engine.name,
        metrics=metrics or TierMetrics("test"),
    )


def host_page(memory: PlainMemory, layer: int, page: int) -> torch.Tensor:
    """Bytes of one page of one layer of a page_first_direct host buffer."""
    size = memory.stack.shape.page_size * memory.stack.shape.row_bytes
    return memory.host.view(-1, len(memory.device), size)[page, layer]


def device_page(memory: PlainMemory, layer: int, page: int) -> torch.Tensor:
    size = memory.stack.shape.page_size
    return memory.device[layer][page * size : (page + 1) * size].flatten()


ENGINES: dict[str, Callable[[FakeGpu], CopyEngine]] = {
    "reference": lambda _: ReferenceEngine(),
    "batched_dma": FakeGpu.engine,
    "triton": lambda _: InterpretedTritonEngine(),
}


@pytest.mark.parametrize("engine", ENGINES)
def test_every_layer_of_a_load_arrives_and_a_write_back_returns_it(engine: str) -> None:
    memory = plain_memory()
    gpu = memory.gpu()
    loader = LayerwiseLoader(memory.stack, selector(ENGINES[engine](gpu)), ReferenceEngine())
    size = memory.stack.shape.page_size
    load = loader.load(page_tokens(PAGES, size), page_tokens(SLOTS, size))
    gpu.synchronize()
    for layer in range(len(memory.device)):
        load.wait(layer)
        assert load.is_done(layer)
        for page, slot in zip(PAGES, SLOTS, strict=True):
            assert torch.equal(device_page(memory, layer, slot), host_page(memory, layer, page))
    load.synchronize()

    done = loader.back_up(page_tokens([7, 3], size), page_tokens([4, 1], size))
    gpu.synchronize()
    done.synchronize()
    for layer in range(len(memory.device)):
        for page, slot in ((7, 4), (3, 1)):
            assert torch.equal(host_page(memory, layer, page), device_page(memory, layer, slot))


def test_layers_are_submitted_one_by_one_in_order() -> None:
    submitted: list[tuple[int, int]] = []

    class Recording(ReferenceEngine):
        name = "recording"

        def begin(self, operation: Operation) -> Submit:
            return lambda first, last: submitted.append((first, last))

    memory = plain_memory()
    LayerwiseLoader(memory.stack, selector(Recording()), ReferenceEngine()).load(
        page_tokens([1], 4), page_tokens([2], 4)
    )
    assert submitted == [(0, 1), (1, 2), (2, 3), (3, 4)]


def test_a_failing_engine_is_followed_by_the_fallback_in_the_middle_of_a_load() -> None:
    memory = plain_memory()
    gpu = memory.gpu()
    metrics = TierMetrics("test")
    engine = gpu.engine()
    loader = LayerwiseLoader(memory.stack, selector(engine, metrics), ReferenceEngine())
    gpu.fail_next = 1
    loader.load(page_tokens(PAGES, 4), page_tokens(SLOTS, 4))
    gpu.synchronize()
    for layer in range(len(memory.device)):
        assert torch.equal(device_page(memory, layer, SLOTS[0]), host_page(memory, layer, PAGES[0]))
    assert metrics.snapshot() == {("load", "batched_dma: configured"): 1, ("load", "sglang: failed"): 1}


def test_a_loader_without_any_engine_says_so() -> None:
    memory = plain_memory()
    loader = LayerwiseLoader(memory.stack, Selector({}, engine="triton"))
    with pytest.raises(CopyError, match="no engine"):
        loader.load(page_tokens(PAGES, 4), page_tokens(SLOTS, 4))


def test_unequal_numbers_of_tokens_are_refused() -> None:
    memory = plain_memory()
    with pytest.raises(ValueError, match="2 host tokens, but 3 device tokens"):
        Operation(memory.stack, Direction.LOAD, torch.arange(2), torch.arange(3))

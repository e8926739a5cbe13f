"""The DMA engine's conversation with the driver."""

from __future__ import annotations

import itertools

import pytest
import torch

from hicache_ext.errors import CopyError
from hicache_ext.kernels.batched_dma import open_driver
from hicache_ext.kernels.engine import Direction, Operation
from hicache_ext.kernels.geometry import page_tokens
from tests.kernels.stacks import PlainMemory, plain_memory
from tests.rigs.fake_cuda import FakeGpu
from tests.rigs.layerwise import copy_now


def load_of(memory: PlainMemory, pages: tuple[list[int], list[int]] = ([5, 1, 2], [0, 6, 7])) -> Operation:
    size = memory.stack.shape.page_size
    return Operation(memory.stack, Direction.LOAD, page_tokens(pages[0], size), page_tokens(pages[1], size))


def test_one_call_per_layer_and_one_copy_per_run() -> None:
    memory = plain_memory(layout="layer_first")
    gpu = memory.gpu()
    copy_now(gpu.engine(), load_of(memory), layers=range(4))
    assert gpu.calls == [2, 2, 2, 2]  # page 5, and pages 1 and 2 together


def test_a_write_back_is_one_call_for_all_layers() -> None:
    memory = plain_memory()
    gpu = memory.gpu()
    load = load_of(memory)
    back_up = Operation(memory.stack, Direction.BACK_UP, load.host_indices, load.device_indices)
    copy_now(gpu.engine(), back_up)
    assert gpu.calls == [12]


def test_arrays_of_one_layer_may_be_rewritten_for_the_next() -> None:
    # The copies run when the stream gets there, long after the arrays hold the addresses of another layer.
    memory = plain_memory()
    gpu = memory.gpu()
    before = [buffer.clone() for buffer in memory.device]
    copy_now(gpu.engine(), load_of(memory), layers=range(4))
    assert all(torch.equal(*pair) for pair in zip(memory.device, before, strict=True))
    gpu.synchronize()
    assert not any(torch.equal(*pair) for pair in zip(memory.device, before, strict=True))


def test_an_error_of_the_driver_is_an_error_with_its_number() -> None:
    memory = plain_memory()
    gpu = memory.gpu()
    gpu.fail_next = 1
    with pytest.raises(CopyError, match="error 400"):
        copy_now(gpu.engine(), load_of(memory))


def test_indices_on_the_device_are_refused_since_fetching_them_would_wait_for_the_forward_pass() -> None:
    memory = plain_memory()
    load = load_of(memory)
    on_device = Operation(memory.stack, Direction.LOAD, load.host_indices, load.device_indices.to("meta"))
    assert memory.gpu().engine().refusal(on_device) == "indices_on_device"


# The fake driver itself: what it is for is refusing what the real one refuses.


@pytest.mark.parametrize(
    ("stream", "capturing", "reason"),
    [(0, False, "default stream"), (1, False, "default stream"), (7, True, "capture")],
)
def test_the_fake_driver_refuses_default_streams_and_capture(stream: int, capturing: bool, reason: str) -> None:
    memory = plain_memory()
    gpu = memory.gpu()
    engine = gpu.engine()
    gpu.current_stream, gpu.capturing = stream, capturing
    with pytest.raises(CopyError):
        engine.begin(load_of(memory))(0, 1)
    assert gpu.refusals == [reason]


def test_the_fake_driver_refuses_bad_attributes_and_copies_across_registrations() -> None:
    memory = plain_memory()
    (start, size), *_ = memory.stack.registrations
    gpu = FakeGpu([(start, 100), (start + 100, size - 100)], memory.gpu().allocations)
    engine = gpu.engine()
    with pytest.raises(CopyError):
        # The stack believes in one registration, so the engine does not split.
        copy_now(engine, load_of(memory, ([0], [0])), layers=[0])
    engine._attributes.source_access_order = 0
    with pytest.raises(CopyError):
        copy_now(engine, load_of(memory, ([5], [0])), layers=[0])
    assert gpu.refusals == ["from across the end of host memory to device", "attributes"]


def test_copies_of_a_batch_run_in_an_order_that_the_seed_decides() -> None:
    results = []
    for seed in (0, 1):
        memory = plain_memory()
        gpu = memory.gpu()
        gpu.seed = seed
        copy_now(gpu.engine(), load_of(memory, (list(range(8))[::2], [1, 3, 5, 7])))
        (batch,) = gpu._pending
        gpu.synchronize()
        results.append([destination - batch[0][0] for destination, *_ in batch])
    assert all(first != second for first, second in itertools.pairwise(results))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver here")
def test_without_a_driver_opening_says_so() -> None:
    with pytest.raises(CopyError, match=r"libcuda\.so\.1"):
        open_driver()

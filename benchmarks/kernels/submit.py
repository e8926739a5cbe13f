"""What a copy costs the scheduler's thread before the forward pass: planning it and submitting its layers.

Runs anywhere: the driver is replaced by a C function that does nothing, so that what is measured is everything but the
driver's own time. No memory is moved, and none of the size is needed.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hicache_ext.kernels.batched_dma import BATCH_TYPES, BatchedDmaEngine
from hicache_ext.kernels.engine import CopyEngine, Direction, Operation
from hicache_ext.kernels.geometry import LayerCopy, LayerStack, Rows, Strides, page_tokens

LAYOUTS = ("page_first_direct", "layer_first", "page_first")


@dataclass(frozen=True, slots=True)
class SubmitCase:
    """One operation: ``pages`` scattered pages of an MHA model's layers."""

    layout: str
    layers: int = 32
    pages: int = 512
    page_size: int = 16
    row_bytes: int = 2048


@dataclass(frozen=True, slots=True)
class SubmitCost:
    """Microseconds of one operation, medians."""

    engine: str
    case: SubmitCase
    descriptors: int
    plan_us: float
    layers_us: float
    """All layers of a load, one submission each."""
    write_back_us: float
    """Plan and submission of a write-back of all layers."""

    @property
    def load_us(self) -> float:
        return self.plan_us + self.layers_us


class IdleEngine(BatchedDmaEngine):
    """Over a driver that is called through ctypes as the real one is, and answers success without doing anything."""

    def __init__(self) -> None:
        super().__init__(_idle())
        self.descriptors = 0

    def current_stream(self, device: torch.device) -> int:
        return 2

    def is_capturing(self) -> bool:
        return False

    def copy_batch(self, destinations: int, sources: int, sizes: int, count: int, stream: int) -> None:
        self.descriptors += count
        super().copy_batch(destinations, sources, sizes, count, stream)


def _idle() -> Callable[..., int]:
    """``pthread_equal``: compares its first two arguments, which differ, and answers 0."""
    function = ctypes.CFUNCTYPE(ctypes.c_int, *BATCH_TYPES)
    address = ctypes.cast(ctypes.CDLL(None).pthread_equal, ctypes.c_void_p).value
    assert address is not None
    return function(address)


def imaginary_stack(case: SubmitCase, *, components: int = 2) -> LayerStack:
    """The addresses of a pool of twice the pages of ``case``, without its memory."""
    row, pool_tokens = case.row_bytes, 2 * case.pages * case.page_size
    component_bytes = case.layers * pool_tokens * row
    host_start, device_start = 1 << 40, 1 << 44
    page = case.page_size * row
    offset, token_stride, page_stride = {
        "layer_first": (pool_tokens * row, row, page),
        "page_first": (row, case.layers * row, case.layers * page),
        "page_first_direct": (page, row, case.layers * page),
    }[case.layout]
    nothing = torch.empty(0).untyped_storage()
    layers: list[list[LayerCopy]] = []
    for layer in range(case.layers):
        layers.append([])
        for component in range(components):
            host = host_start + component * component_bytes + layer * offset
            device = device_start + (layer * components + component) * pool_tokens * row
            layers[-1].append(
                (
                    Rows(nothing, host, pool_tokens, Strides(page_stride, token_stride, row)),
                    Rows(nothing, device, pool_tokens, Strides(page, row, row)),
                )
            )
    return LayerStack(
        layers,
        page_size=case.page_size,
        segments=1,
        segment_bytes=row,
        layout=case.layout,
        registrations=[(host_start, component_bytes * components + page_stride)],
    )


def scattered_tokens(case: SubmitCase, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of pages that are nowhere neighbours, in random order on the device side."""
    random = np.random.default_rng(seed)
    host = 2 * np.arange(case.pages)
    device = 2 * random.permutation(case.pages)
    return page_tokens(torch.from_numpy(host), case.page_size), page_tokens(torch.from_numpy(device), case.page_size)


def measure(case: SubmitCase, rounds: int) -> list[SubmitCost]:
    """The engine that submits from the CPU, and the same without vectors."""
    stack = imaginary_stack(case)
    tokens = scattered_tokens(case)
    engine = IdleEngine()
    plans, layers = zip(*[_load(engine, stack, tokens) for _ in range(rounds)], strict=True)
    descriptors = engine.descriptors // rounds
    write_backs = [_write_back(engine, stack, tokens) for _ in range(rounds)]
    cost = SubmitCost(engine.name, case, descriptors, _us(plans), _us(layers), _us(write_backs))
    return [cost, _naive(stack, tokens, case, max(1, rounds // 10))]


def _load(engine: CopyEngine, stack: LayerStack, tokens: tuple[torch.Tensor, torch.Tensor]) -> tuple[float, float]:
    started = time.perf_counter()
    operation = Operation(stack, Direction.LOAD, *tokens)
    assert engine.refusal(operation) is None
    submit = engine.begin(operation)
    planned = time.perf_counter()
    for first, last in stack.layers:
        submit(first, last)
    return planned - started, time.perf_counter() - planned


def _write_back(engine: CopyEngine, stack: LayerStack, tokens: tuple[torch.Tensor, torch.Tensor]) -> float:
    started = time.perf_counter()
    operation = Operation(stack, Direction.BACK_UP, *tokens)
    assert engine.refusal(operation) is None
    engine.begin(operation)(0, len(stack.copies))
    return time.perf_counter() - started


def _naive(stack: LayerStack, tokens: tuple[torch.Tensor, torch.Tensor], case: SubmitCase, rounds: int) -> SubmitCost:
    """A Python loop over the runs of every layer into ctypes arrays: what the plan and its vectors save."""
    engine = IdleEngine()
    host_pages, device_pages = (side[:: case.page_size].tolist() for side in tokens)
    touching = stack.shape.host.token == stack.shape.row_bytes
    rows, size = (1, stack.run_bytes) if touching else (case.page_size, stack.shape.row_bytes)
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        for first, last in stack.layers:
            host, device = [], []
            for at_host, at_device in stack.copies[first:last]:
                for host_page, device_page in zip(host_pages, device_pages, strict=True):
                    for slot in range(rows):
                        host.append(at_host.address(host_page + slot, 0, case.page_size))
                        device.append(at_device.address(device_page + slot, 0, case.page_size))
            array = ctypes.c_uint64 * len(host)
            sources, destinations, sizes = array(*host), array(*device), array(*[size] * len(host))
            engine.copy_batch(
                ctypes.addressof(destinations), ctypes.addressof(sources), ctypes.addressof(sizes), len(host), 2
            )
        times.append(time.perf_counter() - started)
    return SubmitCost("Python loop", case, engine.descriptors // rounds, 0.0, _us(times), float("nan"))


def _us(seconds: Sequence[float]) -> float:
    return statistics.median(seconds) * 1e6

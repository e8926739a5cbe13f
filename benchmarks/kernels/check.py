"""A reduced check that every engine moves the right bytes, on whatever this machine has.

Without a GPU the DMA engines talk to a stand-in of the driver and Triton is interpreted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec

import torch

from hicache_ext.errors import CommandError, CopyError
from hicache_ext.kernels.batched_dma import BatchedDmaEngine, open_driver
from hicache_ext.kernels.engine import CopyEngine, Direction, Operation, ReferenceEngine
from hicache_ext.kernels.geometry import HOST_LAYOUTS, LayerStack, device_rows, host_rows, page_tokens
from hicache_ext.kernels.triton_engine import TritonEngine
from tests.rigs.fake_cuda import FakeGpu
from tests.rigs.interpreted_triton import InterpretedTritonEngine
from tests.rigs.layerwise import copy_now


class CheckedMemory:
    """One component of a few layers, host and device, both full of noise."""

    def __init__(
        self, layout: str, device: str, *, layers: int = 3, pages: int = 8, page_size: int = 16, row: int = 512
    ) -> None:
        tokens, segments = pages * page_size, 4 if layout == "page_head" else 1
        pinned = device != "cpu"
        self.host = torch.empty(layers * tokens * row, dtype=torch.uint8, pin_memory=pinned)
        self.host.random_(0, 256)
        self.device = [torch.randint(0, 256, (tokens, row), dtype=torch.uint8, device=device) for _ in range(layers)]
        self.tokens = page_tokens([6, 1, 2], page_size), page_tokens([0, 5, 4], page_size)
        copies = [
            (
                host_rows(
                    self.host,
                    layout=layout,
                    layer=layer,
                    layer_num=layers,
                    page_size=page_size,
                    token_count=tokens,
                    segments=segments,
                    segment_bytes=row // segments,
                ),
                device_rows(buffer, page_size=page_size, row_stride=row, segment_bytes=row // segments),
            )
            for layer, buffer in enumerate(self.device)
        ]
        registrations = [(self.host.data_ptr(), self.host.numel())]
        self.stack = LayerStack(
            [[copy] for copy in copies],
            page_size=page_size,
            segments=segments,
            segment_bytes=row // segments,
            layout=layout,
            registrations=registrations,
        )

    def gpu(self) -> FakeGpu:
        return FakeGpu(self.stack.registrations, [(buffer.data_ptr(), buffer.numel()) for buffer in self.device])

    def after(self, engine: CopyEngine, direction: Direction, finish: Callable[[], None]) -> list[torch.Tensor] | None:
        """The bytes of the side that ``engine`` writes; the memory is as before afterwards. None if it refuses."""
        operation = Operation(self.stack, direction, *self.tokens)
        if engine.refusal(operation):
            return None
        written = self.device if direction is Direction.LOAD else [self.host]
        before = [tensor.clone() for tensor in written]
        copy_now(engine, operation, layers=range(len(self.device)))
        finish()
        result = [tensor.clone() for tensor in written]
        for tensor, content in zip(written, before, strict=True):
            tensor.copy_(content)
        return result


def check_engines() -> Iterator[tuple[str, int]]:
    """(engine, cases that were equal to the reference). Raises CommandError on the first wrong byte."""
    on_gpu = torch.cuda.is_available()
    counts: dict[str, int] = {}
    for layout in HOST_LAYOUTS:
        memory = CheckedMemory(layout, "cuda" if on_gpu else "cpu")
        for direction in Direction:
            expected = memory.after(ReferenceEngine(), direction, _synchronize)
            assert expected is not None
            for name, engine, finish in _engines(memory, on_gpu):
                counts.setdefault(name, 0)
                with _own_stream(on_gpu):
                    found = memory.after(engine, direction, finish)
                if found is None:
                    continue
                if not all(torch.equal(*pair) for pair in zip(found, expected, strict=True)):
                    raise CommandError(f"{name} moved wrong bytes: {direction}, {layout}")
                counts[name] += 1
    yield from counts.items()


def _engines(memory: CheckedMemory, on_gpu: bool) -> Iterator[tuple[str, CopyEngine, Callable[[], None]]]:
    if on_gpu:
        try:
            engine = BatchedDmaEngine(open_driver())
        except CopyError:
            pass
        else:
            yield engine.name, engine, _synchronize
        if find_spec("triton"):
            yield TritonEngine.name, TritonEngine(), _synchronize
        return
    gpu = memory.gpu()
    yield "batched_dma (driver stand-in)", gpu.engine(), gpu.synchronize
    if find_spec("triton"):
        yield "triton (interpreted)", InterpretedTritonEngine(), _synchronize


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _own_stream(on_gpu: bool) -> torch.cuda.StreamContext:
    """A context with a stream of its own on a GPU: batches are refused in the default stream."""
    return torch.cuda.stream(torch.cuda.Stream() if on_gpu else None)  # type: ignore[no-untyped-call]

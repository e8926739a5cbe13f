"""A stand-in for the CUDA driver's batch copies, for machines without a GPU.

It is called through ctypes as the real one is, with the same argument list and struct, works on raw memory, and keeps
the real one's rules: it refuses the default stream, graph capture, bad attributes, and copies that lie in two host
registrations or outside of known device memory. Copies of a batch run in random order, and only when the stream is
synchronised, batch after batch; the arrays of a call are read during the call only.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from hicache_ext.kernels.batched_dma import BATCH_TYPES, Attributes, BatchedDmaEngine

SUCCESS = 0
INVALID_VALUE = 1
INVALID_HANDLE = 400
STREAM_CAPTURE_UNSUPPORTED = 900

_LARGEST_COUNT = 1 << 24


@dataclass(slots=True)
class FakeGpu:
    """Memory that is known to be registered (host) or allocated (device), and the streams with what they have to do."""

    registrations: Sequence[tuple[int, int]]
    """(address, bytes) of page-locked host memory."""
    allocations: Sequence[tuple[int, int]]
    """(address, bytes) of device memory."""
    seed: int = 0
    capturing: bool = False
    current_stream: int = 0x5EED
    calls: list[int] = field(default_factory=list)
    """Copies of each accepted call."""
    refusals: list[str] = field(default_factory=list)
    fail_next: int = 0
    """Calls to fail from now on, whatever is asked."""
    _pending: list[list[tuple[int, int, int]]] = field(default_factory=list)

    def synchronize(self) -> None:
        """Run everything that was submitted: batches in order, the copies of each in any order."""
        order = random.Random(self.seed)
        for batch in self._pending:
            order.shuffle(batch)
            for destination, source, size in batch:
                ctypes.memmove(destination, source, size)
        self._pending.clear()

    def engine(self) -> BatchedDmaEngine:
        """The engine over this memory."""
        return FakedEngine(self)

    def refuse(self, code: int, reason: str) -> int:
        self.refusals.append(reason)
        return code

    def accept(self, copies: list[tuple[int, int, int]], operations: int) -> int:
        """Check (destination, source, bytes) of every copy, then queue them."""
        for destination, source, size in copies:
            if size <= 0:
                return self.refuse(INVALID_VALUE, "empty copy")
            sides = [self._side(destination, size), self._side(source, size)]
            if sorted(sides) != ["device", "host"]:
                return self.refuse(INVALID_VALUE, f"from {sides[1]} to {sides[0]}")
        self.calls.append(operations)
        self._pending.append(copies)
        return SUCCESS

    def _side(self, address: int, size: int) -> str:
        for name, spans in (("host", self.registrations), ("device", self.allocations)):
            for start, length in spans:
                if start <= address < start + length:
                    return name if address + size <= start + length else f"across the end of {name} memory"
        return "unknown memory"

    def check_stream(self, stream: int | None) -> int:
        if self.fail_next:
            self.fail_next -= 1
            return self.refuse(INVALID_HANDLE, "told to fail")
        if stream in (None, 0, 1):
            return self.refuse(INVALID_VALUE, "default stream")
        if self.capturing:
            return self.refuse(STREAM_CAPTURE_UNSUPPORTED, "capture")
        return SUCCESS


class FakedEngine(BatchedDmaEngine):
    """The real engine over a function of a :class:`FakeGpu`: what is tested is the real marshalling."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        super().__init__(ctypes.CFUNCTYPE(ctypes.c_int, *BATCH_TYPES)(self._copy_batch))

    def current_stream(self, device: torch.device) -> int:
        return self.gpu.current_stream

    def is_capturing(self) -> bool:
        return self.gpu.capturing

    def _copy_batch(self, *arguments: int) -> int:
        destinations, sources, sizes, count, attributes, first_copies, attribute_count, failed, stream = arguments
        if code := self.gpu.check_stream(stream):
            return code
        if not 0 < count < _LARGEST_COUNT or not 0 < attribute_count <= count:
            return self.gpu.refuse(INVALID_VALUE, "counts")
        if not failed:
            return self.gpu.refuse(INVALID_VALUE, "no failIdx")
        used = Attributes.from_address(attributes)
        if used.source_access_order not in (1, 2, 3) or used.flags not in (0, 1):
            return self.gpu.refuse(INVALID_VALUE, "attributes")
        if ctypes.c_size_t.from_address(first_copies).value != 0:
            return self.gpu.refuse(INVALID_VALUE, "first attribute")
        # Arrays that nobody holds any more are gone by now, and their memory is somebody else's.
        _reuse_freed_memory(count)
        arrays = [(ctypes.c_uint64 * count).from_address(address) for address in (destinations, sources, sizes)]
        return self.gpu.accept(list(zip(*(list(array) for array in arrays), strict=True)), count)


def _reuse_freed_memory(count: int) -> None:
    """Allocate and scribble over blocks of the size of the arrays of a call of ``count`` copies."""
    for _ in range(4):
        torch.full((count * 8,), 0xA5, dtype=torch.uint8)

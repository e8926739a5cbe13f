"""A stand-in for the CUDA driver's batch copies, for machines without a GPU.

It is called through ctypes as the real one is, with the same argument lists and structs, works on raw memory, and keeps
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

from hicache_ext.kernels.cuda_driver import (
    BATCH_TYPES,
    RECTANGLE_TYPES,
    Attributes,
    CudaDriver,
    Form,
    PointerOperand,
    Rectangle,
)

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

    def driver(self, form: Form) -> FakeDriver:
        """A driver whose functions have the argument lists of ``form``."""
        return FakeDriver(self, form)

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


class FakeDriver(CudaDriver):
    """The real driver class over functions of a :class:`FakeGpu`: what is tested is the real marshalling."""

    def __init__(self, gpu: FakeGpu, form: Form) -> None:
        self.gpu = gpu
        # ctypes functions must live as long as they can be called.
        self._callbacks = (
            ctypes.CFUNCTYPE(ctypes.c_int, *BATCH_TYPES[form])(self._copy_batch),
            ctypes.CFUNCTYPE(ctypes.c_int, *RECTANGLE_TYPES[form])(self._copy_rectangles),
        )
        super().__init__(self._callbacks[0], form, rectangles=self._callbacks[1])

    def current_stream(self, device: torch.device) -> int:
        return self.gpu.current_stream

    def is_capturing(self) -> bool:
        return self.gpu.capturing

    def _copy_batch(self, *arguments: int) -> int:
        destinations, sources, sizes, count, attributes, first_copies, attribute_count, *rest = arguments
        stream = rest[-1]
        if code := self.gpu.check_stream(stream):
            return code
        if not 0 < count < _LARGEST_COUNT or not 0 < attribute_count <= count:
            return self.gpu.refuse(INVALID_VALUE, "counts")
        if self.form is Form.WITH_FAIL_INDEX and not rest[0]:
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

    def _copy_rectangles(self, count: int, rectangles: int, *rest: int) -> int:
        if code := self.gpu.check_stream(rest[-1]):
            return code
        flags = rest[-2]
        if not 0 < count < _LARGEST_COUNT or flags:
            return self.gpu.refuse(INVALID_VALUE, "counts or flags")
        _reuse_freed_memory(count)
        copies: list[tuple[int, int, int]] = []
        for rectangle in (Rectangle * count).from_address(rectangles):
            if rectangle.source_access_order not in (1, 2, 3) or rectangle.flags not in (0, 1):
                return self.gpu.refuse(INVALID_VALUE, "attributes")
            if rectangle.depth != 1 or not rectangle.width or not rectangle.height:
                return self.gpu.refuse(INVALID_VALUE, "extent")
            for operand in (rectangle.source, rectangle.destination):
                if not _is_plausible(operand, rectangle):
                    return self.gpu.refuse(INVALID_VALUE, "operand")
            copies += [
                (
                    rectangle.destination.address + row * rectangle.destination.row_length,
                    rectangle.source.address + row * rectangle.source.row_length,
                    rectangle.width,
                )
                for row in range(rectangle.height)
            ]
        return self.gpu.accept(copies, count)


def _is_plausible(operand: PointerOperand, rectangle: Rectangle) -> bool:
    return bool(
        operand.type == 1 and operand.row_length >= rectangle.width and operand.layer_height >= rectangle.height
    )


def _reuse_freed_memory(count: int) -> None:
    """Allocate and scribble over blocks of the size of the arrays of a call of ``count`` copies."""
    for size in (count * 8, count * ctypes.sizeof(Rectangle)):
        for _ in range(4):
            torch.full((size,), 0xA5, dtype=torch.uint8)

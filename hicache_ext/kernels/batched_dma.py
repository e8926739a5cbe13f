"""Copies by the GPU's copy engines: one driver call per layer, no multiprocessor used.

``batched_dma`` submits every run of the plan as one copy. ``rectangle_dma`` submits evenly spaced rows as rectangles,
for hosts whose rows do not touch (``page_first``): a stretch of pages is one descriptor instead of one for each row.

Both plan on the CPU and so want indices that are there already (SGLang's ``direct`` backend): fetching them from the
device would make the scheduler wait for the forward pass that the stream waits for.
"""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from hicache_ext.kernels.cuda_driver import CudaDriver, Rectangle, fill_rectangle_constants
from hicache_ext.kernels.engine import Direction, Operation
from hicache_ext.kernels.plan import CopyPlan, StridedPlan, crosses, make_strided_plan, split_at_borders

_Addresses = NDArray[np.int64]

_RECTANGLE_DTYPE = np.dtype(Rectangle)
_LARGEST_PITCH = 2**31 - 1
"""CU_DEVICE_ATTRIBUTE_MAX_PITCH of every device so far."""


def _refusal(driver: CudaDriver, operation: Operation) -> str | None:
    if not operation.indices_on_cpu:
        return "indices_on_device"
    if not operation.stack.is_registered:
        return "unpinned"
    return driver.stream_refusal(operation.stack.device)


class BatchedDmaEngine:
    """``cuMemcpyBatchAsync``. No copy spans two host registrations."""

    name = "batched_dma"

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver

    def refusal(self, operation: Operation) -> str | None:
        return _refusal(self._driver, operation)

    def begin(self, operation: Operation) -> _BatchedTransfer:
        return _BatchedTransfer(self._driver, operation)


class _BatchedTransfer:
    """Two arrays of addresses, rewritten for each submission, and one of sizes, which stay."""

    def __init__(self, driver: CudaDriver, operation: Operation) -> None:
        self._driver = driver
        self._operation = operation
        self._plan: CopyPlan = operation.plan
        self._copies = 0
        self._reserve(max((last - first for first, last in operation.stack.layers), default=0))

    def _reserve(self, copies: int) -> None:
        """Arrays for ``copies`` copies of a stack at once; those of fewer are their beginnings."""
        if copies <= self._copies:
            return
        self._copies = copies
        self._host = np.empty((copies, len(self._plan)), dtype=np.int64)
        self._device = np.empty_like(self._host)
        self._sizes = np.tile(self._plan.sizes, copies)
        # Looking an array's address up costs more than adding to it.
        self._addresses = self._host.ctypes.data, self._device.ctypes.data, self._sizes.ctypes.data

    def submit(self, first: int, last: int) -> None:
        plan, stack = self._plan, self._operation.stack
        if len(plan) == 0 or first == last:
            return
        copies = last - first
        self._reserve(copies)
        host, device = self._host[:copies], self._device[:copies]
        np.add(stack.host_bases[first:last, None], plan.host, out=host)
        np.add(stack.device_bases[first:last, None], plan.device, out=device)
        stream = self._driver.current_stream(stack.device)
        page_stride = stack.shape.host.page
        if len(stack.registrations) > 1 and any(
            crosses(plan, page_stride, int(base), stack.registrations) for base in stack.host_bases[first:last]
        ):
            split = split_at_borders(host.ravel(), device.ravel(), self._sizes[: host.size], stack.registrations)
            self._call(*(np.ascontiguousarray(array) for array in split), stream=stream)
            return
        host_at, device_at, sizes_at = self._addresses
        source, target = (host_at, device_at) if self._is_load else (device_at, host_at)
        self._driver.copy_batch(target, source, sizes_at, host.size, stream)

    def _call(self, host: _Addresses, device: _Addresses, sizes: _Addresses, *, stream: int) -> None:
        source, target = (host, device) if self._is_load else (device, host)
        self._driver.copy_batch(target.ctypes.data, source.ctypes.data, sizes.ctypes.data, len(sizes), stream)

    @property
    def _is_load(self) -> bool:
        return self._operation.direction is Direction.LOAD


class RectangleDmaEngine:
    """``cuMemcpy3DBatchAsync``. Refuses pools in several registrations: a rectangle would have to be cut at borders."""

    name = "rectangle_dma"

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver

    def refusal(self, operation: Operation) -> str | None:
        shape, stack = operation.stack.shape, operation.stack
        if not self._driver.has_rectangles:
            return "no_3d_batches"
        if shape.segments > 1 and not shape.host.segment == shape.device.segment == shape.segment_bytes:
            return "segments"
        if max(shape.host.token, shape.device.token) > _LARGEST_PITCH:
            return "pitch"
        if len(stack.registrations) > 1:
            return "several_registrations"
        return _refusal(self._driver, operation)

    def begin(self, operation: Operation) -> _RectangleTransfer:
        return _RectangleTransfer(self._driver, operation)


class _RectangleTransfer:
    def __init__(self, driver: CudaDriver, operation: Operation) -> None:
        plan = make_strided_plan(operation.stack.shape, *operation.cpu_indices)
        if plan is None:
            raise ValueError("rows of several segments have no rectangles; ask refusal() first")
        self._driver = driver
        self._operation = operation
        self._plan: StridedPlan = plan
        self._array = np.zeros((0, len(plan)), dtype=_RECTANGLE_DTYPE)

    def _reserve(self, copies: int) -> None:
        if copies <= len(self._array):
            return
        plan = self._plan
        array = np.zeros((copies, len(plan)), dtype=_RECTANGLE_DTYPE)
        fill_rectangle_constants(array, self._driver)
        array["width"], array["height"] = plan.row_bytes, plan.rows
        for side, pitch in ((self._host_side, plan.host_pitch), (self._device_side, plan.device_pitch)):
            array[side]["row_length"], array[side]["layer_height"] = pitch, plan.rows
        self._array = array

    def submit(self, first: int, last: int) -> None:
        plan, stack = self._plan, self._operation.stack
        if len(plan) == 0 or first == last:
            return
        self._reserve(last - first)
        array = self._array[: last - first]
        array[self._host_side]["address"] = stack.host_bases[first:last, None] + plan.host
        array[self._device_side]["address"] = stack.device_bases[first:last, None] + plan.device
        stream = self._driver.current_stream(stack.device)
        self._driver.copy_rectangles(array.ctypes.data, array.size, stream)

    @property
    def _host_side(self) -> str:
        return "source" if self._operation.direction is Direction.LOAD else "destination"

    @property
    def _device_side(self) -> str:
        return "destination" if self._operation.direction is Direction.LOAD else "source"


assert ctypes.sizeof(Rectangle) == _RECTANGLE_DTYPE.itemsize

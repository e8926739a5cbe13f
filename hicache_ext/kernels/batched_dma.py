"""Copies by the GPU's copy engines: one driver call per layer, without using any multiprocessor.

One call of ``cuMemcpyBatchAsync`` submits any number of copies. It is called through ctypes, without a compiled
extension or a toolkit. It has two argument lists, and a wrong guess crashes: the version passed to
``cuGetProcAddress`` decides, whatever the toolkit or torch were built with. For 12.8, every driver since then returns
the one with ``failIdx``. tests/kernels/test_cuda_structs.py compiles the struct against ``cuda.h``.

Copies are planned on the CPU, so the indices must be there already (SGLang's ``direct`` backend): fetching them
from the device would make the scheduler wait for the forward pass that the stream waits for.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import torch

from hicache_ext.errors import CopyError
from hicache_ext.kernels.engine import Direction, Operation, Submit
from hicache_ext.kernels.geometry import CopyPlan, split_at_borders

# -- the driver --------------------------------------------------------------------------------------------------------

_VERSION = 12080
_SOURCE_IN_STREAM_ORDER = 1
_PREFER_OVERLAP_WITH_COMPUTE = 1
_LEGACY_STREAMS = (0, 1)
"""Handles of the legacy default stream, in which the driver refuses batches: NULL and CU_STREAM_LEGACY."""


class Attributes(ctypes.Structure):
    """CUmemcpyAttributes, 24 bytes; a location is a type and an id."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_location", ctypes.c_int * 2),
        ("destination_location", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t
BATCH_TYPES = (_POINTER, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER)
"""Destinations, sources, sizes, count; attributes, indices of their first copies, count; failIdx, stream."""


def open_driver() -> Callable[..., int]:
    """Return the driver's function that copies batches, with arguments of ``BATCH_TYPES``.

    Raises :class:`CopyError` if there is no driver, or only one older than 12.8.
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise CopyError("no CUDA driver: libcuda.so.1 cannot be loaded") from None
    address = ctypes.c_void_p()
    try:
        get_address = library.cuGetProcAddress_v2
        get_address.argtypes = (ctypes.c_char_p, _POINTER, ctypes.c_int, ctypes.c_uint64, _POINTER)
        code = get_address(b"cuMemcpyBatchAsync", ctypes.byref(address), _VERSION, 0, None)
    except AttributeError:
        code = -1
    if code or not address.value:
        raise CopyError("the CUDA driver has no cuMemcpyBatchAsync (12.8 or newer is needed)")
    return ctypes.CFUNCTYPE(ctypes.c_int, *BATCH_TYPES)(address.value)


# -- the engine --------------------------------------------------------------------------------------------------------


class BatchedDmaEngine:
    """Submits each run of the plan as one copy, to the current device. No copy spans two host registrations."""

    name = "batched_dma"

    def __init__(self, batch: Callable[..., int]) -> None:
        """``batch`` is the function from ``open_driver``. Its attributes request copies that overlap with compute."""
        self._batch = batch
        # These arguments live as long as the engine, so that no call can outlive them.
        self._attributes = Attributes(source_access_order=_SOURCE_IN_STREAM_ORDER, flags=_PREFER_OVERLAP_WITH_COMPUTE)
        self._first_copy = ctypes.c_size_t(0)
        self._failed = ctypes.c_size_t(0)
        self._attributes_at = ctypes.addressof(self._attributes)
        self._first_copy_at = ctypes.addressof(self._first_copy)
        self._failed_at = ctypes.addressof(self._failed)

    def refusal(self, operation: Operation) -> str | None:
        if not operation.indices_on_cpu:
            return "indices_on_device"
        if not operation.stack.is_registered:
            return "unpinned"
        if self.current_stream(operation.stack.device) in _LEGACY_STREAMS:
            return "default_stream"
        return "graph_capture" if self.is_capturing() else None

    def begin(self, operation: Operation) -> Submit:
        return _BatchedTransfer(self, operation).submit

    def current_stream(self, device: torch.device) -> int:
        """Return the handle of torch's current stream."""
        handle: int = torch.cuda.current_stream(device).cuda_stream
        return handle

    def is_capturing(self) -> bool:
        """Return whether the current stream is being captured into a graph."""
        return torch.cuda.is_current_stream_capturing()

    def copy_batch(self, destinations: int, sources: int, sizes: int, count: int, stream: int) -> None:
        """Submit ``count`` mutually unordered copies, given the addresses of three arrays of 64-bit integers.

        The arrays may change once the call has returned. Raises :class:`CopyError`.
        """
        attributes = (self._attributes_at, self._first_copy_at, 1)
        code = self._batch(destinations, sources, sizes, count, *attributes, self._failed_at, stream)
        if code:
            copy = f"copy {self._failed.value} of {count}"
            raise CopyError(f"the driver refused a batch of copies with error {code} at {copy}")


class _BatchedTransfer:
    """Two arrays of addresses, rewritten for each submission, and a constant array of sizes."""

    def __init__(self, engine: BatchedDmaEngine, operation: Operation) -> None:
        self._engine = engine
        self._operation = operation
        self._plan: CopyPlan = operation.plan
        self._copies = 0
        self._reserve(max((last - first for first, last in operation.stack.layers), default=0))

    def _reserve(self, copies: int) -> None:
        """Allocate arrays for ``copies`` copies of a stack; fewer copies use the arrays' beginnings."""
        if copies <= self._copies:
            return
        self._copies = copies
        self._host = np.empty((copies, len(self._plan)), dtype=np.int64)
        self._device = np.empty_like(self._host)
        self._sizes = np.tile(self._plan.sizes, copies)
        # Cache the addresses: looking up an array's address costs more than adding to the array.
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
        host_at, device_at, sizes_at = self._addresses
        count = host.size
        if len(stack.registrations) > 1:
            split = split_at_borders(host.ravel(), device.ravel(), self._sizes[:count], stack.registrations)
            if len(split[0]) != count:
                # ``split`` is held until the call has returned.
                host_at, device_at, sizes_at = (array.ctypes.data for array in split)
                count = len(split[0])
        is_load = self._operation.direction is Direction.LOAD
        source, target = (host_at, device_at) if is_load else (device_at, host_at)
        self._engine.copy_batch(target, source, sizes_at, count, self._engine.current_stream(stack.device))

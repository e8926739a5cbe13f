"""The batch copies of the CUDA driver, called through ctypes: no compiled extension, no toolkit.

``cuMemcpyBatchAsync`` and ``cuMemcpy3DBatchAsync`` (CUDA 12.8) take one call for any number of copies, which the copy
engines of the GPU carry out without its multiprocessors. Two forms are in use, and a wrong guess is a crash:

===========================  =========  ==========================================================
form                         arguments  where from
===========================  =========  ==========================================================
12.8, with ``failIdx``       9 (3D: 5)  ``cuGetProcAddress(name, 12080)``: what every driver since 12.8 answers
13.0, without ``failIdx``    8 (3D: 4)  ``cuGetProcAddress(name, 13000)``; CUDA 13's runtime library
===========================  =========  ==========================================================

The version asked for decides, whatever the toolkit or torch were built with. Struct layouts are those of ``cuda.h``;
tests/kernels/test_cuda_structs.py compiles them against the header.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch

from hicache_ext.errors import CopyError

_FORM_12_VERSION = 12080
_FORM_13_VERSION = 13000
_SOURCE_IN_STREAM_ORDER = 1
_PREFER_OVERLAP_WITH_COMPUTE = 1
_OPERAND_IS_POINTER = 1
_CAN_USE_HOST_POINTER = 91
_LEGACY_STREAMS = (0, 1)
"""Handles of the legacy default stream, in which batches are refused: NULL and CU_STREAM_LEGACY."""


class Form(Enum):
    """Which of the two argument lists a function takes."""

    WITH_FAIL_INDEX = "12.8"
    WITHOUT_FAIL_INDEX = "13.0"


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class Attributes(ctypes.Structure):
    """CUmemcpyAttributes, 24 bytes."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_location", Location),
        ("destination_location", Location),
        ("flags", ctypes.c_uint),
    )


class PointerOperand(ctypes.Structure):
    """CUmemcpy3DOperand of type pointer, 40 bytes; lengths in elements, which are bytes for pointers."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("address", ctypes.c_uint64),
        ("row_length", ctypes.c_size_t),
        ("layer_height", ctypes.c_size_t),
        ("location", Location),
    )


class Rectangle(ctypes.Structure):
    """CUDA_MEMCPY3D_BATCH_OP, 112 bytes."""

    _fields_ = (
        ("source", PointerOperand),
        ("destination", PointerOperand),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
        ("depth", ctypes.c_size_t),
        ("source_access_order", ctypes.c_int),
        ("flags", ctypes.c_uint),
    )


_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t
_FAIL_INDEX = _STREAM = _POINTER
_BATCH = (_POINTER, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER, _SIZE)
"""Destinations, sources, sizes, how many; attributes, their first copies, how many."""
BATCH_TYPES = {
    Form.WITH_FAIL_INDEX: (*_BATCH, _FAIL_INDEX, _STREAM),
    Form.WITHOUT_FAIL_INDEX: (*_BATCH, _STREAM),
}
RECTANGLE_TYPES = {
    Form.WITH_FAIL_INDEX: (_SIZE, _POINTER, _FAIL_INDEX, ctypes.c_ulonglong, _STREAM),
    Form.WITHOUT_FAIL_INDEX: (_SIZE, _POINTER, ctypes.c_ulonglong, _STREAM),
}


class CudaDriver:
    """Batches of copies between page-locked host memory and the current device.

    ``batch`` and ``rectangles`` are ctypes functions of the given form (``rectangles`` may be missing). One thread at
    a time. With ``prefer_overlap`` the driver is told that copies should run beside compute.
    """

    def __init__(
        self,
        batch: Callable[..., int],
        form: Form,
        *,
        rectangles: Callable[..., int] | None = None,
        prefer_overlap: bool = True,
    ) -> None:
        self.form = form
        self._batch = batch
        self._rectangles = rectangles
        self.flags = _PREFER_OVERLAP_WITH_COMPUTE if prefer_overlap else 0
        # These live as long as the driver, so that no call can outlive them.
        self._attributes = Attributes(source_access_order=_SOURCE_IN_STREAM_ORDER, flags=self.flags)
        self._first_copy = ctypes.c_size_t(0)
        self._failed = ctypes.c_size_t(0)
        self._attributes_at = ctypes.addressof(self._attributes)
        self._first_copy_at = ctypes.addressof(self._first_copy)
        self._failed_at = ctypes.addressof(self._failed)

    @property
    def has_rectangles(self) -> bool:
        return self._rectangles is not None

    def current_stream(self, device: torch.device) -> int:
        """Handle of torch's current stream."""
        handle: int = torch.cuda.current_stream(device).cuda_stream
        return handle

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""
        return torch.cuda.is_current_stream_capturing()

    def stream_refusal(self, device: torch.device) -> str | None:
        """Why nothing can be submitted to the current stream; None if it can."""
        if self.current_stream(device) in _LEGACY_STREAMS:
            return "default_stream"
        return "graph_capture" if self.is_capturing() else None

    def copy_batch(self, destinations: int, sources: int, sizes: int, count: int, stream: int) -> None:
        """``count`` copies in no order among themselves; the three are addresses of arrays of 64-bit integers.

        The arrays may change once the call has returned. Raises :class:`CopyError`.
        """
        arguments = (destinations, sources, sizes, count, self._attributes_at, self._first_copy_at, 1)
        if self.form is Form.WITH_FAIL_INDEX:
            code = self._batch(*arguments, self._failed_at, stream)
        else:
            code = self._batch(*arguments, stream)
        if code:
            raise CopyError(f"the driver refused a batch of {count} copies with error {code}{self._failed_copy()}")

    def copy_rectangles(self, rectangles: int, count: int, stream: int) -> None:
        """``count`` :class:`Rectangle` structures from address ``rectangles`` on, as ``copy_batch``."""
        if self._rectangles is None:
            raise CopyError("this driver has no batches of rectangles")
        if self.form is Form.WITH_FAIL_INDEX:
            code = self._rectangles(count, rectangles, self._failed_at, 0, stream)
        else:
            code = self._rectangles(count, rectangles, 0, stream)
        if code:
            raise CopyError(f"the driver refused a batch of {count} rectangles with error {code}")

    def _failed_copy(self) -> str:
        return f" at copy {self._failed.value}" if self.form is Form.WITH_FAIL_INDEX else ""


def reaches_registered_memory(device_index: int) -> bool:
    """Whether kernels may use the host's own addresses of registered memory; where not, it has others for the device.

    CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM; False too where it cannot be asked.
    """
    value = ctypes.c_int(0)
    try:
        library = ctypes.CDLL("libcuda.so.1")
        code: int = library.cuDeviceGetAttribute(ctypes.byref(value), _CAN_USE_HOST_POINTER, device_index)
    except (OSError, AttributeError):
        return False
    return code == 0 and value.value == 1


def fill_rectangle_constants(array: Any, driver: CudaDriver) -> None:
    """What is the same in every rectangle of a numpy array with the fields of :class:`Rectangle`."""
    for operand in ("source", "destination"):
        array[operand]["type"] = _OPERAND_IS_POINTER
    array["depth"] = 1
    array["source_access_order"] = _SOURCE_IN_STREAM_ORDER
    array["flags"] = driver.flags


def open_driver(*, prefer_overlap: bool = True) -> CudaDriver:
    """The driver of this machine. Raises :class:`CopyError` where there is none, or one older than 12.8."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise CopyError("no CUDA driver: libcuda.so.1 cannot be loaded") from None
    for form, version in ((Form.WITH_FAIL_INDEX, _FORM_12_VERSION), (Form.WITHOUT_FAIL_INDEX, _FORM_13_VERSION)):
        batch = _entry_point(library, "cuMemcpyBatchAsync", version, BATCH_TYPES[form])
        if batch is not None:
            rectangles = _entry_point(library, "cuMemcpy3DBatchAsync", version, RECTANGLE_TYPES[form])
            return CudaDriver(batch, form, rectangles=rectangles, prefer_overlap=prefer_overlap)
    return open_runtime(prefer_overlap=prefer_overlap)


def open_runtime(*, prefer_overlap: bool = True) -> CudaDriver:
    """The same through CUDA 13's runtime library, which torch has loaded. Raises :class:`CopyError` without it."""
    try:
        # Of version 13 by name: libcudart.so.12 has a function of this name that takes one argument more.
        function = ctypes.CDLL("libcudart.so.13").cudaMemcpyBatchAsync
    except (OSError, AttributeError):
        raise CopyError("the CUDA driver has no cuMemcpyBatchAsync (12.8 or newer is needed)") from None
    function.argtypes = BATCH_TYPES[Form.WITHOUT_FAIL_INDEX]
    function.restype = ctypes.c_int
    return CudaDriver(function, Form.WITHOUT_FAIL_INDEX, prefer_overlap=prefer_overlap)


def _entry_point(library: ctypes.CDLL, name: str, version: int, types: tuple[Any, ...]) -> Callable[..., int] | None:
    try:
        get_proc_address = library.cuGetProcAddress_v2
    except AttributeError:
        return None
    get_proc_address.argtypes = (
        ctypes.c_char_p,
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.c_int,
        ctypes.c_uint64,
        ctypes.c_void_p,
    )
    get_proc_address.restype = ctypes.c_int
    address = ctypes.c_void_p()
    if get_proc_address(name.encode(), ctypes.byref(address), version, 0, None) != 0 or not address.value:
        return None
    return ctypes.CFUNCTYPE(ctypes.c_int, *types)(address.value)

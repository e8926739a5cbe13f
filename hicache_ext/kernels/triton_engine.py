"""Copies by a few programs of a Triton kernel that reads or writes page-locked host memory directly.

It serves what the copy engines are slow at (many small runs) or cannot do (token indices on the device): nothing is
planned on the CPU, and a submission costs one launch whatever the number of tokens. It does use multiprocessors: as
many programs as the quota allows, for as long as the copy takes.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from typing import Any

import torch

from hicache_ext.errors import CopyError
from hicache_ext.kernels.engine import Direction, Operation, Submit
from hicache_ext.kernels.geometry import LayerStack

DEFAULT_PROGRAMS = 4
_WARPS = 32
_TILE_BYTES = 32 * 1024
"""Bytes that a program has in flight: with four programs more than the 70 to 107 KiB that should fill PCIe 5."""
_MOST_COLUMN_BYTES = 4096
_CAN_USE_HOST_POINTER = 91
_WIDEST_WORD = 4


class TritonEngine:
    """Launches the kernel once per submission, with at most ``programs`` programs.

    Constructing imports triton; the kernel is compiled at the first submission of each pool geometry and direction.
    """

    name = "triton"

    def __init__(self, *, programs: int = DEFAULT_PROGRAMS) -> None:
        from hicache_ext.kernels import triton_kernel

        self._programs = programs
        self._options = {"num_warps": _WARPS}
        self._kernel = triton_kernel.compiled()
        self._stacks: weakref.WeakKeyDictionary[LayerStack, tuple[torch.Tensor, dict[Direction, dict[str, Any]]]]
        self._stacks = weakref.WeakKeyDictionary()
        """Stack -> base addresses of its copies as a device tensor, and its constants for each direction."""

    def refusal(self, operation: Operation) -> str | None:
        stack = operation.stack
        if stack.device.type == "cpu":
            return "no_gpu"
        if stack.device.type != "cuda" or torch.version.hip is not None:
            return "not_cuda"
        if not stack.is_registered:
            return "unpinned"
        if not _reaches_registered_memory(
            torch.cuda.current_device() if stack.device.index is None else stack.device.index
        ):
            return "aliased_memory"
        if torch.cuda.is_current_stream_capturing():
            return "graph_capture"  # a captured copy would be replayed when the pages hold something else
        return None

    def begin(self, operation: Operation) -> Submit:
        stack = operation.stack
        cached = self._stacks.get(stack)
        if cached is None:
            bases = torch.stack([torch.from_numpy(stack.host_bases), torch.from_numpy(stack.device_bases)], dim=1)
            constants_by = {direction: constants_of(stack, direction) for direction in Direction}
            cached = self._stacks[stack] = _on_device(bases, stack.device), constants_by
        bases, constants_by = cached
        constants, rows = constants_by[operation.direction], operation.tokens * stack.shape.segments
        host_indices = _to_current_stream(operation.host_indices, stack.device)
        device_indices = _to_current_stream(operation.device_indices, stack.device)

        def submit(first: int, last: int) -> None:
            if rows and first < last:
                units = (last - first) * -(-rows // constants["ROWS"]) * constants["CHUNKS"]
                self._launch(units, bases, first, host_indices, device_indices, rows, **constants)

        return submit

    def _launch(self, units: int, *arguments: object, **constants: object) -> None:
        """Run the kernel with as many programs as the quota allows. Raises :class:`CopyError`."""
        try:
            self._kernel[(min(self._programs, units),)](*arguments, units, **constants, **self._options)
        except Exception as error:  # compilers and launchers may raise anything
            raise CopyError(f"the Triton kernel could not be launched: {type(error).__name__}: {error}") from error


def constants_of(stack: LayerStack, direction: Direction) -> dict[str, Any]:
    """Return the kernel's compile-time arguments, which define how the rows of a stack are cut into the tiles that the
    programs of a launch share."""
    shape = stack.shape
    # Use 4-byte words if the alignment allows: with alignment 16 four of them form one load, with 8 two.
    width = min(stack.alignment, _WIDEST_WORD)
    words = shape.segment_bytes // width
    columns = min(1 << max(words - 1, 0).bit_length(), _MOST_COLUMN_BYTES // width)
    return {
        "HOST_PAGE": shape.host.page,
        "HOST_TOKEN": shape.host.token,
        "HOST_SEGMENT": shape.host.segment,
        "DEVICE_PAGE": shape.device.page,
        "DEVICE_TOKEN": shape.device.token,
        "DEVICE_SEGMENT": shape.device.segment,
        "PAGE_SIZE": shape.page_size,
        "SEGMENTS": shape.segments,
        "WORDS": words,
        "WIDTH": width,
        "ALIGNMENT": stack.alignment,
        "ROWS": max(1, _TILE_BYTES // (columns * width)),
        "COLUMNS": columns,
        "CHUNKS": -(-words // columns),
        "IS_LOAD": direction is Direction.LOAD,
    }


def _to_current_stream(indices: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return ``indices`` on ``device``, contiguous. The copy and the new tensor belong to the current stream."""
    if indices.device.type == "cpu" and device.type == "cuda":
        indices = indices.contiguous().pin_memory()  # pageable memory would make the scheduler wait for the stream
    return indices.to(device, non_blocking=True).contiguous()


def _on_device(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return ``table`` on ``device``, complete on return, because streams other than the current one read it."""
    if device.type != "cuda":
        return table.to(device)
    own_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(own_stream):  # so that only this copy is waited for
        return table.to(device)


@functools.cache
def _reaches_registered_memory(device_index: int) -> bool:
    """Return whether kernels may use host addresses of registered memory; otherwise the device has other addresses.

    Reads CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM; False also if it cannot be read.
    """
    value = ctypes.c_int(0)
    try:
        library = ctypes.CDLL("libcuda.so.1")
        code: int = library.cuDeviceGetAttribute(ctypes.byref(value), _CAN_USE_HOST_POINTER, device_index)
    except (OSError, AttributeError):
        return False
    return code == 0 and value.value == 1

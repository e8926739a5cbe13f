"""The interface of copy engines, which move rows in different ways, and the reference engine.

An *operation* moves one set of tokens, in one direction, for some or all layers of a pool. It is created once; an
engine *begins* it once and then submits it layer by layer as requested. All of that happens on one thread (in SGLang:
the scheduler's, before the forward pass), inside the stream in which the copies are to run.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from functools import cached_property
from typing import Protocol

import torch

from hicache_ext.kernels.geometry import CopyPlan, CopyShape, LayerStack, Rows, make_plan

SGLANG = "sglang"
"""The name of SGLang's own path, which is none of our engines."""


class Direction(StrEnum):
    """``load`` is host to device, ``back_up`` device to host."""

    LOAD = "load"
    BACK_UP = "back_up"


class Operation:
    """One set of tokens to move: two int64 index tensors of equal length, one index per token, on CPU or device.

    No index occurs twice on the side that is written. Raises ``ValueError`` for unequal lengths.
    """

    def __init__(
        self, stack: LayerStack, direction: Direction, host_indices: torch.Tensor, device_indices: torch.Tensor
    ) -> None:
        if host_indices.numel() != device_indices.numel():
            raise ValueError(f"{host_indices.numel()} host tokens, but {device_indices.numel()} device tokens")
        self.stack = stack
        self.direction = direction
        self.host_indices = host_indices
        self.device_indices = device_indices

    @property
    def tokens(self) -> int:
        return self.host_indices.numel()

    @property
    def indices_on_cpu(self) -> bool:
        """Whether the plan can be made without waiting for the device."""
        return self.host_indices.device.type == "cpu" and self.device_indices.device.type == "cpu"

    @cached_property
    def plan(self) -> CopyPlan:
        """The plan for all layers, made at first use. Waits for the device unless ``indices_on_cpu``."""
        return make_plan(self.stack.shape, self.host_indices.cpu().numpy(), self.device_indices.cpu().numpy())


Submit = Callable[[int, int], None]
"""Submits copies ``first`` to ``last - 1`` of an operation's stack to the current stream of the device. On return they
need only be ordered on that stream. Raises CopyError if they could not be submitted. Dropping the function is always
safe: submitted copies stay valid."""


class CopyEngine(Protocol):
    """A way to move rows. Engines are stateless between operations and used from one thread at a time."""

    name: str

    def refusal(self, operation: Operation) -> str | None:
        """Return in a word or two why this engine cannot serve ``operation`` in the current stream; None if it can."""

    def begin(self, operation: Operation) -> Submit:
        """Plan ``operation``, for which ``refusal`` has returned None in the same stream."""


# -- the reference -----------------------------------------------------------------------------------------------------
# Torch gather and scatter, on any device: the other engines are compared with it, and it lets SGLang's HiCache run on a
# machine without a GPU. It copies whole rows through one temporary per layer and component, and does not overlap with
# anything.

# Gathers and scatters move elements, so use the widest integer that divides every address and stride.
_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


class ReferenceEngine:
    """Copies rows with advanced indexing on strided views. Takes every operation; safe from any thread.

    A load is ordered on the current stream; a write-back is complete when the call returns.
    """

    name = "reference"

    def refusal(self, operation: Operation) -> str | None:
        return None

    def begin(self, operation: Operation) -> Submit:
        host, device = operation.host_indices, operation.device_indices

        def submit(first: int, last: int) -> None:
            for host_rows, device_rows in operation.stack.copies[first:last]:
                sides = (host_rows, host), (device_rows, device)
                source, target = sides if operation.direction is Direction.LOAD else reversed(sides)
                _copy_rows(operation.stack.shape, *source, *target)

        return submit


def _copy_rows(
    shape: CopyShape, source: Rows, source_indices: torch.Tensor, target: Rows, target_indices: torch.Tensor
) -> None:
    if source_indices.numel() == 0:
        return
    numbers = [shape.segment_bytes]
    for rows in (source, target):
        numbers += [rows.base - rows.storage.data_ptr(), *rows.strides]
    word = next((width, dtype) for width, dtype in _WORDS if all(number % width == 0 for number in numbers))
    source_view, source_place = _view(source, shape, *word, source_indices)
    target_view, target_place = _view(target, shape, *word, target_indices)
    target_view[target_place] = source_view[source_place].to(target_view.device)


def _view(
    rows: Rows, copy_shape: CopyShape, width: int, dtype: torch.dtype, indices: torch.Tensor
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Return a view of the rows with the token axes in front, and the index that selects ``indices`` on those axes."""
    page_size = copy_shape.page_size
    indices = indices.to(rows.storage.device)
    if rows.strides.page == page_size * rows.strides.token:
        shape: tuple[int, ...] = (rows.token_count,)
        strides: tuple[int, ...] = (rows.strides.token,)
        place: tuple[torch.Tensor, ...] = (indices,)
    else:
        shape = (rows.token_count // page_size, page_size)
        strides = (rows.strides.page, rows.strides.token)
        place = (indices // page_size, indices % page_size)
    shape += (copy_shape.segments, copy_shape.segment_bytes)
    strides += (rows.strides.segment, 1)
    words = torch.empty(0, dtype=dtype, device=rows.storage.device)
    words.set_(
        rows.storage,
        (rows.base - rows.storage.data_ptr()) // width,
        (*shape[:-1], shape[-1] // width),
        (*(stride // width for stride in strides[:-1]), 1),
    )
    return words, place

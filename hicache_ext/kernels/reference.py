"""The reference copy engine: torch gather and scatter, on any device.

It is what the other engines are compared with, and what lets SGLang's HiCache run on a machine without a GPU. It copies
whole rows through one temporary per layer and component, and it does not overlap with anything.
"""

from __future__ import annotations

import torch

from hicache_ext.kernels.engine import Direction, Operation
from hicache_ext.kernels.geometry import LayerCopy, Rows

# Gathers and scatters move elements, so the widest integer that divides every address and stride moves most at a time.
_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


class ReferenceEngine:
    """Copies rows with advanced indexing on strided views. Takes every operation; safe from any thread.

    A load is ordered on the current stream; a write-back is complete when the call returns.
    """

    name = "reference"

    def refusal(self, operation: Operation) -> str | None:
        return None

    def begin(self, operation: Operation) -> _ReferenceTransfer:
        return _ReferenceTransfer(operation)


class _ReferenceTransfer:
    def __init__(self, operation: Operation) -> None:
        self._operation = operation

    def submit(self, first: int, last: int) -> None:
        operation = self._operation
        host, device = operation.host_indices, operation.device_indices
        for copy in operation.stack.copies[first:last]:
            if operation.direction is Direction.LOAD:
                _copy_rows(copy, copy.host, host, copy.device, device)
            else:
                _copy_rows(copy, copy.device, device, copy.host, host)


def _copy_rows(
    copy: LayerCopy, source: Rows, source_indices: torch.Tensor, target: Rows, target_indices: torch.Tensor
) -> None:
    if source_indices.numel() == 0:
        return
    width, dtype = _widest_word(copy)
    source_view, source_place = _view(source, copy, width, dtype, source_indices)
    target_view, target_place = _view(target, copy, width, dtype, target_indices)
    target_view[target_place] = source_view[source_place].to(target_view.device)


def _view(
    rows: Rows, copy: LayerCopy, width: int, dtype: torch.dtype, indices: torch.Tensor
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """A view of the rows with the token axes in front, and the index that selects ``indices`` on those axes."""
    page_size = copy.page_size
    indices = indices.to(rows.storage.device)
    if rows.page_stride == page_size * rows.token_stride:
        shape: tuple[int, ...] = (rows.token_count,)
        strides: tuple[int, ...] = (rows.token_stride,)
        place: tuple[torch.Tensor, ...] = (indices,)
    else:
        shape = (rows.token_count // page_size, page_size)
        strides = (rows.page_stride, rows.token_stride)
        place = (indices // page_size, indices % page_size)
    shape += (copy.segments, copy.segment_bytes)
    strides += (rows.segment_stride, 1)
    words = torch.empty(0, dtype=dtype, device=rows.storage.device)
    words.set_(
        rows.storage,
        (rows.base - rows.storage.data_ptr()) // width,
        (*shape[:-1], shape[-1] // width),
        (*(stride // width for stride in strides[:-1]), 1),
    )
    return words, place


def _widest_word(copy: LayerCopy) -> tuple[int, torch.dtype]:
    numbers = [copy.segment_bytes]
    for rows in (copy.host, copy.device):
        numbers += [rows.base - rows.storage.data_ptr(), rows.page_stride, rows.token_stride, rows.segment_stride]
    return next((width, dtype) for width, dtype in _WORDS if all(number % width == 0 for number in numbers))

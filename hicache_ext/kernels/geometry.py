"""Where the bytes of one layer's KV rows lie, on the host and on the device.

A *row* is what one token keeps in one layer of one component (K, V, or the MLA latent). Rows are found by token index:

    address(t) = base + (t // page_size) * page_stride + (t % page_size) * token_stride

and a row is one run of bytes everywhere but in the ``page_head`` host layout, which cuts it in one *segment* per KV
head, ``segment_stride`` bytes apart. Nothing here copies, and nothing here knows SGLang: engines take
:class:`LayerCopy` values, ``sglang_hooks.py`` makes them.

All strides, addresses and sizes are in bytes, all indices in tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

#: Host layouts with an address formula here. ``page_head`` exists for MHA pools only.
HOST_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one layer of one component on one side.

    ``storage`` is the memory the addresses point into: it keeps it alive, and gives engines that work on tensors a
    way in. ``base`` is the address of token 0's first segment.
    """

    storage: torch.UntypedStorage
    base: int
    token_count: int
    page_stride: int
    token_stride: int
    segment_stride: int

    def address(self, token: int, segment: int, page_size: int) -> int:
        """Address of one segment of one token: the definition that engines are tested against."""
        page, slot = divmod(token, page_size)
        return self.base + page * self.page_stride + slot * self.token_stride + segment * self.segment_stride


@dataclass(frozen=True, slots=True)
class LayerCopy:
    """One component of one layer, both sides: row ``i`` is ``segments`` runs of ``segment_bytes``."""

    host: Rows
    device: Rows
    page_size: int
    segments: int
    segment_bytes: int


class CopyEngine(Protocol):
    """What moves rows between host and device for the SGLang hooks.

    Both calls come from SGLang's scheduler thread, inside its transfer stream. ``host_indices`` and
    ``device_indices`` are int64 tensors of equal length, one token each, on any device; no index occurs twice on the
    destination side. The copy need only be ordered on the current stream when the call returns.
    """

    def load(self, copies: Sequence[LayerCopy], host_indices: torch.Tensor, device_indices: torch.Tensor) -> None:
        """Host to device."""

    def back_up(self, copies: Sequence[LayerCopy], host_indices: torch.Tensor, device_indices: torch.Tensor) -> None:
        """Device to host."""


def device_rows(tensor: torch.Tensor, *, page_size: int, row_stride: int, segment_bytes: int) -> Rows:
    """Rows of one layer's device buffer, shape ``(tokens, ...)``.

    ``row_stride`` is the distance between tokens: the row size in packed buffers, more where a unified pool interleaves
    layers. A row itself is one run.
    """
    if tensor.is_contiguous():
        token_count = tensor.numel() * tensor.element_size() // row_stride if row_stride else 0
    else:
        token_count = tensor.shape[0]
    return Rows(
        storage=tensor.untyped_storage(),
        base=tensor.data_ptr(),
        token_count=token_count,
        page_stride=page_size * row_stride,
        token_stride=row_stride,
        segment_stride=segment_bytes,
    )


def host_rows(
    buffer: torch.Tensor,
    *,
    layout: str,
    layer: int,
    layer_num: int,
    page_size: int,
    token_count: int,
    segments: int,
    segment_bytes: int,
) -> Rows:
    """Rows of one layer in a host buffer that holds one component of all ``layer_num`` layers.

    Shapes, with L layers, P page_size, H segments (KV heads), D head_dim:

    ==================  =======================
    layer_first         (L, tokens, H, D)
    page_first          (tokens, L, H, D)
    page_first_direct   (pages, L, P, H, D)
    page_head           (pages, H, P, L, D)
    ==================  =======================

    Raises ``ValueError`` for a layout that is not in :data:`HOST_LAYOUTS`.
    """
    row = segments * segment_bytes
    segment_stride = segment_bytes
    if layout == "layer_first":
        offset, token_stride, page_stride = layer * token_count * row, row, page_size * row
    elif layout == "page_first":
        offset, token_stride, page_stride = layer * row, layer_num * row, page_size * layer_num * row
    elif layout == "page_first_direct":
        offset, token_stride, page_stride = layer * page_size * row, row, page_size * layer_num * row
    elif layout == "page_head":
        offset, token_stride = layer * segment_bytes, layer_num * segment_bytes
        page_stride, segment_stride = page_size * layer_num * row, page_size * layer_num * segment_bytes
    else:
        raise ValueError(f"no address formula for host layout {layout!r}; known: {', '.join(HOST_LAYOUTS)}")
    return Rows(
        storage=buffer.untyped_storage(),
        base=buffer.data_ptr() + offset,
        token_count=token_count,
        page_stride=page_stride,
        token_stride=token_stride,
        segment_stride=segment_stride,
    )

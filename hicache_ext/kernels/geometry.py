"""Where the bytes of one layer's KV rows lie, on the host and on the device.

A *row* is what one token keeps in one layer of one component (K, V, or the MLA latent). Rows are found by token index:

    address(t) = base + (t // page_size) * page_stride + (t % page_size) * token_stride

and a row is one run of bytes everywhere but in the ``page_head`` host layout, which cuts it in one *segment* per KV
head, ``segment_stride`` bytes apart. Nothing here copies, and nothing here knows SGLang: engines take a
:class:`LayerStack`, ``sglang/kernel_hooks.py`` makes it from a pool.

All strides, addresses and sizes are in bytes, all indices in tokens.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

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


class Strides(NamedTuple):
    """Where the rows of one side lie relative to token 0."""

    page: int
    token: int
    segment: int


class CopyShape(NamedTuple):
    """What the copies of all layers of an operation have in common: everything but where they begin."""

    page_size: int
    segments: int
    segment_bytes: int
    host: Strides
    device: Strides

    @property
    def row_bytes(self) -> int:
        """Bytes that one token keeps in one component of one layer."""
        return self.segments * self.segment_bytes


Registration = tuple[int, int]
"""(address, bytes) of host memory that was registered with the driver in one call."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class LayerStack:
    """All layers of one pool: one shape, and per copy the two addresses at which it begins.

    An operation is planned once, relative to token 0; to submit a layer is to add its two addresses to the plan.
    ``layers[i]`` are the copies of layer ``i`` (K and V, or the latent): first and one past the last. ``registrations``
    is the page-locked host memory, empty where there is none. ``layout`` names the host layout and tells calibrated
    speeds apart.
    """

    copies: tuple[LayerCopy, ...]
    layers: tuple[tuple[int, int], ...]
    layout: str
    registrations: tuple[Registration, ...]
    shape: CopyShape
    host_bases: NDArray[np.int64] = field(repr=False)
    device_bases: NDArray[np.int64] = field(repr=False)
    alignment: int
    """The largest power of two, up to 16, that divides every address, stride and segment."""
    is_registered: bool
    """Whether every host row of every copy lies in registered memory."""

    @classmethod
    def of(
        cls, layers: Sequence[Sequence[LayerCopy]], *, layout: str = "", registrations: Sequence[Registration] = ()
    ) -> LayerStack:
        """The stack of ``layers``. Raises ``ValueError`` if they do not share one shape, or if there are none."""
        copies = tuple(copy for layer in layers for copy in layer)
        shapes = {_shape(copy) for copy in copies}
        if len(shapes) != 1:
            raise ValueError(f"a stack needs layers of one shape; got {len(shapes)}: {sorted(shapes)}")
        shape = shapes.pop()
        ends = np.cumsum([0, *(len(layer) for layer in layers)]).tolist()
        host_bases = np.array([copy.host.base for copy in copies], dtype=np.int64)
        device_bases = np.array([copy.device.base for copy in copies], dtype=np.int64)
        numbers = [16, shape.segment_bytes, *shape.host, *shape.device, *host_bases.tolist(), *device_bases.tolist()]
        return cls(
            copies=copies,
            layers=tuple(itertools.pairwise(ends)),
            layout=layout,
            registrations=tuple(sorted(registrations)),
            shape=shape,
            host_bases=host_bases,
            device_bases=device_bases,
            alignment=math.gcd(*numbers),
            is_registered=_all_covered(copies, _merged(sorted(registrations))),
        )

    @property
    def device(self) -> torch.device:
        return self.copies[0].device.storage.device

    @property
    def run_bytes(self) -> int:
        """Bytes of the runs that every plan of whole pages has at least: of a page, or of a segment."""
        shape = self.shape
        touching = shape.host.token == shape.device.token == shape.row_bytes
        if touching and (shape.segments == 1 or shape.host.segment == shape.device.segment == shape.segment_bytes):
            return shape.page_size * shape.row_bytes
        return shape.segment_bytes


def _all_covered(copies: Sequence[LayerCopy], covered: Sequence[tuple[int, int]]) -> bool:
    for copy in copies:
        rows = copy.host
        last = rows.address(max(rows.token_count - 1, 0), copy.segments - 1, copy.page_size)
        if not any(start <= rows.base and last + copy.segment_bytes <= end for start, end in covered):
            return False
    return True


def _merged(registrations: Sequence[Registration]) -> list[tuple[int, int]]:
    """(start, end) of what registrations cover, neighbours joined; ``registrations`` sorted by address."""
    spans: list[tuple[int, int]] = []
    for address, size in registrations:
        if spans and spans[-1][1] == address:
            spans[-1] = (spans[-1][0], address + size)
        else:
            spans.append((address, address + size))
    return spans


def _shape(copy: LayerCopy) -> CopyShape:
    host, device = copy.host, copy.device
    return CopyShape(
        page_size=copy.page_size,
        segments=copy.segments,
        segment_bytes=copy.segment_bytes,
        host=Strides(host.page_stride, host.token_stride, host.segment_stride),
        device=Strides(device.page_stride, device.token_stride, device.segment_stride),
    )


def page_tokens(pages: Sequence[int] | torch.Tensor, page_size: int) -> torch.Tensor:
    """The token indices of whole ``pages``, int64, on the device of ``pages``."""
    starts = torch.as_tensor(pages, dtype=torch.int64) * page_size
    return (starts[:, None] + torch.arange(page_size, device=starts.device)).flatten()


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

"""The addresses of one layer's KV rows, on the host and on the device, and the runs in which they are copied.

A *row* is what one token keeps in one layer of one component (K, V, or the MLA latent). Rows are found by token index:

    address(t) = base + (t // page_size) * page_stride + (t % page_size) * token_stride

A row is one run of bytes, except in the ``page_head`` host layout, which cuts it into one *segment* per KV head,
``segment_stride`` bytes apart. Nothing here copies, and nothing here knows SGLang: engines take a
:class:`LayerStack`, which ``sglang/kernel_hooks.py`` makes from a pool.

All strides, addresses and sizes are in bytes, all indices in tokens.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

#: Host layouts with an address formula here. ``page_head`` exists for MHA pools only.
HOST_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")


class Strides(NamedTuple):
    """Strides of the rows on one side; offsets are relative to token 0."""

    page: int
    token: int
    segment: int


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one layer of one component on one side.

    ``storage`` is the memory that the addresses point into: it keeps that memory alive, and engines that work on
    tensors access it through it. ``base`` is the address of token 0's first segment.
    """

    storage: torch.UntypedStorage
    base: int
    token_count: int
    strides: Strides

    def address(self, token: int, segment: int, page_size: int) -> int:
        """Return the address of one segment of one token: the definition that engines are tested against."""
        page, slot = divmod(token, page_size)
        return self.base + page * self.strides.page + slot * self.strides.token + segment * self.strides.segment


LayerCopy = tuple[Rows, Rows]
"""One component of one layer: its rows on the host, and on the device."""


class CopyShape(NamedTuple):
    """What the copies of all layers of an operation have in common: everything but their base addresses. A row consists
    of ``segments`` runs of ``segment_bytes``."""

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


class LayerStack:
    """All layers of one pool: one shape, and two base addresses per copy. Immutable.

    An operation is planned once, relative to token 0; submitting a layer adds its two base addresses to the plan.
    """

    def __init__(
        self,
        layers: Sequence[Sequence[LayerCopy]],
        *,
        page_size: int,
        segments: int,
        segment_bytes: int,
        layout: str = "",
        registrations: Sequence[Registration] = (),
    ) -> None:
        """``layers`` holds the copies of each layer (K and V, or the latent). ``layout`` names the host layout, to
        look up calibrated speeds; ``registrations`` is the page-locked host memory, possibly empty. Raises
        ``ValueError`` if the layers do not share one shape, or if there are no layers."""
        self.copies = tuple(copy for layer in layers for copy in layer)
        shapes = {
            CopyShape(page_size, segments, segment_bytes, host.strides, device.strides) for host, device in self.copies
        }
        if len(shapes) != 1:
            raise ValueError(f"a stack needs layers of one shape; got {len(shapes)}: {sorted(shapes)}")
        self.shape = shape = shapes.pop()
        self.layers = tuple(itertools.pairwise(np.cumsum([0, *(len(layer) for layer in layers)]).tolist()))
        """(first copy, last copy + 1) of each layer."""
        self.layout = layout
        self.registrations = tuple(sorted(registrations))
        bases = np.array([(host.base, device.base) for host, device in self.copies], dtype=np.int64)
        self.host_bases, self.device_bases = bases.T
        self.alignment = math.gcd(16, shape.segment_bytes, *shape.host, *shape.device, *bases.ravel().tolist())
        """The largest power of two, up to 16, that divides every address, stride and segment."""
        self.is_registered = _all_covered([host for host, _ in self.copies], shape, self.registrations)
        """Whether every host row of every copy lies in registered memory."""

    @property
    def device(self) -> torch.device:
        return self.copies[0][1].storage.device

    @property
    def run_bytes(self) -> int:
        """Least bytes of a run in any plan of whole pages: those of a page, or of a segment."""
        shape = self.shape
        touching = shape.host.token == shape.device.token == shape.row_bytes
        if touching and (shape.segments == 1 or shape.host.segment == shape.device.segment == shape.segment_bytes):
            return shape.page_size * shape.row_bytes
        return shape.segment_bytes


def _all_covered(hosts: Sequence[Rows], shape: CopyShape, registrations: Sequence[Registration]) -> bool:
    """Return whether all rows lie in ``registrations``, sorted by address; a row may span several that touch."""
    for rows in hosts:
        reached = rows.base
        for address, size in registrations:
            if address <= reached:
                reached = max(reached, address + size)
        last = rows.address(max(rows.token_count - 1, 0), shape.segments - 1, shape.page_size)
        if reached < last + shape.segment_bytes:
            return False
    return True


def page_tokens(pages: Sequence[int] | torch.Tensor, page_size: int) -> torch.Tensor:
    """Return the token indices of whole ``pages``, int64, on the device of ``pages``."""
    starts = torch.as_tensor(pages, dtype=torch.int64) * page_size
    return (starts[:, None] + torch.arange(page_size, device=starts.device)).flatten()


def device_rows(tensor: torch.Tensor, *, page_size: int, row_stride: int, segment_bytes: int) -> Rows:
    """Return the rows of one layer's device buffer, shape ``(tokens, ...)``.

    ``row_stride`` is the distance between tokens: the row size in packed buffers, more in a unified pool that
    interleaves layers. A row itself is one run.
    """
    if tensor.is_contiguous():
        token_count = tensor.numel() * tensor.element_size() // row_stride if row_stride else 0
    else:
        token_count = tensor.shape[0]
    return Rows(
        storage=tensor.untyped_storage(),
        base=tensor.data_ptr(),
        token_count=token_count,
        strides=Strides(page_size * row_stride, row_stride, segment_bytes),
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
    """Return the rows of one layer in a host buffer that holds one component of all ``layer_num`` layers.

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
    page = page_size * layer_num * row
    layouts = {
        "layer_first": (layer * token_count * row, Strides(page_size * row, row, segment_bytes)),
        "page_first": (layer * row, Strides(page, layer_num * row, segment_bytes)),
        "page_first_direct": (layer * page_size * row, Strides(page, row, segment_bytes)),
        "page_head": (layer * segment_bytes, Strides(page, layer_num * segment_bytes, page // segments)),
    }
    if layout not in layouts:
        raise ValueError(f"no address formula for host layout {layout!r}; known: {', '.join(HOST_LAYOUTS)}")
    offset, strides = layouts[layout]
    return Rows(buffer.untyped_storage(), buffer.data_ptr() + offset, token_count, strides)


# -- the plan of one operation -----------------------------------------------------------------------------------------
# The source and target of each run of bytes. It is the same for every layer, except for the two base addresses.
#
# A *run* is contiguous on both sides. Runs are as long as both sides allow: rows of a page that touch on both sides
# form one run, and so do pages that are neighbours on both sides, in whatever order they were given. If rows touch on
# only one side (``page_first`` hosts, unified device pools), each row is a run.
#
# Planning uses numpy on arrays as long as the operation, because it happens on SGLang's scheduler thread, before the
# forward pass. Offsets are relative to token 0 of a copy, in bytes.

Offsets = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class CopyPlan:
    """The runs of an operation in ascending host order: three arrays of one length, in bytes."""

    host: Offsets
    device: Offsets
    sizes: Offsets

    def __len__(self) -> int:
        return len(self.sizes)


def make_plan(shape: CopyShape, host_indices: Offsets, device_indices: Offsets) -> CopyPlan:
    """Return the plan that copies token ``host_indices[i]`` to or from token ``device_indices[i]``, for all ``i``.

    Both are int64 arrays of one length. Whole pages are planned page by page, anything else token by token. No index
    may occur twice on the side that is written.
    """
    if len(host_indices) == 0:
        nothing = np.empty(0, dtype=np.int64)
        return CopyPlan(nothing, nothing, nothing)
    if shape.segments > 1 and shape.host.segment == shape.device.segment == shape.segment_bytes:
        # The segments of a row touch on both sides: treat them as one.
        row = shape.row_bytes
        sides = shape.host._replace(segment=row), shape.device._replace(segment=row)
        shape = CopyShape(shape.page_size, 1, row, *sides)
    whole = _are_whole_pages(shape.page_size, host_indices) and _are_whole_pages(shape.page_size, device_indices)
    tokens = shape.page_size if whole else 1
    host = _offsets(host_indices[::tokens], shape.page_size, shape.host)
    device = _offsets(device_indices[::tokens], shape.page_size, shape.device)
    if not (host[1:] > host[:-1]).all():
        order = np.argsort(host, kind="stable")
        host, device = host[order], device[order]
    size = shape.segment_bytes
    if shape.segments == 1 and shape.host.token == shape.device.token == size:
        return _merge_runs(host, device, tokens * size)
    if tokens * shape.segments > 1:
        host, device = (
            _every_segment(host, shape, shape.host, tokens),
            _every_segment(device, shape, shape.device, tokens),
        )
    return _merge_runs(host, device, size)


def split_at_borders(
    host: Offsets, device: Offsets, sizes: Offsets, registrations: tuple[Registration, ...]
) -> tuple[Offsets, Offsets, Offsets]:
    """Cut runs at absolute addresses wherever one begins in one registration and ends in another."""
    borders = np.array([address for address, _ in registrations[1:]], dtype=np.int64)
    first = np.searchsorted(borders, host, side="right")
    pieces = np.searchsorted(borders, host + sizes, side="left") - first + 1
    if (pieces == 1).all():
        return host, device, sizes
    run = np.repeat(np.arange(len(host)), pieces)
    piece = np.arange(len(run)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    border = first[run] + piece  # a piece ends at this border and begins at the previous one
    begins: Offsets = np.where(piece == 0, host[run], borders[np.maximum(border - 1, 0)])
    last = piece == pieces[run] - 1
    ends: Offsets = np.where(last, (host + sizes)[run], borders[np.minimum(border, len(borders) - 1)])
    return begins, device[run] + (begins - host[run]), ends - begins


def _are_whole_pages(page_size: int, indices: Offsets) -> bool:
    """Return whether the tokens are whole pages in order."""
    if len(indices) % page_size:
        return False
    rows = indices.reshape(-1, page_size)
    first = rows[:, :1]
    return page_size == 1 or not ((first % page_size).any() or (rows != first + np.arange(page_size)).any())


def _offsets(indices: Offsets, page_size: int, strides: Strides) -> Offsets:
    if strides.page == page_size * strides.token:
        linear: Offsets = indices * strides.token
        return linear
    pages: Offsets = indices // page_size
    return pages * strides.page + (indices - pages * page_size) * strides.token


def _every_segment(offsets: Offsets, shape: CopyShape, strides: Strides, tokens: int) -> Offsets:
    """Return the offset of every segment of the ``tokens`` tokens that begin at each of ``offsets``."""
    within = np.arange(tokens)[:, None] * strides.token + np.arange(shape.segments) * strides.segment
    every: Offsets = (offsets[:, None] + within.ravel()).ravel()
    return every


def _merge_runs(host: Offsets, device: Offsets, size: int) -> CopyPlan:
    """Return a plan of runs of ``size`` bytes, merging those that are neighbours on both sides."""
    apart = (np.diff(host) != size) | (np.diff(device) != size)
    if apart.all():
        return CopyPlan(host, device, np.full(len(host), size, dtype=np.int64))
    first = np.concatenate(([0], np.flatnonzero(apart) + 1))
    return CopyPlan(host[first], device[first], np.diff(first, append=len(host)) * size)

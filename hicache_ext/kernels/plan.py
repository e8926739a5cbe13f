"""The plan of one operation: which runs of bytes go where, the same for every layer but for two added addresses.

A *run* is contiguous on both sides. Runs are as long as both sides allow: rows of a page that touch on both sides are
one run, and so are pages that are neighbours on both sides, whatever order they were given in. Where rows touch on one
side only (``page_first`` hosts, unified device pools), each row is a run.

Everything is numpy on arrays of the length of the operation: the planning happens on SGLang's scheduler thread, before
the forward pass. Offsets are relative to token 0 of a copy, in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hicache_ext.kernels.geometry import CopyShape, Registration, Strides

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
    """The plan that copies token ``host_indices[i]`` to or from token ``device_indices[i]``, for all ``i``.

    Two int64 arrays of one length; whole pages are planned page by page, anything else token by token. Raises
    ``ValueError`` for unequal lengths. No index may occur twice on the side that is written.
    """
    if len(host_indices) != len(device_indices):
        raise ValueError(f"{len(host_indices)} host tokens, but {len(device_indices)} device tokens")
    if len(host_indices) == 0:
        nothing = np.empty(0, dtype=np.int64)
        return CopyPlan(nothing, nothing, nothing)
    shape = _with_joined_segments(shape)
    pages = _whole_pages(shape.page_size, host_indices, device_indices)
    if pages is not None:
        host, device, size = _page_runs(shape, *pages)
    else:
        host, device, size = _token_runs(shape, host_indices, device_indices)
    return _joined(host, device, size)


def split_at_borders(
    host: Offsets, device: Offsets, sizes: Offsets, registrations: tuple[Registration, ...]
) -> tuple[Offsets, Offsets, Offsets]:
    """Runs at absolute addresses, cut wherever one begins in one registration and ends in another."""
    borders = np.array([address for address, _ in registrations[1:]], dtype=np.int64)
    first = np.searchsorted(borders, host, side="right")
    pieces = np.searchsorted(borders, host + sizes, side="left") - first + 1
    if (pieces == 1).all():
        return host, device, sizes
    run = np.repeat(np.arange(len(host)), pieces)
    piece = np.arange(len(run)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    border = first[run] + piece  # the border at which a piece ends; the one before it is where the piece begins
    begins: Offsets = np.where(piece == 0, host[run], borders[np.maximum(border - 1, 0)])
    last = piece == pieces[run] - 1
    ends: Offsets = np.where(last, (host + sizes)[run], borders[np.minimum(border, len(borders) - 1)])
    return begins, device[run] + (begins - host[run]), ends - begins


def _with_joined_segments(shape: CopyShape) -> CopyShape:
    """``shape`` with one segment per row where the segments of a row touch on both sides."""
    if shape.segments == 1 or not shape.host.segment == shape.device.segment == shape.segment_bytes:
        return shape
    row = shape.row_bytes
    return shape._replace(
        segments=1,
        segment_bytes=row,
        host=shape.host._replace(segment=row),
        device=shape.device._replace(segment=row),
    )


def _whole_pages(page_size: int, host: Offsets, device: Offsets) -> tuple[Offsets, Offsets] | None:
    """The page numbers on both sides if the tokens are whole pages in order, else None."""
    if len(host) % page_size:
        return None
    if page_size == 1:
        return host, device
    numbers = []
    within = np.arange(page_size)
    for indices in (host, device):
        rows = indices.reshape(-1, page_size)
        first = rows[:, 0]
        if (first % page_size).any() or (rows != first[:, None] + within).any():
            return None
        numbers.append(first // page_size)
    return numbers[0], numbers[1]


def _page_runs(shape: CopyShape, host_pages: Offsets, device_pages: Offsets) -> tuple[Offsets, Offsets, int]:
    host, device = _in_host_order(host_pages * shape.host.page, device_pages * shape.device.page)
    if shape.segments == 1 and shape.host.token == shape.device.token == shape.segment_bytes:
        return host, device, shape.page_size * shape.segment_bytes
    sides = []
    for offsets, strides in ((host, shape.host), (device, shape.device)):
        within = (
            np.arange(shape.page_size)[:, None] * strides.token + np.arange(shape.segments) * strides.segment
        ).ravel()
        sides.append((offsets[:, None] + within).ravel())
    return sides[0], sides[1], shape.segment_bytes


def _token_runs(shape: CopyShape, host_indices: Offsets, device_indices: Offsets) -> tuple[Offsets, Offsets, int]:
    host, device = _in_host_order(
        _offsets(host_indices, shape, shape.host), _offsets(device_indices, shape, shape.device)
    )
    if shape.segments > 1:
        segments = np.arange(shape.segments)
        host = (host[:, None] + segments * shape.host.segment).ravel()
        device = (device[:, None] + segments * shape.device.segment).ravel()
    return host, device, shape.segment_bytes


def _offsets(indices: Offsets, shape: CopyShape, strides: Strides) -> Offsets:
    if strides.page == shape.page_size * strides.token:
        linear: Offsets = indices * strides.token
        return linear
    pages: Offsets = indices // shape.page_size
    return pages * strides.page + (indices - pages * shape.page_size) * strides.token


def _in_host_order(host: Offsets, device: Offsets) -> tuple[Offsets, Offsets]:
    if len(host) < 2 or (host[1:] > host[:-1]).all():
        return host, device
    order = np.argsort(host, kind="stable")
    return host[order], device[order]


def _joined(host: Offsets, device: Offsets, size: int) -> CopyPlan:
    """Runs of ``size`` bytes, neighbours on both sides made one."""
    apart = (np.diff(host) != size) | (np.diff(device) != size)
    if apart.all():
        return CopyPlan(host, device, np.full(len(host), size, dtype=np.int64))
    first = np.concatenate(([0], np.flatnonzero(apart) + 1))
    return CopyPlan(host[first], device[first], np.diff(first, append=len(host)) * size)

"""Addresses of the pages of a batch, for native code, which does not accept memoryviews."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, overload

import numpy as np
import numpy.typing as npt

Segments = Sequence[memoryview]


class Addresses(NamedTuple):
    """Pages with segments of equal sizes: ``pages[n, m]`` is the address of segment ``m`` of page ``n``."""

    pages: npt.NDArray[np.int64]
    segment_sizes: npt.NDArray[np.int64]
    page_bytes: int
    """Total bytes of the segments of a page."""


class PageMemory(Sequence[Segments]):
    """The segments of pages whose addresses are known; memoryviews are created on first access."""

    def __init__(self, addresses: Addresses, views: Callable[[], list[Segments]]) -> None:
        """``views`` makes the memoryviews of all pages, and keeps their memory alive."""
        self.addresses = addresses
        self._make = views
        self._views: list[Segments] | None = None

    def __len__(self) -> int:
        return len(self.addresses.pages)

    def __iter__(self) -> Iterator[Segments]:
        return iter(self._all())

    @overload
    def __getitem__(self, which: int) -> Segments: ...

    @overload
    def __getitem__(self, which: slice) -> Sequence[Segments]: ...

    def __getitem__(self, which: int | slice) -> Segments | Sequence[Segments]:
        return (self._views or self._all())[which]

    def select(self, positions: Iterable[int]) -> PageMemory:
        chosen = list(positions)
        addresses = Addresses(self.addresses.pages[chosen], *self.addresses[1:])
        return PageMemory(addresses, lambda: [self[position] for position in chosen])

    def _all(self) -> list[Segments]:
        if self._views is None:
            self._views = self._make()
        return self._views


def address_of(segment: memoryview) -> int:
    """Return the address of a non-empty segment."""
    return np.frombuffer(segment, np.uint8).ctypes.data


def addresses_of(buffers: Sequence[Segments], *, writable: bool) -> Addresses | None:
    """Return the addresses of these pages. None if their segments differ in size, or if ``writable`` is required and
    one is read-only, which code that writes to an address would not notice."""
    if isinstance(buffers, PageMemory):
        return buffers.addresses
    sizes = [segment.nbytes for segment in buffers[0]] if buffers else []
    if not all(sizes) or not sizes or set(map(len, buffers)) != {len(sizes)}:
        return None
    # One list of all segments avoids a function call for each page.
    segments = list(itertools.chain.from_iterable(buffers))
    if [segment.nbytes for segment in segments] != sizes * len(buffers):
        return None
    if writable and True in [segment.readonly for segment in segments]:
        return None
    found = [np.frombuffer(segment, np.uint8).__array_interface__["data"][0] for segment in segments]
    pages = np.array(found, np.int64).reshape(len(buffers), len(sizes))
    return Addresses(pages, np.array(sizes, np.int64), sum(sizes))

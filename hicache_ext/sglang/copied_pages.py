"""Pages of host pools that do not tell where their bytes are: they pass through copies of our own.

SGLang's host pools have two doors for storage. Most tell the addresses of a page (host_pool.py). Some do not, in some
layouts, or have parts that no address covers (the side states of Mamba slots). All but a few give a page as one flat
tensor and take it back: ``get_data_page(index)`` and ``set_from_flat_data_page(index, tensor)``.

A read goes into memory of our own. A page is put into its place in the host pool only after the store has verified it,
and before the call returns. Reasons: docs/decisions/copied-pages.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hicache_ext.errors import UnsupportedError
from hicache_ext.page.identity import PoolIdentity
from hicache_ext.page.memory import Addresses, PageMemory, Segments
from hicache_ext.sglang.host_pool import HostPages, PoolPages
from hicache_ext.storage.contract.store import GetResult, PageBatch, PageKeys, SetResult

COPIES_AT_ONCE = 64 << 20
"""Bytes of copies that one call holds; a page that is larger is copied alone. SGLang makes two calls at a time."""

_ALIGNMENT = 64
"""Copies begin at multiples of this, so that any dtype can look at their bytes."""

_GEOMETRY_ATTRIBUTES = (
    "num_mamba_layers",
    "temporal_state_shape",
    "conv_state_shapes",
    "item_bytes",
    "state_page_bytes",
    "ring_size",
    "row_bytes",
)
"""What shapes the flat page of some pools and is not told by the size of runs, of which a flat page has one."""


def pages_of(pool: Any, name: str, parts: int = 1) -> AnyPages:
    """The pages of a host pool: in their places where the pool tells these, through copies otherwise.

    Raises UnsupportedError, with both reasons, for a pool that allows neither.
    """
    try:
        return HostPages(pool, name, parts)
    except UnsupportedError as in_place:
        if parts > 1:
            raise
        try:
            return CopiedPages(pool, name)
        except UnsupportedError as copied:
            reason = f"{in_place.reason}, and {copied.reason}"
            raise UnsupportedError(in_place.subject, reason, in_place.remedy) from copied


class CopiedPages(PoolPages):
    """The pages of one host pool as copies; see the module docstring. Thread-safe as far as the pool's methods are."""

    def __init__(self, pool: Any, name: str) -> None:
        """Raises UnsupportedError for a pool that does not give its pages as flat tensors."""
        super().__init__(pool, name)
        try:
            empty = pool.get_dummy_flat_data_page()
            self._dtype: torch.dtype = empty.dtype
            self.page_bytes = empty.numel() * empty.element_size()
            given = {self._flat(page).numel() for page in (0, self._page_count - 1)}
        except Exception as error:
            raise UnsupportedError(
                f"host pool {name!r} ({type(pool).__name__})",
                f"it gives no flat pages ({type(error).__name__}: {error})",
            ) from error
        if given != {self.page_bytes} or not self.page_bytes:
            raise UnsupportedError(
                f"host pool {name!r} ({type(pool).__name__})",
                f"its flat pages have {sorted(given)} bytes where it promises {self.page_bytes}",
            )
        self._stride = -(-self.page_bytes // _ALIGNMENT) * _ALIGNMENT
        self._at_once = max(1, COPIES_AT_ONCE // self._stride)

    def describe(self, logical_dtype: str) -> PoolIdentity:
        """Never equal to that of pages in place: the byte order of flat pages is the pool's own affair."""
        identity = super().describe(logical_dtype)
        more = [(name, str(value)) for name in _GEOMETRY_ATTRIBUTES if (value := getattr(self.pool, name, None))]
        more += [
            (f"slot_state{number}", f"{state.dtype} {tuple(state.shape[1:])}")
            for number, state in enumerate(getattr(self.pool, "slot_state_buffers", ()))
        ]
        return replace(identity, kind=f"copied:{identity.kind}", geometry=(*identity.geometry, *more))

    def read(
        self, keys: PageKeys, numbers: npt.NDArray[np.int64], get: Callable[[PageBatch], list[GetResult]]
    ) -> list[GetResult]:
        """Read these pages through ``get`` into the pool. Only pages with a HIT are touched there.

        Raises what the pool raises when it takes a page; what was put there until then is not to be relied on.
        """
        results: list[GetResult] = []
        for some, places in self._portions(keys, numbers):
            copies = self._copies(len(places))
            found = get(self._batch(some, copies))
            for copy, place, result in zip(copies, places.tolist(), found, strict=True):
                if result is GetResult.HIT:
                    page = torch.from_numpy(copy).view(self._dtype)
                    self.pool.set_from_flat_data_page(place * self.page_size, page)
            results += found
        return results

    def write(
        self, keys: PageKeys, numbers: npt.NDArray[np.int64], put: Callable[[PageBatch], list[SetResult]]
    ) -> list[SetResult]:
        """Write these pages of the pool through ``put``."""
        results: list[SetResult] = []
        for some, places in self._portions(keys, numbers):
            copies = self._copies(len(places))
            for copy, place in zip(copies, places.tolist(), strict=True):
                torch.from_numpy(copy).copy_(self._flat(place))
            results += put(self._batch(some, copies))
        return results

    def _portions(
        self, keys: PageKeys, numbers: npt.NDArray[np.int64]
    ) -> Iterator[tuple[PageKeys, npt.NDArray[np.int64]]]:
        for begin in range(0, len(numbers), self._at_once):
            some = slice(begin, begin + self._at_once)
            yield PageKeys(keys.identity, np.ascontiguousarray(keys.words[some])), numbers[some]

    def _copies(self, pages: int) -> npt.NDArray[np.uint8]:
        """Memory for so many pages, shape (pages, page_bytes)."""
        memory = np.empty(pages * self._stride + _ALIGNMENT, np.uint8)
        begin = -memory.ctypes.data % _ALIGNMENT
        return memory[begin : begin + pages * self._stride].reshape(pages, self._stride)[:, : self.page_bytes]

    def _batch(self, keys: PageKeys, copies: npt.NDArray[np.uint8]) -> PageBatch:
        def views() -> list[Segments]:
            return [(copy.data,) for copy in copies]

        starts = copies.ctypes.data + self._stride * np.arange(len(copies), dtype=np.int64)
        addresses = Addresses(starts.reshape(-1, 1), np.array([self.page_bytes], np.int64), self.page_bytes)
        return PageBatch(keys, PageMemory(addresses, views), [self.page_bytes] * len(copies))

    def _flat(self, page: int) -> torch.Tensor:
        flat: torch.Tensor = self.pool.get_data_page(page * self.page_size)
        return flat.detach().contiguous().view(torch.uint8).reshape(-1)


AnyPages = HostPages | CopiedPages
"""The pages of a pool are one of the two kinds."""

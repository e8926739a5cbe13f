"""The memory and the identity of each page of SGLang's host pools, for every pool and layout with page buffers.

A host pool's ``get_page_buffer_meta(indices)`` returns the addresses and sizes of the contiguous runs of each page.
In all of SGLang's pools these addresses are linear in the page number. This is verified once at registration, so that a
batch costs slices instead of SGLang's Python loops. Pages of a pool without addresses, or with non-linear ones, are
copied (``CopiedPages``). Reasons: docs/decisions/sglang.md.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from hicache_ext.errors import UnsupportedError
from hicache_ext.page.identity import PoolIdentity
from hicache_ext.page.memory import Addresses, PageMemory, Segments
from hicache_ext.sglang.releases import format_facts, pool_fact
from hicache_ext.storage.contract.store import GetResult, PageBatch, PageKeys, SetResult

Result = TypeVar("Result")

_GEOMETRY_ATTRIBUTES = (
    "layer_num",
    "target_layer_num",
    "start_layer",
    "end_layer",
    "head_num",
    "head_dim",
    "v_head_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "kv_cache_dim",
    "index_head_dim",
    "indexer_page_stride_size",
    "quant_block_size",
    "size_per_token",
    "storage_format_tag",
    "temporal_dtype",
    "conv_dtype",
    "indexer_dtype",
    "ring_size",
)
"""Attributes of SGLang's host pools that determine a page's bytes; not every pool has all of them."""

_SPLIT_WITH_HEADS = ("head_num", "size_per_token")


class PoolPages:
    """The pages of one host pool, by number, and their identity. Thread-safe.

    ``page_bytes`` is the payload of a page, which is stored as ``parts`` objects of ``part_sizes`` bytes;
    ``segment_sizes`` are the sizes of the first object's segments.
    """

    page_bytes: int
    part_sizes: tuple[int, ...]
    segment_sizes: tuple[int, ...]
    parts = 1

    def __init__(self, pool: Any, name: str) -> None:
        """Raises UnsupportedError for a pool without pages."""
        self.name = name
        self.pool = pool
        self.page_size = int(pool.page_size)
        self._page_count = int(pool.size) // self.page_size
        self._tokens = np.arange(self.page_size)
        if self._page_count < 1:
            raise UnsupportedError(f"host pool {name!r}", "it has no pages")

    def page_numbers(
        self, host_indices: torch.Tensor | None, pages: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_] | None]:
        """Return the pool's page for each of ``pages`` keys, from SGLang's token indices (pages * page_size of them).

        The second result says which pages are valid, that is, whose indices are an aligned run inside the pool; it is
        None if all are. If the number of indices does not fit, none is.
        """
        if host_indices is None or host_indices.numel() != pages * self.page_size:
            return np.zeros(pages, np.int64), np.zeros(pages, np.bool_)
        if host_indices.dtype is not torch.int64 or not host_indices.is_cpu:
            host_indices = host_indices.detach().cpu().to(torch.int64)
        indices: npt.NDArray[np.int64] = np.ascontiguousarray(host_indices.numpy()).reshape(pages, self.page_size)
        numbers = indices[:, 0] // self.page_size
        aligned = indices == (numbers * self.page_size)[:, None] + self._tokens
        if not pages or (aligned.all() and numbers.min() >= 0 and numbers.max() < self._page_count):
            return numbers, None
        return numbers, aligned.all(axis=1) & (numbers >= 0) & (numbers < self._page_count)

    def describe(self, logical_dtype: str) -> PoolIdentity:
        """Return the pool's part of the page identity."""
        geometry = []
        for attribute in _GEOMETRY_ATTRIBUTES:
            value = pool_fact(self.pool, attribute)
            if isinstance(value, int) and attribute in _SPLIT_WITH_HEADS:
                value //= self.parts
            if isinstance(value, int | str | torch.dtype) and not isinstance(value, bool):
                geometry.append((attribute, str(value)))
        geometry += format_facts(self.pool)
        return PoolIdentity(
            name=self.name,
            kind=type(self.pool).__name__,
            dtype=logical_dtype,
            layout=str(getattr(self.pool, "layout", "")),
            page_size=self.page_size,
            segments=self.segment_sizes,
            geometry=tuple(geometry),
        )


class HostPages(PoolPages):
    """The memory of the pages of one host pool; valid as long as the pool's buffers.

    ``parts`` is 1, or the number of head groups where SGLang splits heads so that deployments of different TP can share
    (page_head layout with tp_lcm_size).
    """

    def __init__(self, pool: Any, name: str, parts: int = 1) -> None:
        """Raises UnsupportedError for a pool that does not expose the addresses of its pages."""
        super().__init__(pool, name)
        self.parts = parts
        runs = self._measure_runs()
        # The memory belongs to the pool, which is kept alive by self.pool.
        last = self._page_count - 1
        self._memory = [
            memoryview((ctypes.c_ubyte * (stride * last + size)).from_address(start)).cast("B")
            for start, stride, size in runs
        ]
        # One row per part: the runs of page p are at ``starts + p * strides``.
        self._starts, self._strides, self._sizes = (
            np.array(column, np.int64).reshape(parts, -1) for column in zip(*runs, strict=True)
        )
        self.segment_sizes = tuple(self._sizes[0].tolist())
        self.part_sizes = tuple(self._sizes.sum(axis=1).tolist())
        self.page_bytes = sum(self.part_sizes)

    def read(
        self, keys: Sequence[PageKeys], numbers: npt.NDArray[np.int64], move: Callable[[PageBatch], list[Result]]
    ) -> list[Result]:
        """Read these pages into the pool, or write them from there; return results with a page's parts adjacent.

        ``keys`` has, for each part, the keys of all pages.
        """
        if self.parts == 1:
            return move(PageBatch(keys[0], self.memory_of(numbers), [self.page_bytes] * len(numbers)))
        buffers = zip(*[self.memory_of(numbers, part) for part in range(self.parts)], strict=True)
        part_keys = [key for page in zip(*keys, strict=True) for key in page]
        sizes = [*self.part_sizes] * len(numbers)
        return move(PageBatch(part_keys, [segments for page in buffers for segments in page], sizes))

    write = read

    def memory_of(self, page_numbers: npt.NDArray[np.int64], part: int = 0) -> PageMemory:
        """Return the memory of these pages, with ``buffers_of`` computed lazily."""
        pages = self._starts[part] + page_numbers[:, None] * self._strides[part]
        addresses = Addresses(pages, self._sizes[part], self.part_sizes[part])
        return PageMemory(addresses, lambda: self.buffers_of(page_numbers.tolist(), part))

    def buffers_of(self, page_numbers: Sequence[int], part: int = 0) -> list[Sequence[memoryview]]:
        """Return the segments of one stored object of each page, in payload order.

        The loop goes run by run: otherwise most of a page's cost in Python would arise here.
        """
        strides, sizes = self._strides[part].tolist(), self._sizes[part].tolist()
        runs = self._memory[part * len(sizes) : (part + 1) * len(sizes)]
        columns: list[list[memoryview]] = []
        for memory, stride, size in zip(runs, strides, sizes, strict=True):
            columns.append([memory[page * stride : page * stride + size] for page in page_numbers])
        return list(zip(*columns, strict=True))

    def _measure_runs(self) -> list[tuple[int, int, int]]:
        """Return (address on page 0, stride to the next page, bytes) of each run."""
        first = self._buffers(0)
        last_page = self._page_count - 1
        strides = [0] * len(first)
        if last_page:
            strides = [later - earlier for (earlier, _), (later, _) in zip(first, self._buffers(1), strict=True)]
        for page in {last_page, last_page // 2}:
            expected = [(address + page * stride, size) for (address, size), stride in zip(first, strides, strict=True)]
            if self._buffers(page) != expected or any(stride < 0 for stride in strides):
                raise UnsupportedError(
                    f"host pool {self.name!r} ({type(self.pool).__name__})",
                    "the addresses of its pages do not follow from the page number",
                )
        if len(first) % self.parts:
            raise UnsupportedError(
                f"host pool {self.name!r}", f"its {len(first)} page buffers cannot be split in {self.parts} head groups"
            )
        return [(start, stride, size) for (start, size), stride in zip(first, strides, strict=True)]

    def _buffers(self, page: int) -> list[tuple[int, int]]:
        """Return SGLang's own (address, bytes) of each run of one page."""
        indices = torch.arange(page * self.page_size, (page + 1) * self.page_size, dtype=torch.int64)
        try:
            if self.parts == 1:
                addresses, sizes = self.pool.get_page_buffer_meta(indices)
            else:
                addresses, sizes = self.pool.get_split_heads_page_buffer_meta(indices, self.parts)
        except (AttributeError, NotImplementedError, ValueError, TypeError, AssertionError) as error:
            raise UnsupportedError(
                f"host pool {self.name!r} ({type(self.pool).__name__}, layout {getattr(self.pool, 'layout', '?')})",
                f"it exposes no page buffers ({type(error).__name__}: {error})",
                "choose another --hicache-mem-layout",
            ) from error
        if not addresses or len(addresses) != len(sizes):
            raise UnsupportedError(f"host pool {self.name!r}", "it reports no page buffers")
        return [(int(address), int(size)) for address, size in zip(addresses, sizes, strict=True)]


def is_logical_anchor(pool: Any) -> bool:
    """Return whether a pool has page numbers but no memory, so that only its sidecars hold bytes (DeepSeek V4)."""
    if getattr(pool, "kv_buffer", pool) is not None:
        return False
    try:
        return pool.get_page_buffer_meta(torch.arange(int(pool.page_size), dtype=torch.int64)) is None
    except Exception:  # noqa: BLE001 - the pool's memory is elsewhere or missing, which ``_measure_runs`` reports
        return False


# -- through copies ----------------------------------------------------------------------------------------------------
# Pages of host pools that do not expose their addresses pass through our own copies.
#
# SGLang's host pools have two interfaces for storage. Most expose the addresses of a page (see above). Some do not, in
# some layouts, or have parts that no address covers (the side states of Mamba slots). All but a few return a page as
# one flat tensor and accept it: ``get_data_page(index)`` and ``set_from_flat_data_page(index, tensor)``.
#
# A read goes into our own memory. A page is copied into the host pool only after the store has verified it, and before
# the call returns. Reasons: docs/decisions/sglang.md.

COPY_BATCH_BYTES = 64 << 20
"""Bytes of copies that one call holds; a larger page is copied alone. SGLang makes two concurrent calls."""

_ALIGNMENT = 64
"""Copies begin at multiples of this, so that their bytes can be viewed as any dtype."""

_FLAT_GEOMETRY = (
    "num_mamba_layers",
    "temporal_state_shape",
    "conv_state_shapes",
    "item_bytes",
    "state_page_bytes",
    "ring_size",
    "row_bytes",
)
"""Attributes that determine the flat page of some pools but not the size of its only run."""


def pages_of(pool: Any, name: str, parts: int = 1) -> AnyPages:
    """Return the pages of a host pool: in place if the pool exposes their addresses, through copies otherwise.

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
    """The pages of one host pool, accessed through copies. Thread-safe as far as the pool's methods are."""

    def __init__(self, pool: Any, name: str) -> None:
        """Raises UnsupportedError for a pool that does not return its pages as flat tensors."""
        super().__init__(pool, name)
        try:
            empty = pool.get_dummy_flat_data_page()
            self._dtype: torch.dtype = empty.dtype
            self.page_bytes = empty.numel() * empty.element_size()
            self.part_sizes = self.segment_sizes = (self.page_bytes,)
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
        self._batch_pages = max(1, COPY_BATCH_BYTES // self._stride)

    def describe(self, logical_dtype: str) -> PoolIdentity:
        """Return an identity that never equals that of pages in place: each pool orders a flat page's bytes itself."""
        identity = super().describe(logical_dtype)
        more = [(name, str(value)) for name in _FLAT_GEOMETRY if (value := getattr(self.pool, name, None))]
        more += [
            (f"slot_state{number}", f"{state.dtype} {tuple(state.shape[1:])}")
            for number, state in enumerate(getattr(self.pool, "slot_state_buffers", ()))
        ]
        return replace(identity, kind=f"copied:{identity.kind}", geometry=(*identity.geometry, *more))

    def read(
        self, keys: Sequence[PageKeys], numbers: npt.NDArray[np.int64], get: Callable[[PageBatch], list[GetResult]]
    ) -> list[GetResult]:
        """Read these pages through ``get`` into the pool. Only pages with a HIT are touched there.

        Raises what the pool raises when it accepts a page; pages already copied must not be relied on then.
        """
        results: list[GetResult] = []
        for batch, copies, places in self._portions(keys[0], numbers):
            found = get(batch)
            for copy, place, result in zip(copies, places, found, strict=True):
                if result is GetResult.HIT:
                    page = torch.from_numpy(copy).view(self._dtype)
                    self.pool.set_from_flat_data_page(place * self.page_size, page)
            results += found
        return results

    def write(
        self, keys: Sequence[PageKeys], numbers: npt.NDArray[np.int64], put: Callable[[PageBatch], list[SetResult]]
    ) -> list[SetResult]:
        """Write these pages of the pool through ``put``."""
        results: list[SetResult] = []
        for batch, copies, places in self._portions(keys[0], numbers):
            for copy, place in zip(copies, places, strict=True):
                torch.from_numpy(copy).copy_(self._flat(place))
            results += put(batch)
        return results

    def _portions(
        self, keys: PageKeys, numbers: npt.NDArray[np.int64]
    ) -> Iterator[tuple[PageBatch, npt.NDArray[np.uint8], list[int]]]:
        """Yield groups of pages that are copied together: the batch, its memory with one row per page, page numbers."""
        for begin in range(0, len(numbers), self._batch_pages):
            places = numbers[begin : begin + self._batch_pages]
            batch_keys = PageKeys(keys.identity, np.ascontiguousarray(keys.words[begin : begin + self._batch_pages]))
            memory = np.empty(len(places) * self._stride + _ALIGNMENT, np.uint8)
            first = -memory.ctypes.data % _ALIGNMENT
            rows = memory[first : first + len(places) * self._stride].reshape(len(places), self._stride)
            copies = rows[:, : self.page_bytes]
            starts = copies.ctypes.data + self._stride * np.arange(len(copies), dtype=np.int64)
            addresses = Addresses(starts.reshape(-1, 1), np.array([self.page_bytes], np.int64), self.page_bytes)
            memory_of_pages = PageMemory(addresses, partial(_rows, copies))
            yield PageBatch(batch_keys, memory_of_pages, [self.page_bytes] * len(copies)), copies, places.tolist()

    def _flat(self, page: int) -> torch.Tensor:
        flat: torch.Tensor = self.pool.get_data_page(page * self.page_size)
        return flat.detach().contiguous().view(torch.uint8).reshape(-1)


def _rows(copies: npt.NDArray[np.uint8]) -> list[Segments]:
    return [(copy.data,) for copy in copies]


AnyPages = HostPages | CopiedPages
"""Either kind of a pool's pages."""

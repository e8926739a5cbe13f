"""Host memory of the file benchmark: pages of one real SGLang host pool, and the keys that SGLang would give them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hicache_ext.errors import BenchmarkError
from hicache_ext.page.hashes import page_hashes

if TYPE_CHECKING:
    import torch

PAGE_SIZE = 16
"""Tokens per page."""
LAYER_BYTES = 16 * 1024
"""Bytes of a page in one layer, K and V together: payloads are multiples of it."""
GEOMETRIES = ("mha", "mla")
_STAMP = 8


@dataclass(frozen=True, slots=True)
class HostBatch:
    """Pages of the host pool that one call takes: their numbers, and the token indices SGLang would pass."""

    pages: range
    indices: torch.Tensor


class HostBuffers:
    """One SGLang host pool, half of it pages to write (noise), half of it pages to read into.

    ``stamp`` makes the pages to write those of a numbered batch, ``check`` compares the pages read with them.
    """

    def __init__(self, geometry: str, payload: int, batch: int) -> None:
        import torch

        from hicache_ext.sglang.host_pool import HostPages
        from hicache_ext.testing.host_pools import mha_pools, mla_pools, page_indices

        layers, small = divmod(payload, LAYER_BYTES)
        if small:
            layers = 1
        width = payload // layers // (2 * PAGE_SIZE)  # elements of two bytes per token and layer
        if payload != width * layers * 2 * PAGE_SIZE or width % 16:
            raise BenchmarkError(f"a page of {payload} bytes cannot be made: take a multiple of {LAYER_BYTES}")
        if geometry == "mha":
            pools = mha_pools(page_size=PAGE_SIZE, pages=2 * batch, layers=layers, heads=2, head_dim=width // 4)
        else:
            rope = width // 8
            pools = mla_pools(
                page_size=PAGE_SIZE,
                pages=2 * batch,
                layers=layers,
                kv_lora_rank=width - rope,
                qk_rope_head_dim=rope,
            )
        self.pool: Any = pools.host
        self.geometry = geometry
        self.payload = payload
        self.batch = batch
        self.pages = HostPages(pools.host, "bench")
        if self.pages.page_bytes != payload:
            raise BenchmarkError(f"the host pool's pages have {self.pages.page_bytes} bytes, not {payload}")
        flat: npt.NDArray[np.uint8] = pools.host.kv_buffer.view(torch.uint8).numpy()
        segments = len(self.pages.segment_sizes)
        self._bytes = flat.reshape(segments, -1, payload // segments)
        self.sources, self.targets = (
            HostBatch(pages, page_indices(PAGE_SIZE, list(pages))) for pages in (range(batch), range(batch, 2 * batch))
        )

    def stamp(self, number: int) -> None:
        """Make the pages to write those of batch ``number``: their first bytes say which page it is."""
        self._bytes[:, : self.batch, :_STAMP] = self._stamps(number)

    def wipe(self) -> None:
        """Forget what was read."""
        self._bytes[:, self.batch : 2 * self.batch] = 0

    def check(self, number: int, contender: str) -> None:
        """Raise BenchmarkError unless the pages read are, byte for byte, those of batch ``number``."""
        self.stamp(number)
        for page in range(self.batch):
            self._compare(page, number, contender)

    def check_page(self, page: int, number: int, contender: str) -> None:
        """``check`` for one page of the batch."""
        self.stamp(number)
        self._compare(page, number, contender)

    def _compare(self, page: int, number: int, contender: str) -> None:
        for segment in self._bytes:
            if not np.array_equal(segment[self.batch + page], segment[page]):
                raise BenchmarkError(f"{contender}: page {page} of batch {number} came back with other bytes")

    def first_sources(self, count: int) -> HostBatch:
        """The first ``count`` pages to write."""
        return HostBatch(self.sources.pages[:count], self.sources.indices[: count * PAGE_SIZE])

    def target(self, position: int) -> HostBatch:
        """One page to read into."""
        begin = position * PAGE_SIZE
        return HostBatch(self.targets.pages[position : position + 1], self.targets.indices[begin : begin + PAGE_SIZE])

    def _stamps(self, number: int) -> npt.NDArray[np.uint8]:
        segments = len(self._bytes)
        first = number * self.batch * segments
        return np.arange(first, first + self.batch * segments, dtype=np.uint64).view(np.uint8).reshape(segments, -1, 8)


def page_keys(name: str, count: int) -> list[str]:
    """``count`` keys as SGLang makes them: a chain of SHA-256, in hex."""
    return [page_hash.hex() for page_hash in page_hashes(range(count), 1, name.encode())]

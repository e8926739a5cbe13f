"""Token slots on a machine without Triton: SGLang does without its kernels there itself only since 0.5.22."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class _Launched:
    """``kernel[grid](...)`` of a function in plain torch."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._function


def allocate_without_triton(*_: Any, **__: Any) -> None:
    """BEFORE hook on the constructor of PagedTokenToKVPoolAllocator."""
    from sglang.srt.mem_cache.allocator import paged

    if hasattr(paged, "alloc_decode_naive"):
        return

    def extend(
        prefix_lens: torch.Tensor,
        seq_lens: torch.Tensor,
        last_loc: torch.Tensor,
        free_pages: torch.Tensor,
        slots: torch.Tensor,
        _: int,
        page_size: int,
    ) -> None:
        paged.alloc_extend_naive(prefix_lens, seq_lens, last_loc, free_pages, slots, page_size, slots.device)

    paged.alloc_extend_kernel = _Launched(extend)
    paged.alloc_decode_kernel = _Launched(_next_slots)


def _next_slots(
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    slots: torch.Tensor,
    _: int,
    page_size: int,
) -> None:
    """For one token more of each request: the slot behind its last one, or the first of a free page."""
    slots.copy_(last_loc + 1)
    begins = ((seq_lens - 1) % page_size == 0).nonzero().flatten()[: len(free_pages)]
    slots[begins] = free_pages[: len(begins)] * page_size

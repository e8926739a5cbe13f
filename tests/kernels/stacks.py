"""Stacks of plain memory, without SGLang: a host buffer in any layout and device buffers, all on the CPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hicache_ext.kernels.geometry import LayerStack, device_rows, host_rows
from tests.rigs.fake_cuda import FakeGpu


@dataclass(frozen=True, slots=True)
class PlainMemory:
    """One component per layer; rows of ``row`` bytes."""

    stack: LayerStack
    host: torch.Tensor
    device: list[torch.Tensor]

    def gpu(self) -> FakeGpu:
        """A machine for which this memory is registered and allocated."""
        return FakeGpu(
            self.stack.registrations, [(buffer.data_ptr(), buffer.numel()) for buffer in self.device], seed=3
        )


def plain_memory(
    *, layout: str = "page_first_direct", layers: int = 4, pages: int = 8, page_size: int = 4, row: int = 32
) -> PlainMemory:
    tokens = pages * page_size
    host = torch.randint(0, 256, (layers * tokens * row,), dtype=torch.uint8)
    device = [torch.randint(0, 256, (tokens, row), dtype=torch.uint8) for _ in range(layers)]
    copies = []
    for layer, buffer in enumerate(device):
        rows = host_rows(
            host,
            layout=layout,
            layer=layer,
            layer_num=layers,
            page_size=page_size,
            token_count=tokens,
            segments=1,
            segment_bytes=row,
        )
        on_device = device_rows(buffer, page_size=page_size, row_stride=row, segment_bytes=row)
        copies.append([(rows, on_device)])
    stack = LayerStack(
        copies,
        page_size=page_size,
        segments=1,
        segment_bytes=row,
        layout=layout,
        registrations=[(host.data_ptr(), host.numel())],
    )
    return PlainMemory(stack, host, device)

"""Copies between SGLang's real host and device pools, through the hooks, in every release that has what they need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hicache_ext.sglang import kernel_hooks
from hicache_ext.testing.host_pools import fill_with_noise, mha_pools, page_indices
from tests.rigs.host_pool_kinds import mla_pools

PAGE_SIZE = 16
CASES = [
    *((mha_pools, layout, "kernel") for layout in ("layer_first", "page_first", "page_head")),
    *((mha_pools, layout, "direct") for layout in ("layer_first", "page_first_direct")),
    *((mla_pools, layout, "kernel") for layout in ("layer_first", "page_first")),
    *((mla_pools, layout, "direct") for layout in ("layer_first", "page_first_direct")),
]


def device_tensors(device_pool: Any) -> list[torch.Tensor]:
    if hasattr(device_pool, "kv_buffer"):
        return list(device_pool.kv_buffer)
    return [*device_pool.k_buffer, *device_pool.v_buffer]


@pytest.mark.parametrize(("make", "layout", "io_backend"), CASES, ids=lambda case: getattr(case, "__name__", case))
def test_what_is_copied_to_the_host_and_back_is_what_it_was(
    make: Callable[..., Any], layout: str, io_backend: str
) -> None:
    pools = make(layout=layout, page_size=PAGE_SIZE, layers=3)
    generator = torch.Generator().manual_seed(1)
    for tensor in device_tensors(pools.device):
        raw = tensor.view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=generator))
    before = [tensor.clone() for tensor in device_tensors(pools.device)]
    # Other pages on the device than on the host.
    on_host, on_device = page_indices(PAGE_SIZE, [2, 5, 1]), page_indices(PAGE_SIZE, [4, 1, 7])

    def original(*_: Any, **__: Any) -> None:
        pytest.fail("the hooks left it to SGLang, which cannot copy here")

    kernel_hooks.around_back_up(original, pools.host, pools.device, on_host, on_device, io_backend)
    for tensor in device_tensors(pools.device):
        tensor[on_device] = 0
    for layer in range(3):
        kernel_hooks.around_load(original, pools.host, pools.device, on_host, on_device, layer, io_backend)
    for tensor, was in zip(device_tensors(pools.device), before, strict=True):
        assert torch.equal(tensor.view(torch.uint8), was.view(torch.uint8))
    fill_with_noise(pools.host, seed=2)
    kernel_hooks.around_load(original, pools.host, pools.device, on_host, on_device, 1, io_backend)
    changed = [
        not torch.equal(tensor.view(torch.uint8), was.view(torch.uint8))
        for tensor, was in zip(device_tensors(pools.device), before, strict=True)
    ]
    assert changed == [layer % 3 == 1 for layer in range(len(changed))]


@pytest.mark.parametrize(("later", "copied"), [(None, True), ("elsewhere", False)])
def test_an_argument_of_a_later_sglang_that_is_not_at_its_default_leaves_the_copy_to_sglang(
    later: str | None, copied: bool
) -> None:
    """What it asks for is not known: rows of another place, perhaps."""
    pools = mha_pools(page_size=PAGE_SIZE)
    asked = []

    def original(*_: Any, is_draft: bool = False, place: str | None = None) -> None:
        asked.append(place)

    tokens = page_indices(PAGE_SIZE, [1]), page_indices(PAGE_SIZE, [2])
    kernel_hooks.around_back_up(original, pools.host, pools.device, *tokens, "kernel", place=later)
    kernel_hooks.around_load(original, pools.host, pools.device, *tokens, 1, "kernel", place=later)
    assert asked == ([] if copied else [later, later])

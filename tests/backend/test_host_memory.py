"""The host pools' memory as stores are told of it: all of each pool, each byte once, when the pool is registered."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from hicache_ext.storage.tiered import TieredStore
from hicache_ext.testing.host_pools import MHA_LAYOUTS, MLA_LAYOUTS, mha_pools, mla_pools
from hicache_ext.testing.sglang_cpu import prepare_process

pytestmark = pytest.mark.sglang


@pytest.mark.parametrize(
    ("make", "layout"),
    [(mha_pools, layout) for layout in MHA_LAYOUTS] + [(mla_pools, layout) for layout in MLA_LAYOUTS],
    ids=[f"mha {layout}" for layout in MHA_LAYOUTS] + [f"mla {layout}" for layout in MLA_LAYOUTS],
)
def test_a_pool_is_registered_once_and_every_page_lies_in_it(
    open_backend: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, make: Callable[..., Any], layout: str
) -> None:
    told: list[tuple[int, int]] = []

    def record(self: TieredStore, regions: list[memoryview]) -> None:
        told.extend((ctypes.addressof(ctypes.c_char.from_buffer(region)), region.nbytes) for region in regions)

    monkeypatch.setattr(TieredStore, "register_host_memory", record)
    prepare_process()
    host = make(layout=layout).host
    # Registers the pool twice, as SGLang does: as the anchor and as one of its pools.
    backend = open_backend(host, is_mla_model=make is mla_pools)

    places = sorted((address, address + size) for address, size in told)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(places)), "some bytes twice"
    tensor = host.kv_buffer
    first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    assert all(first <= begin and end <= last for begin, end in places), "bytes that are not the pool's"
    pages = backend._pools["kv"].pages
    for page in (0, 1, 16):
        for segment in pages.buffers(page):
            address = ctypes.addressof(ctypes.c_char.from_buffer(segment))
            assert any(begin <= address and address + segment.nbytes <= end for begin, end in places)

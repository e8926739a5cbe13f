"""One pool, two doors: what HiCache stored in page_first the linker loads, and the other way round."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache_ext.sglang import kernel_hooks
from hicache_ext.sglang.releases import comes_with, installed_release
from hicache_ext.testing.host_pools import make_storage_config, mha_pools
from tests.backend import linker_rig as rig
from tests.backend.test_conformance import extra_config as hicache_config
from tests.rigs.host_pool_kinds import mla_pools

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(not comes_with(installed_release(), "0.5.23"), reason="SGLang has no linker of others"),
]

KEYS = rig.hashes(5)


@pytest.fixture(params=["mha", "mla"])
def doors(request: Any, tmp_path: Path) -> Iterator[tuple[Any, Any, Any, Any]]:
    """A linker and a HiCache backend over one directory; the backend's host pool, and the device of both."""
    from sglang.srt.mem_cache.hicache_storage import PoolName

    from hicache_ext.sglang.backend import HiCacheExtBackend

    mla = request.param == "mla"
    make = mla_pools if mla else mha_pools
    host = make(layout="page_first", page_size=rig.PAGE, pages=rig.PAGES, layers=rig.LAYERS)
    device = rig.DEVICES[request.param]()
    device.fill()
    with rig.server_context():
        linker = rig.linker_of(device, rig.extra_config(tmp_path / "l3"))
        config = make_storage_config(
            extra_config=hicache_config(tmp_path / "l3", model={"id": rig.MODEL}), is_mla_model=mla
        )
        backend = HiCacheExtBackend(config, {})
        backend.register_mem_pool_host(host.host)
        backend.register_mem_host_pool_v2(host.host, PoolName.KV)
        try:
            yield linker, backend, host, device
        finally:
            backend.close()
            linker.close()


def copied(device_pool: Any) -> list[Any]:
    return (
        [*device_pool.kv_buffer]
        if hasattr(device_pool, "kv_buffer")
        else [*device_pool.k_buffer, *device_pool.v_buffer]
    )


def no_way(*_: Any, **__: Any) -> None:
    pytest.fail("the hooks left a copy to SGLang, which cannot copy here")


def test_both_doors_have_one_identity(doors: Any) -> None:
    linker, backend, _, _ = doors
    assert linker._backend.served.usable("kv").digests == backend.served.usable("kv").digests


def test_the_linker_loads_what_hicache_stored(doors: Any) -> None:
    linker, backend, host, device = doors
    for mine, others in zip(device.buffers["kv"], copied(host.device), strict=True):
        others.copy_(mine)
    on_host, on_device = rig.indices_of(rig.PAGE, [9, 2, 3, 7, 1]), rig.indices_of(rig.PAGE, [11, 12, 13, 14, 15])
    kernel_hooks.around_back_up(no_way, host.host, host.device, on_host, on_device, "kernel")
    assert backend.batch_set_v1(KEYS, on_host) == [True] * 5
    assert rig.waited(linker, "r", [rig.transfer("kv", KEYS)]) == [1, 2, 3, 4, 5]
    assert rig.loaded(linker, "r", [rig.pages(device, "kv", KEYS, [50, 51, 52, 53, 54])])
    assert device.content("kv", [50, 51, 52, 53, 54]) == device.content("kv", [11, 12, 13, 14, 15])


def test_hicache_reads_what_the_linker_stored(doors: Any) -> None:
    linker, backend, host, device = doors
    assert linker.offload([rig.pages(device, "kv", KEYS, [11, 12, 13, 14, 15])])
    assert rig.stored(linker)
    on_host, on_device = rig.indices_of(rig.PAGE, [9, 2, 3, 7, 1]), rig.indices_of(rig.PAGE, [50, 51, 52, 53, 54])
    assert backend.batch_exists(KEYS) == 5
    assert backend.batch_get_v1(KEYS, on_host) == [True] * 5
    for layer in range(rig.LAYERS):
        kernel_hooks.around_load(no_way, host.host, host.device, on_host, on_device, layer, "kernel")
    there = [buffer[on_device] for buffer in copied(host.device)]
    here = [buffer[rig.indices_of(rig.PAGE, [11, 12, 13, 14, 15])] for buffer in device.buffers["kv"]]
    assert all((one == other).all() for one, other in zip(_raw(there), _raw(here), strict=True))


@pytest.mark.parametrize(("kind", "beside"), [("swa", "swa"), ("mamba", "mamba")])
def test_hicache_restores_a_hybrid_prefix_that_the_linker_stored(kind: str, beside: str, tmp_path: Path) -> None:
    """With the host pools that SGLang gives HiCache for such a model, which are as large as HiCache has them."""
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

    from hicache_ext.sglang.backend import HiCacheExtBackend

    device = rig.DEVICES[kind]()
    device.fill()
    keys, last = KEYS, KEYS[-1:]
    before = device.content("kv", [1, 2, 3, 4, 5]), device.content(beside, [9])
    with rig.server_context():
        linker = rig.linker_of(device, rig.extra_config(tmp_path / "l3"))
        built = rig.pools_of_hicache(device)
        controller, group = built.cache_controller, built.host_pool_group
        config = controller._generate_storage_config(
            rig.MODEL, hicache_config(tmp_path / "l3", model={"id": rig.MODEL})
        )
        backend = HiCacheExtBackend(config, {})
        try:
            assert linker.offload(
                [rig.pages(device, "kv", keys, [1, 2, 3, 4, 5]), rig.pages(device, beside, last, [9])]
            )
            assert rig.stored(linker)
            backend.register_mem_pool_host(group.anchor_entry.host_pool)
            for entry in group.entries:
                backend.register_mem_host_pool_v2(entry.host_pool, entry.name)
            for name in ("kv", beside):
                assert backend.served.usable(name).digests == linker._backend.served.usable(name).digests
            asked = [rig.transfer(beside, last, trailing=True)]
            assert backend.batch_exists_v2(keys, asked).restorable_prefix_pages == [5]
            host = {name: group.alloc(size, pool=PoolName(name)) for name, size in _sizes(device, beside).items()}
            assert backend.batch_get_v1(keys, host["kv"]) == [True] * 5
            one = PoolTransfer(PoolName(beside), host_indices=host[beside], keys=last)
            assert backend.batch_get_v2([one]) == {PoolName(beside): [True]}
            one.device_indices = rig.indices_of(device.page_sizes[beside], [30])
            moved = controller._l2_load_transfers(host["kv"], rig.indices_of(rig.PAGE, [20, 21, 22, 23, 24]), [one])
            controller.l2_transfer_engine.submit_host_to_device(
                moved, transfer_layer_id_max=controller.transfer_layer_id_max
            )
            assert (device.content("kv", [20, 21, 22, 23, 24]), device.content(beside, [30])) == before
        finally:
            backend.close()
            linker.close()


def _sizes(device: rig.Device, beside: str) -> dict[str, int]:
    return {"kv": 5 * rig.PAGE, beside: device.page_sizes[beside]}


def _raw(tensors: list[Any]) -> list[Any]:
    import torch

    return [tensor.contiguous().view(torch.uint8) for tensor in tensors]

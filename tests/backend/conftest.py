"""Backends over one directory, closed at the end of each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache_ext.sglang.releases import end_registration
from hicache_ext.testing.host_pools import make_storage_config
from hicache_ext.testing.sglang_cpu import prepare_process
from tests.backend import linker_rig as rig
from tests.backend.ahead_rig import Rig
from tests.backend.test_conformance import extra_config
from tests.rigs import hybrid_on_cpu


@pytest.fixture(scope="session", autouse=True)
def _sglang() -> None:
    """Before the first import of SGLang, whichever file of these a process runs first."""
    prepare_process()
    from sglang.srt.plugins.hook_registry import HookRegistry

    hybrid_on_cpu.register()
    HookRegistry.apply_hooks()


@pytest.fixture
def open_backend(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """``open_backend(kv_pool, ours={...}, **storage_config)``: a backend over ``tmp_path / "l3"`` with its KV pool."""
    opened: list[Any] = []

    def open_(kv_pool: Any = None, ours: dict[str, Any] | None = None, **storage_config: Any) -> Any:
        config = make_storage_config(extra_config=extra_config(tmp_path / "l3", **(ours or {})), **storage_config)
        from sglang.srt.mem_cache.hicache_storage import PoolName

        from hicache_ext.sglang.backend import HiCacheExtBackend

        backend = HiCacheExtBackend(config, {})
        opened.append(backend)
        if kv_pool is not None:
            backend.register_mem_pool_host(kv_pool)
            backend.register_mem_host_pool_v2(kv_pool, PoolName.KV)
            end_registration(backend)
        return backend

    yield open_
    for backend in opened:
        backend.close()


@pytest.fixture
def open_rig(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    """``open_rig("mha", load_timeout="2s")``: a linker over ``tmp_path / "l3"``, with what waits before it."""
    opened: list[Rig] = []
    with rig.server_context(), rig.troubled_stores() as stores:

        def open_(kind: str = "mha", **linker: Any) -> Rig:
            opened.append(Rig(rig.DEVICES[kind](), tmp_path / "l3", stores, **linker))
            return opened[-1]

        yield open_
        for store in stores:
            store.mode = "well"
        for one in opened:
            one.linker.close()

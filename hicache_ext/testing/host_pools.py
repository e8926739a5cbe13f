"""Real SGLang device and host pools, small and on the CPU, and what SGLang gives a backend, for tests and benchmarks.

Call ``hicache_ext.testing.sglang_cpu.prepare_process`` before the first use in a process without a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hicache_ext.sglang.releases import mha_host_arguments


@dataclass(frozen=True, slots=True)
class Pools:
    """A host pool and the device pool it serves; ``host`` holds ``pages + 1`` pages, as SGLang's always do."""

    host: Any
    device: Any


def mha_pools(
    *,
    layout: str = "page_first",
    page_size: int = 16,
    pages: int = 16,
    layers: int = 2,
    heads: int = 2,
    head_dim: int = 32,
    dtype: torch.dtype = torch.bfloat16,
    allocator: str = "default",
    device: str = "cpu",
) -> Pools:
    """An MHATokenToKVPool and its MHATokenToKVPoolHost, the host buffer filled with random bytes.

    With ``device="cuda"`` the host buffer is page-locked and left as it is.
    """
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    on_gpu = device != "cpu"
    tokens = pages * page_size
    device_pool = mha_device_pool(pages, page_size, layers, heads=heads, head_dim=head_dim, dtype=dtype, device=device)
    source, facts = mha_host_arguments(device_pool, tokens)
    host = MHATokenToKVPoolHost(
        source,
        1.0,
        0,
        page_size,
        layout,
        pin_memory=on_gpu,
        device="cpu",
        allocator_type=allocator,
        **facts,
    )
    if not on_gpu:
        fill_with_noise(host)
    return Pools(host, device_pool)


def fill_with_noise(host: Any, seed: int = 0) -> None:
    """Random bytes in every buffer of a host pool, so that equality means something."""
    generator = torch.Generator().manual_seed(seed)
    flat = host.kv_buffer.view(torch.uint8)
    flat.copy_(torch.randint(0, 256, flat.shape, dtype=torch.uint8, generator=generator))


def page_indices(page_size: int, pages: list[int]) -> torch.Tensor:
    """The token indices of ``pages``, as SGLang's controllers pass them: int64, on the CPU."""
    return torch.cat([torch.arange(page * page_size, (page + 1) * page_size) for page in pages]).to(torch.int64)


def mha_device_pool(
    pages: int,
    page_size: int,
    layers: int,
    *,
    heads: int = 2,
    head_dim: int = 32,
    v_head_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
) -> Any:
    """SGLang's MHA pool on a device; ``v_head_dim`` None: as ``head_dim``."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    return MHATokenToKVPool(
        size=pages * page_size,
        page_size=page_size,
        dtype=dtype,
        head_num=heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        layer_num=layers,
        device=device,
        enable_memory_saver=False,
    )


def make_storage_config(**overrides: Any) -> Any:
    """Return the HiCacheStorageConfig that SGLang passes to a storage backend for a plain single-rank MHA model."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    facts: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": True,
        "model_name": "tiny",
        "extra_config": {},
    }
    facts |= overrides
    if "is_mla_model" not in HiCacheStorageConfig.__annotations__:  # as SGLang means to call it
        facts["is_rank_replicated"] = facts.pop("is_mla_model")
    return HiCacheStorageConfig(**facts)


def sglang_file_backend(config: Any, directory: Path) -> Any:
    """SGLang's own file backend, HiCacheFile."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile

    return HiCacheFile(config, str(directory))

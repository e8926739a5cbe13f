"""Real SGLang device and host pools, small and on the CPU, and what SGLang gives a backend, for tests and benchmarks.

Call ``hicache_ext.testing.sglang_cpu.prepare_process`` before the first use in a process without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hicache_ext.sglang.releases import mha_host_arguments, mla_host_arguments

MHA_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
"""Of ``--hicache-mem-layout``, for pools of MHA and GQA models."""
MLA_LAYOUTS = ("layer_first", "page_first", "page_first_direct")
"""The same for MLA models."""

PAGES = 12
"""Of the device pools behind ``mha_host``, ``mamba_host`` and ``minimax_index_host``."""
LAYERS = 3

HostPoolsByName = dict[str, Any]


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


def mla_pools(
    *,
    layout: str = "page_first",
    page_size: int = 16,
    pages: int = 16,
    layers: int = 2,
    kv_lora_rank: int = 64,
    qk_rope_head_dim: int = 16,
    dtype: torch.dtype = torch.bfloat16,
) -> Pools:
    """An MLATokenToKVPool and its MLATokenToKVPoolHost, the host buffer filled with random bytes."""
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    tokens = pages * page_size
    device = MLATokenToKVPool(
        size=tokens,
        page_size=page_size,
        dtype=dtype,
        kv_lora_rank=kv_lora_rank,
        qk_rope_head_dim=qk_rope_head_dim,
        layer_num=layers,
        device="cpu",
        enable_memory_saver=False,
    )
    source, facts = mla_host_arguments(device, tokens, layers)
    host = MLATokenToKVPoolHost(
        source,
        1.0,
        0,
        page_size,
        layout,
        pin_memory=False,
        device="cpu",
        **facts,
    )
    fill_with_noise(host)
    return Pools(host, device)


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


def mha_host(
    layout: str, *, page_size: int = 16, layers: int = LAYERS, v_head_dim: int | None = None, drafts: int = 0
) -> Any:
    """Return a host pool of an MHA model; ``drafts`` one-layer drafts are packed into the pages of the target."""
    from sglang.srt.mem_cache.pool_host.mha import get_mha_host_pool_cls

    def info_of(layer_num: int) -> Any:
        device = mha_device_pool(PAGES, page_size, layer_num, v_head_dim=v_head_dim)
        return device.get_device_pool_infos()[0].buffer_info

    info = info_of(layers)
    return get_mha_host_pool_cls(info)(
        info,
        1.0,
        0,
        page_size,
        layout,
        pin_memory=False,
        device_capacity_tokens=PAGES * page_size,
        start_layer=0,
        end_layer=layers,
        draft_buffer_infos=tuple(info_of(1) for _ in range(drafts)),
    )


def mamba_host(
    layout: str, conv: tuple[tuple[int, ...], ...], temporal: tuple[int, ...], *, states: bool = False, drafts: int = 0
) -> Any:
    """A state pool: one state a page. ``states`` adds side states of slots, of other dtypes than the rest."""
    from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
    from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost

    def info_of(layer_num: int, side: tuple[torch.Tensor, ...]) -> Any:
        return MambaStateBufferInfo(
            temporal=torch.zeros((layer_num, PAGES, *temporal)),
            conv=tuple(torch.zeros((layer_num, PAGES, *shape), dtype=torch.bfloat16) for shape in conv),
            extra_checkpoint_buffers=side,
        )

    # Three bytes: what follows begins where its own dtype may not be looked at.
    side = (torch.zeros((PAGES, 3), dtype=torch.uint8), torch.zeros((PAGES, 5))) if states else ()
    return MambaPoolHost(
        info_of(LAYERS, side),
        1.0,
        0,
        device_capacity=PAGES,
        pin_memory=False,
        layout=layout,
        mtp_draft_buffer_infos=tuple(info_of(1, ()) for _ in range(drafts)),
    )


def minimax_index_host(layout: str, anchor: Any) -> Any:
    """Index keys of a MiniMax model, which lie on the pages of ``anchor``."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKOnlyPool
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKOnlyPoolHost

    device = MHATokenToKOnlyPool(
        size=PAGES * anchor.page_size,
        page_size=anchor.page_size,
        dtype=torch.bfloat16,
        head_num=1,
        head_dim=32,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )
    return MHATokenToKOnlyPoolHost(device, anchor, layout, pin_memory=False)


def buffers_of(host: Any) -> Iterator[torch.Tensor]:
    """Every tensor that holds bytes of a host pool."""
    names = ("kv_buffer", "k_buffer", "index_k_with_scale_buffer")
    held = next((buffer for name in names if (buffer := getattr(host, name, None)) is not None), ())
    yield from [buffer for buffer in (held if isinstance(held, list | tuple) else [held]) if buffer.numel()]


def fill_pools_with_noise(pools: HostPoolsByName) -> None:
    """Random bytes everywhere, so that equality means something; no two pools get the same."""
    for seed, host in enumerate(pools.values()):
        generator = torch.Generator().manual_seed(seed)
        for buffer in buffers_of(host):
            flat = buffer.view(torch.uint8)
            flat.copy_(torch.randint(0, 256, flat.shape, dtype=torch.uint8, generator=generator))


def page_content(host: Any, page: int) -> bytes:
    """The bytes of a page, as SGLang itself gives them to storage, or from the buffers where it does not."""
    if type(host).__name__ == "AsymmetricMHATokenToKVPoolHost":
        return b"".join(
            _bytes(buffer[page * host.page_size : (page + 1) * host.page_size])
            if host.layout == "page_first"
            else _bytes(buffer[page])
            for buffer in (host.k_buffer, host.v_buffer)
        )
    return _bytes(host.get_data_page(page * host.page_size))


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())


def make_storage_config(**overrides: Any) -> Any:
    """What SGLang gives a storage backend: its HiCacheStorageConfig of a plain single-rank MHA model."""
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

"""SGLang's real host pools of every kind of model, small and on the CPU, in the layouts that SGLang gives them.

``MODELS`` names kinds of models; each makes its host pools by pool name, the anchor first, as SGLang's assembler does
(srt/mem_cache/hybrid_cache/hybrid_pool_assembler.py). Raises what SGLang raises for a layout that it does not have.
Call ``hicache_ext.testing.sglang_cpu.prepare_process`` before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from hicache_ext.sglang.releases import host_range
from hicache_ext.testing.host_pools import Pools, fill_with_noise, mha_device_pool

MLA_LAYOUTS = ("layer_first", "page_first", "page_first_direct")
"""Of ``--hicache-mem-layout``, for pools of MLA models; those of MHA and GQA models are ``MHA_LAYOUTS``."""

PAGES = 12
"""Of the device pools behind ``mha_host``, ``mamba_host`` and ``minimax_index_host``."""
LAYERS = 3

HostPoolsByName = dict[str, Any]


LAYOUTS = MHA_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
"""Of ``--hicache-mem-layout``. The fifth, page_first_kv_split, is for NPUs, whose buffers a CPU does not have."""

_Make = Callable[[str], HostPoolsByName]


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
    source, facts = device, {}
    if hasattr(device, "get_device_pool_infos"):  # since 0.5.23
        facts = {**host_range(device, tokens), "layer_shard_enabled": False, "target_layer_num": layers}
        source = device.get_device_pool_infos()[0].buffer_info
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


def mla_host(layout: str, *, page_size: int = 16) -> Any:
    return mla_pools(layout=layout, page_size=page_size, pages=PAGES, layers=LAYERS).host


def dsa_hosts(layout: str, *, name: str = "indexer") -> tuple[Any, Any]:
    """The latents of a DSA model and their index keys, which lie on the same pages; one layer has none of its own."""
    from sglang.srt.mem_cache.hicache_storage import PoolName
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool
    from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost, make_dsa_indexer_pool_decl
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    page_size = 64
    device = DSATokenToKVPool(
        size=PAGES * page_size,
        page_size=page_size,
        kv_lora_rank=64,
        dtype=torch.bfloat16,
        qk_rope_head_dim=16,
        layer_num=LAYERS,
        device="cpu",
        index_head_dim=128,
        enable_memory_saver=False,
        kv_cache_dim=80,
        index_buf_size=PAGES * page_size,
        skip_topk_layers=[False, True, False],
    )
    host = MLATokenToKVPoolHost(
        device.get_device_pool_infos()[0].buffer_info,
        1.0,
        0,
        page_size,
        layout,
        pin_memory=False,
        device_capacity_tokens=PAGES * page_size,
        start_layer=0,
        end_layer=LAYERS,
        target_layer_num=LAYERS,
        override_kv_cache_dim=device.kv_cache_dim,
    )
    decl = make_dsa_indexer_pool_decl(device, name=PoolName(name))
    return host, DSAIndexerPoolHost(decl, host, pin_memory=False)


def v4_paged_host(layout: str, name: str, *, item_bytes: int = 584, page_size: int = 16) -> Any:
    from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4PagedHostPool

    device = [torch.zeros((PAGES, item_bytes), dtype=torch.uint8) for _ in range(LAYERS)]
    return DeepSeekV4PagedHostPool(name, device, item_bytes, PAGES, page_size, layout=layout, pin_memory=False)


def v4_state_host(layout: str, name: str, *, page_size: int = 16) -> Any:
    from sglang.srt.mem_cache.deepseek_v4_compress_state import CompressStatePool
    from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4StateHostPool

    device = [
        CompressStatePool(
            size=PAGES * 8,
            ring_size=8,
            overlap=True,
            head_dim=8,
            dtype=torch.float32,
            device="cpu",
            enable_memory_saver=False,
            ratio=4,
        )
        for _ in range(LAYERS)
    ]
    return DeepSeekV4StateHostPool(name, device, PAGES, page_size, layout=layout, pin_memory=False)


def qsa_index_host(layout: str, anchor: Any) -> Any:
    from sglang.srt.mem_cache.pool_host.qsa import QSAIndexerPoolHost

    rows = PAGES * anchor.page_size // 4
    device = SimpleNamespace(
        qsa_compress_ratio=4,
        qsa_compressed_k_buffer_pool=[torch.zeros((rows, 1, 32), dtype=torch.bfloat16) for _ in range(LAYERS)],
    )
    # It takes pinning from the pool that it lies beside; without a GPU nothing can be pinned.
    anchor.pin_memory = False
    return QSAIndexerPoolHost(device, anchor)


def minimax_nvfp4_hosts(layout: str) -> tuple[Any, Any]:
    """Packed rows of main KV and of index keys, payload and scales together."""
    from sglang.srt.mem_cache.device_pool_info import PageRowBufferInfo
    from sglang.srt.mem_cache.pool_host import minimax_m3_nvfp4 as pools

    page_size = 16

    def rows(row_bytes: int) -> Any:
        slab = torch.zeros((LAYERS, PAGES, row_bytes), dtype=torch.uint8)
        return PageRowBufferInfo(slab=slab, rows=tuple(slab), row_bytes=row_bytes, page_size=page_size, num_pages=PAGES)

    layers = {"start_layer": 0, "end_layer": LAYERS}
    main = pools.MiniMaxM3Nvfp4MainKVPoolHost(
        rows(1152), 1.0, 0, page_size, layout, pin_memory=False, device_capacity_tokens=PAGES * page_size, **layers
    )
    return main, pools.MiniMaxM3Nvfp4IndexKPoolHost(rows(336), main, layout, pin_memory=False, **layers)


def _gdn(layout: str, **more: Any) -> Any:
    return mamba_host(layout, conv=((24, 3),), temporal=(2, 8, 8), **more)


def _dsa(layout: str) -> HostPoolsByName:
    latents, index = dsa_hosts(layout)
    return {"kv": latents, "indexer": index}


def _dsa_draft(layout: str) -> HostPoolsByName:
    latents, index = dsa_hosts(layout, name="draft_indexer")
    return {**_dsa(layout), "draft": latents, "draft_indexer": index}


def _deepseek_v4(layout: str) -> HostPoolsByName:
    from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool

    paged = ("swa", "deepseek_v4_c4", "deepseek_v4_c4_indexer", "deepseek_v4_c128", "draft_swa")
    states = ("deepseek_v4_c4_state", "deepseek_v4_c4_indexer_state")
    sizes = {name: 64 * (number + 1) + 8 for number, name in enumerate(paged)}
    return {
        "kv": LogicalHostPool(PAGES * 16, 16, layout),
        **{name: v4_paged_host(layout, name, item_bytes=size) for name, size in sizes.items()},
        **{name: v4_state_host(layout, name) for name in states},
    }


def _qsa(layout: str) -> HostPoolsByName:
    kv, draft = mha_host(layout), mha_host(layout, layers=1)
    index, draft_index = qsa_index_host(layout, kv), qsa_index_host(layout, draft)
    return {"kv": kv, "mamba": _gdn(layout), "indexer": index, "draft": draft, "draft_indexer": draft_index}


def _minimax(layout: str) -> HostPoolsByName:
    kv = mha_host(layout)
    return {"kv": kv, "indexer": minimax_index_host(layout, kv)}


def _minimax_nvfp4(layout: str) -> HostPoolsByName:
    kv, index = minimax_nvfp4_hosts(layout)
    return {"kv": kv, "indexer": index}


MODELS: dict[str, _Make] = {
    "MHA, GQA (Llama, Qwen3)": lambda layout: {"kv": mha_host(layout)},
    "MHA with unlike K and V heads (MiMo-V2)": lambda layout: {"kv": mha_host(layout, v_head_dim=16)},
    "MLA (DeepSeek V3, Kimi K2)": lambda layout: {"kv": mla_host(layout)},
    "SWA (gpt-oss, Gemma 3)": lambda layout: {"kv": mha_host(layout), "swa": mha_host(layout, layers=2)},
    "GDN hybrid (Qwen3-Next)": lambda layout: {"kv": mha_host(layout), "mamba": _gdn(layout)},
    "Mamba2 hybrid (Nemotron-H)": lambda layout: {
        "kv": mha_host(layout),
        "mamba": mamba_host(layout, conv=((40, 3),), temporal=(4, 8, 16)),
    },
    "KDA hybrid (Kimi Linear)": lambda layout: {
        "kv": mla_host(layout),
        "mamba": mamba_host(layout, conv=((3, 16), (3, 16), (3, 16)), temporal=(2, 8, 8)),
    },
    "convolutions alone (LFM2)": lambda layout: {
        "kv": mha_host(layout),
        "mamba": mamba_host(layout, conv=((24, 2),), temporal=(0,)),
    },
    "GDN with side states of slots": lambda layout: {"kv": mha_host(layout), "mamba": _gdn(layout, states=True)},
    "DSA (DeepSeek V3.2, GLM-5)": _dsa,
    "DeepSeek V4": _deepseek_v4,
    "QSA hybrid (Qwen) with its draft": _qsa,
    "MiniMax M3": _minimax,
    "MiniMax M3 in NVFP4": _minimax_nvfp4,
    "MHA with an MHA draft (EAGLE)": lambda layout: {"kv": mha_host(layout), "draft": mha_host(layout, layers=1)},
    "MHA with drafts packed in (MTP)": lambda layout: {"kv": mha_host(layout, drafts=2)},
    "GDN hybrid with drafts packed in (MTP)": lambda layout: {
        "kv": mha_host(layout, drafts=1),
        "mamba": _gdn(layout, drafts=1),
    },
    "MLA with an MHA draft (EAGLE)": lambda layout: {"kv": mla_host(layout), "draft": mha_host(layout, layers=1)},
    "MLA with an MLA draft (MTP)": lambda layout: {"kv": mla_host(layout), "draft": mla_host(layout)},
    "DSA with a DSA draft (MTP)": _dsa_draft,
    "SWA with an SWA draft": lambda layout: {
        "kv": mha_host(layout),
        "swa": mha_host(layout, layers=2),
        "draft_swa": mha_host(layout, layers=1),
    },
}
"""A kind of model -> its host pools in a layout, by SGLang's pool names, the anchor first."""

"""Unmodified SGLang, any release of ``releases.TESTED``, on a machine without a GPU.

``python -m hicache_ext.testing.sglang_cpu ARGUMENTS`` takes the arguments of ``sglang.launch_server`` and runs that
server. On a machine with a GPU it hands over and changes nothing. Without one it mends, in every process of the server,
what SGLang's CPU build of today lacks:

| missing on CPU | mended by |
|---|---|
| torchvision's operators (a CUDA build) | declaring the two schemas that its import needs |
| ``sgl_kernel`` | a stub module with the functions that are called |
| attention to new tokens alone, and over a window's own pool | torch_attention.py, in place of torch_native |
| pinned host memory | HiCache host pools, PD transfers and LoRA are told not to pin |
| Triton, for token slots (in 0.5.21) | plain torch |
| host <-> device copy operations | the reference engine, through ``hicache_ext.sglang.kernel_hooks`` |
| CPU engine switch, CUDA events in PD | environment variables (only where unset) |

SGLang spawns its processes, and a spawned child runs the module its parent was started from once more, under the name
``__mp_main__``: so this module mends each child before the child imports SGLang. What has to be patched inside SGLang
goes through SGLang's own hook registry.

``HICACHE_EXT_RIG_MODULES`` (module names, commas between them) adds hooks of a test's own: each module is imported in
every process of the server, and its ``register()`` called, before SGLang starts there.

Tests that build host pools in their own process call ``prepare_process`` before they import SGLang.
"""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.machinery
import importlib.util
import inspect
import os
import runpy
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils._device import _device_constructors

from hicache_ext.sglang.kernel_hooks import has_accelerator
from hicache_ext.sglang.plugin import not_in_force, register
from hicache_ext.sglang.releases import TESTED, comes_with, installed_release
from hicache_ext.sglang.used_names import COPIES

MODULES_VARIABLE = "HICACHE_EXT_RIG_MODULES"

# The two sizes fit any model that is worth running on CPU, and SGLang takes no more memory than they say; its fraction
# is what everybody else on the machine may take between two looks at what is free, before a start is refused.
# sleep-on-idle and one OpenMP thread keep a scheduler's polling loop from starving the model (a 1-token prefill took
# 3 s without them).
_DEFAULT_ARGUMENTS = (
    "--device=cpu",
    "--attention-backend=torch_native",
    "--sampling-backend=pytorch",
    "--grammar-backend=none",
    "--dtype=bfloat16",
    "--mem-fraction-static=0.5",
    "--max-total-tokens=32768",
    "--max-mamba-cache-size=64",
    "--max-running-requests=8",
    "--skip-server-warmup",
    "--sleep-on-idle",
)

_DEFAULT_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX": "0",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def prepare_process() -> None:
    """Make SGLang and its host pools importable and usable in this process; does nothing where there is a GPU.

    For tests and tools, from the main thread, before their first import of SGLang. Unlike in a server, the hooks are
    applied at once. Calling it again is free.
    """
    if has_accelerator():
        return
    install_mends()
    from sglang.srt.plugins.hook_registry import HookRegistry

    HookRegistry.apply_hooks()


def install_mends() -> None:
    """Everything a process needs before SGLang starts in it; SGLang applies the registered hooks by itself.

    Raises ``RuntimeError`` when SGLang is imported already: it decides at import that there is no CPU engine.
    """
    if "sglang" in sys.modules and os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        raise RuntimeError("SGLang was imported before its process was prepared for CPU; prepare it first")
    for name, value in _DEFAULT_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    declare_torchvision_operators()
    _install_sgl_kernel_stub()
    _leave_memory_unpinned()
    _register_hooks()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the server until it is told to stop."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if has_accelerator():
        sys.argv[1:] = arguments
        runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
        return
    _collect_garbage_less_often()
    install_mends()
    # Not runpy: the children must find this module as their parent's main module, not SGLang's.
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    if missing := not_in_force([COPIES]):
        raise SystemExit(f"{missing[COPIES]}; SGLang's log above says why")
    # Of a flag that is given twice the last one counts.
    server_args = prepare_server_args([*_DEFAULT_ARGUMENTS, *arguments])
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def declare_torchvision_operators() -> None:
    """Declare the operators torchvision registers meta kernels for, unless its extension brings them."""
    specification = importlib.util.find_spec("torchvision")
    if specification is None or specification.origin is None or hasattr(torch.ops.torchvision, "nms"):
        return
    try:
        for library in Path(specification.origin).parent.glob("_C*.so"):
            torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    except OSError:
        pass  # a build for CUDA: the case this function is for
    if not hasattr(torch.ops.torchvision, "nms"):
        torch.library.define("torchvision::nms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        torch.library.define(
            "torchvision::qnms",
            "(Tensor dets, Tensor scores, float iou_threshold, float score_threshold) -> Tensor",
        )


def _leave_memory_unpinned() -> None:
    """LoRA asks for pinned tensors wherever it runs; without CUDA torch refuses to make them.

    torch collects the functions that ``with torch.device(...)`` concerns when it is first used, and keeps them: they
    have to be torch's own. With these in their place ``meta`` is ignored, and transformers computes with memory that
    nobody has written.
    """
    _device_constructors()
    for name in ("tensor", "empty", "zeros", "arange"):
        original = getattr(torch, name)
        if not hasattr(original, "__wrapped__"):
            setattr(torch, name, _without_pinning(original))
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]


def _without_pinning(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def unpinned(*arguments: Any, **named: Any) -> torch.Tensor:
        named.pop("pin_memory", None)
        return original(*arguments, **named)

    return unpinned


def _install_sgl_kernel_stub() -> None:
    if "sgl_kernel" in sys.modules or importlib.util.find_spec("sgl_kernel") is not None:
        return
    stub = ModuleType("sgl_kernel", "Stand-in for SGLang's compiled kernels, made by hicache_ext.testing.sglang_cpu.")
    stub.__spec__ = importlib.machinery.ModuleSpec("sgl_kernel", loader=None)
    stub.assign_req_to_token_pool_cpu = _assign_req_to_token_pool  # type: ignore[attr-defined]
    stub.__getattr__ = _missing_cpu_kernel  # type: ignore[method-assign]
    for name in _NAMED_AT_IMPORT:
        setattr(torch.ops.sgl_kernel, name, _missing_cpu_kernel(name))
    mamba = ModuleType("sgl_kernel.mamba")
    mamba.__getattr__ = _missing_cpu_kernel  # type: ignore[method-assign]
    stub.mamba = mamba  # type: ignore[attr-defined]
    sys.modules |= {"sgl_kernel": stub, mamba.__name__: mamba}


_NAMED_AT_IMPORT = (
    "fused_gdn_gating_cpu",
    "fused_moe_router_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_sigmoid_gating_delta_rule_update_cpu",
    "fused_sigmoid_mul_cpu",
)
"""Operators that modules of SGLang name when they are imported, the processor of Qwen's images among them."""


def _assign_req_to_token_pool(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    *_: object,
) -> None:
    """Write each request's new token slots, consecutive in ``out_cache_loc``, into its row of ``req_to_token``."""
    taken = 0
    spans = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for request, start, end in spans:
        req_to_token[request, start:end] = out_cache_loc[taken : taken + end - start].to(req_to_token.dtype)
        taken += end - start


def _missing_cpu_kernel(name: str) -> Callable[..., None]:
    """``__getattr__`` of the stub: SGLang imports some ten ``*_cpu`` kernels, which only speculative decoding calls."""
    if not name.endswith("_cpu"):
        raise AttributeError(f"the sgl_kernel stand-in has no {name}")

    def missing(*_: object, **__: object) -> None:
        raise NotImplementedError(f"{name} needs the real sgl_kernel; this CPU rig has a stand-in")

    return missing


_HOST_POOL = "sglang.srt.mem_cache.pool_host"


def _register_hooks() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    register([COPIES])
    for name in filter(None, os.environ.get(MODULES_VARIABLE, "").split(",")):
        importlib.import_module(name).register()
    hooks: list[tuple[str, Callable[..., Any], str]] = [
        (f"{_HOST_POOL}.base.HostKVCache.__init__", _without_pinned_host_pool, "before"),
        (
            "sglang.srt.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator.__init__",
            _without_triton,
            "before",
        ),
        (
            "sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin.send_kv_chunk",
            _without_pinned_page_indices,
            "before",
        ),
    ]
    if comes_with(installed_release(), TESTED[-1]):
        setup = "sglang.srt.model_executor.model_runner_components.attention_backend_setup"
        hooks += [(f"{setup}._build_full_attention_backend_from_str", _torch_attention, "around")]
    for target, hook, kind in hooks:
        if not any(registered is hook for _, registered, _ in HookRegistry._hooks.get(target, ())):
            HookRegistry.register(target, hook, HookType(kind))


def _collect_garbage_less_often() -> None:
    """Raise the GC threshold like SGLang's --gc-threshold, but before its imports, a quarter of whose time was GC."""
    gc.set_threshold(50_000)


def _without_pinned_host_pool(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    from sglang.srt.mem_cache.pool_host.base import HostKVCache

    # SGLang passes it by its name or by its place, as the release likes.
    given = inspect.signature(HostKVCache.__init__).bind(*args, **kwargs)
    given.arguments["pin_memory"] = False
    return given.args, given.kwargs


def _without_triton(*_: Any, **__: Any) -> None:
    """Token slots in plain torch, as SGLang itself has them without Triton since 0.5.22."""
    from sglang.srt.mem_cache.allocator import paged

    if hasattr(paged, "alloc_decode_naive"):
        return

    def extend(prefixes: Any, lengths: Any, last: Any, free_pages: Any, slots: Any, _: int, page_size: int) -> None:
        paged.alloc_extend_naive(prefixes, lengths, last, free_pages, slots, page_size, slots.device)

    def decode(lengths: Any, last: Any, free_pages: Any, slots: torch.Tensor, _: int, page_size: int) -> None:
        # One token more of each request: the slot behind its last one, or the first of a free page.
        slots.copy_(last + 1)
        begins = ((lengths - 1) % page_size == 0).nonzero().flatten()[: len(free_pages)]
        slots[begins] = free_pages[: len(begins)] * page_size

    # They are called as ``kernel[grid](...)``.
    paged.alloc_extend_kernel = defaultdict(lambda: extend)
    paged.alloc_decode_kernel = defaultdict(lambda: decode)


def _torch_attention(original: Callable[..., Any], **named: Any) -> Any:
    if named["backend_str"] != "torch_native":
        return original(**named)
    from hicache_ext.testing.torch_attention import TorchAttention

    return TorchAttention(named["model_runner"])


def _without_pinned_page_indices(scheduler: Any, req: Any, *args: Any, **kwargs: Any) -> None:
    # Only the Mooncake sender has the attribute; without it the scheduler takes the path that does not pin.
    if getattr(req.disagg_kv_sender, "supports_host_tensor_indices", False):
        req.disagg_kv_sender.supports_host_tensor_indices = False


if __name__ == "__mp_main__" and not has_accelerator():
    _collect_garbage_less_often()
    install_mends()

if __name__ == "__main__":
    main()

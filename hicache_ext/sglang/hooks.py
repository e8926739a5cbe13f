"""All hooks on SGLang in one table: the target, the kind, our function, the feature that needs it.

A feature is what a user loses together: without one of its hooks the whole of it is off, and ``not_in_force`` answers
with one sentence for it. SGLang applies registered hooks itself (``load_plugins``) and only logs one that fails.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal

from hicache_ext.sglang import adapters, kernel_hooks, model_weights, pd_hooks, prefill_cost, weights_hooks


@dataclass(frozen=True, slots=True)
class Feature:
    """What some hooks are for, and what is lost without them; ``wanted`` tells whether this machine has use for it."""

    name: str
    loss: str
    wanted: Callable[[], bool] = lambda: True


@dataclass(frozen=True, slots=True)
class Hook:
    """``function`` goes ``kind`` the call of ``target``, a dotted name; arguments are those of SGLang's HookType."""

    target: str
    kind: Literal["before", "after", "around"]
    function: Callable[..., Any]
    feature: Feature


WEIGHTS_UPDATES = Feature("weights updates", "do not update weights online")
MODEL_WEIGHTS = Feature("weights at the start", "weights are identified by their files as they are after the load")
ADAPTERS = Feature("LoRA adapters", "adapters cannot be told apart")
COPIES = Feature("copy engines", "copies between host and device stay with SGLang's own path", kernel_hooks.wants_hooks)
DECODE_WRITER = Feature("decode writer", "a decode node writes as SGLang does")
PREFILL_COST = Feature("cost of prefill", "pull or recompute does not know what a prefill takes")

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_LORA = "sglang.srt.lora.lora_manager.LoRAManager"
_REQUEST = "sglang.srt.managers.schedule_batch.Req"
_MHA, _MLA = kernel_hooks.MHA, kernel_hooks.MLA
_DECODE = pd_hooks.MANAGER

HOOKS: tuple[Hook, ...] = (
    Hook(f"{_UPDATER}.update_weights_from_disk", "before", weights_hooks.before_update, WEIGHTS_UPDATES),
    Hook(f"{_UPDATER}.update_weights_from_distributed", "before", weights_hooks.before_update, WEIGHTS_UPDATES),
    Hook(f"{_UPDATER}.update_weights_from_tensor", "before", weights_hooks.before_update, WEIGHTS_UPDATES),
    Hook(f"{_UPDATER}.update_weights_from_ipc", "before", weights_hooks.before_update, WEIGHTS_UPDATES),
    # Between begin and end somebody else may write the weights, with no call at all (P2P, RDMA).
    Hook(f"{_UPDATER}.begin_weight_update", "before", weights_hooks.before_update, WEIGHTS_UPDATES),
    Hook(f"{_UPDATER}.end_weight_update", "before", weights_hooks.before_update, WEIGHTS_UPDATES),
    Hook(f"{_UPDATER}.release_memory_occupation", "before", weights_hooks.before_release, WEIGHTS_UPDATES),
    Hook(f"{_SCHEDULER}.flush_cache", "after", weights_hooks.after_flush, WEIGHTS_UPDATES),
    Hook(f"{_RUNNER}.load_model", "around", model_weights.around_load, MODEL_WEIGHTS),
    # SGLang can load weights while it does other things at the start.
    Hook(f"{_RUNNER}.finalize_startup_weight_load", "after", model_weights.after_late_load, MODEL_WEIGHTS),
    Hook(f"{_LORA}.init_state", "after", adapters.after_start, ADAPTERS),
    Hook(f"{_LORA}.load_lora_weights", "after", adapters.after_load, ADAPTERS),
    Hook(f"{_LORA}.load_lora_weights_from_tensors", "after", adapters.after_load, ADAPTERS),
    Hook(f"{_REQUEST}.__init__", "after", adapters.after_request, ADAPTERS),
    Hook(f"{_MHA}.load_to_device_per_layer", "around", kernel_hooks.load_layer, COPIES),
    Hook(f"{_MHA}.backup_from_device_all_layer", "around", kernel_hooks.back_up_layers, COPIES),
    Hook(f"{_MLA}.load_to_device_per_layer", "around", kernel_hooks.load_layer, COPIES),
    Hook(f"{_MLA}.backup_from_device_all_layer", "around", kernel_hooks.back_up_layers, COPIES),
    Hook(f"{_DECODE}.__init__", "around", pd_hooks.around_init, DECODE_WRITER),
    Hook(f"{_DECODE}.offload_kv_cache", "around", pd_hooks.around_offload, DECODE_WRITER),
    Hook(f"{_DECODE}.check_offload_progress", "around", pd_hooks.around_check, DECODE_WRITER),
    Hook(f"{_DECODE}.drain_before_retraction", "around", pd_hooks.around_drain, DECODE_WRITER),
    Hook(f"{_DECODE}.release_host_resources", "around", pd_hooks.around_release, DECODE_WRITER),
    Hook(f"{_SCHEDULER}.run_batch", "around", prefill_cost.around_run, PREFILL_COST),
    Hook(f"{_SCHEDULER}.process_batch_result", "around", prefill_cost.around_result, PREFILL_COST),
)
FEATURES = tuple(dict.fromkeys(hook.feature for hook in HOOKS))


def register(features: Collection[Feature] = FEATURES) -> None:
    """Put the hooks of ``features`` into SGLang's registry, as far as this machine wants them. Again is free."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # SGLang's own record, which has no public form: without it only "again" is not free.
    registered = getattr(HookRegistry, "_hooks", {})
    for hook in _wanted(features):
        if not any(hook.function in entry for entry in registered.get(hook.target, ())):
            HookRegistry.register(hook.target, hook.function, HookType(hook.kind))


def not_in_force(features: Collection[Feature] = FEATURES) -> dict[Feature, str]:
    """One sentence for each of ``features`` that lacks a hook in this process: which target, and what is lost.

    To be asked after SGLang has applied its hooks.
    """
    found: dict[Feature, str] = {}
    for hook in _wanted(features):
        if hook.feature not in found and not _is_hooked(hook.target):
            found[hook.feature] = (
                f"the hook on {hook.target} is not in force (is SGLANG_PLUGINS set?): {hook.feature.loss}"
            )
    return found


def _wanted(features: Collection[Feature]) -> list[Hook]:
    wanted = {feature for feature in features if feature.wanted()}
    return [hook for hook in HOOKS if hook.feature in wanted]


def _is_hooked(target: str) -> bool:
    try:
        return hasattr(pkgutil.resolve_name(target), "__wrapped__")
    except (ImportError, AttributeError):
        return False

"""All hooks on SGLang in one table: the target, the kind, our function, the feature that needs it.

Which functions are hooked says used_names.py; what they are hooked with is here. A hook is registered where this
release can have its feature (self_check.py). SGLang applies registered hooks itself (``load_plugins``) and only logs
one that fails, so ``not_in_force`` is to be asked afterwards.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from hicache_ext.sglang import kernel_hooks, model_weights, pd_hooks, scheduler_hooks
from hicache_ext.sglang.releases import comes_with, installed_release
from hicache_ext.sglang.self_check import check_installed, features_off
from hicache_ext.sglang.used_names import COPIES, HOOKED, USED, Feature, HookKind


@dataclass(frozen=True, slots=True)
class Hook:
    """``function`` goes ``kind`` the call of ``target``, a dotted name; arguments are those of SGLang's HookType."""

    target: str
    kind: HookKind
    function: Callable[..., Any]
    feature: Feature
    since: str = ""


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "SchedulerWeightUpdaterManager.update_weights_from_disk": model_weights.before_update,
    "SchedulerWeightUpdaterManager.update_weights_from_distributed": model_weights.before_update,
    "SchedulerWeightUpdaterManager.update_weights_from_tensor": model_weights.before_update,
    "SchedulerWeightUpdaterManager.update_weights_from_ipc": model_weights.before_update,
    "SchedulerWeightUpdaterManager.begin_weight_update": model_weights.before_update,
    "SchedulerWeightUpdaterManager.end_weight_update": model_weights.before_update,
    "SchedulerWeightUpdaterManager.release_memory_occupation": model_weights.before_release,
    "Scheduler.flush_cache": model_weights.after_flush,
    "ModelRunner.load_model": model_weights.around_load,
    "ModelRunner.finalize_startup_weight_load": model_weights.after_late_load,
    "LoRAManager.init_state": model_weights.after_lora_start,
    "LoRAManager.load_lora_weights": model_weights.after_lora_load,
    "LoRAManager.load_lora_weights_from_tensors": model_weights.after_lora_load,
    "Req.__init__": model_weights.after_request,
    "MHATokenToKVPoolHost.load_to_device_per_layer": kernel_hooks.load_layer,
    "MHATokenToKVPoolHost.backup_from_device_all_layer": kernel_hooks.back_up_layers,
    "MLATokenToKVPoolHost.load_to_device_per_layer": kernel_hooks.load_layer,
    "MLATokenToKVPoolHost.backup_from_device_all_layer": kernel_hooks.back_up_layers,
    "DecodeKVCacheOffloadManager.__init__": pd_hooks.around_init,
    "DecodeKVCacheOffloadManager.offload_kv_cache": pd_hooks.around_offload,
    "DecodeKVCacheOffloadManager.check_offload_progress": pd_hooks.around_check,
    "DecodeKVCacheOffloadManager.drain_before_retraction": pd_hooks.around_drain,
    "DecodeKVCacheOffloadManager.release_host_resources": pd_hooks.around_release,
    "HybridCacheController.should_backup": scheduler_hooks.around_should_backup,
    "Scheduler.run_batch": scheduler_hooks.around_run,
    "Scheduler.process_batch_result": scheduler_hooks.around_result,
    "Scheduler.get_new_batch_prefill": scheduler_hooks.around_new_batch,
    "Scheduler._prefetch_kvcache": scheduler_hooks.before_prefetch,
    "HiCacheController._storage_hit_query": scheduler_hooks.around_look_up,
    "HiCacheController._page_transfer": scheduler_hooks.around_storage,
    "HybridCacheController._storage_hit_query": scheduler_hooks.around_look_up,
    "HybridCacheController._page_transfer": scheduler_hooks.around_storage,
}
"""Class and function of SGLang -> ours."""

HOOKS: tuple[Hook, ...] = tuple(
    Hook(use.target, use.hook, _FUNCTIONS[".".join(use.target.split(".")[-2:])], use.features[0], use.since)
    for use in USED
    if use.hook is not None
)


def register(features: Collection[Feature] = HOOKED) -> None:
    """Put the hooks of ``features`` into SGLang's registry, as far as this release and machine want them. Again is
    free."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    off = features_off(check_installed())
    # SGLang's own record, which has no public form: without it only "again" is not free.
    registered = getattr(HookRegistry, "_hooks", {})
    for hook in _wanted(features):
        if hook.feature in off and not (hook.feature.by_halves and _resolves(hook.target)):
            continue
        if not any(hook.function in entry for entry in registered.get(hook.target, ())):
            HookRegistry.register(hook.target, hook.function, HookType(hook.kind))


def not_in_force(features: Collection[Feature] = HOOKED) -> dict[Feature, str]:
    """One sentence for each of ``features`` that is off in this process: what is missing, and what is lost.

    To be asked after SGLang has applied its hooks.
    """
    off = features_off(check_installed())
    found: dict[Feature, str] = {}
    for hook in _wanted(features):
        if hook.feature in found:
            continue
        if hook.feature in off:
            found[hook.feature] = f"SGLang {installed_release()} lacks {off[hook.feature]}: {hook.feature.loss}"
        elif not _is_hooked(hook.target):
            found[hook.feature] = (
                f"the hook on {hook.target} is not in force (is SGLANG_PLUGINS set?): {hook.feature.loss}"
            )
    return found


def wants(feature: Feature) -> bool:
    """Whether this machine has use for a feature."""
    return feature is not COPIES or kernel_hooks.wants_hooks()


def _wanted(features: Collection[Feature]) -> list[Hook]:
    release = installed_release()
    wanted = {feature for feature in features if wants(feature)}
    return [hook for hook in HOOKS if hook.feature in wanted and (not hook.since or comes_with(release, hook.since))]


def _is_hooked(target: str) -> bool:
    try:
        return hasattr(pkgutil.resolve_name(target), "__wrapped__")
    except (ImportError, AttributeError):
        return False


def _resolves(target: str) -> bool:
    try:
        return callable(pkgutil.resolve_name(target))
    except (ImportError, AttributeError):
        return False

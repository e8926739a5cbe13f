"""The entry point of SGLang's plugin group ``sglang.srt.plugins``: the hooks on SGLang (used_names.py lists them).

SGLang calls ``register`` in each of its processes before anything runs, applies what was registered (``load_plugins``),
and only logs failures. So the backend's constructor checks ``not_in_force``. A hook is registered only if this release
can have its feature (used_names.py).
"""

from __future__ import annotations

import pkgutil
from collections.abc import Collection

from hicache_ext.sglang.releases import installed_release, refuse_old_release
from hicache_ext.sglang.used_names import COPIES, HOOKED, HOOKS, Feature, Use, belongs_to, check_installed, features_off


def register(features: Collection[Feature] = HOOKED) -> None:
    """Put the hooks of ``features`` into SGLang's registry, as far as this release and machine need them.

    Idempotent. Raises UnsupportedError for an SGLang that is too old.
    """
    refuse_old_release()
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    off = features_off(check_installed())
    # SGLang's own record has no public accessor; without it only repeated calls would register twice.
    registered = getattr(HookRegistry, "_hooks", {})
    for hook in _wanted(features):
        (feature,) = hook.features
        if feature in off and not (feature.partly and callable(_resolved(hook.target))):
            continue
        if not any(hook.function in entry for entry in registered.get(hook.target, ())):
            HookRegistry.register(hook.target, hook.function, HookType(hook.kind))


def not_in_force(features: Collection[Feature] = HOOKED) -> dict[Feature, str]:
    """Return one sentence for each of ``features`` that is off in this process: what is missing, and what is lost.

    Call it after SGLang has applied its hooks.
    """
    off = features_off(check_installed())
    found: dict[Feature, str] = {}
    for hook in _wanted(features):
        (feature,) = hook.features
        if feature in found:
            continue
        if feature in off:
            found[feature] = f"SGLang {installed_release()} lacks {off[feature]}: {feature.loss}"
        elif not _is_hooked(hook.target):
            found[feature] = f"the hook on {hook.target} is not in force (is SGLANG_PLUGINS set?): {feature.loss}"
    return found


def _wanted(features: Collection[Feature]) -> list[Use]:
    """Return the hooks that this release and this machine need."""
    wanted = set(features)
    if COPIES in wanted:
        from hicache_ext.sglang import kernel_hooks

        if not kernel_hooks.wants_hooks():
            wanted.remove(COPIES)
    release = installed_release()
    return [hook for hook in HOOKS if wanted.issuperset(hook.features) and belongs_to(release, hook)]


def _is_hooked(target: str) -> bool:
    return hasattr(_resolved(target), "__wrapped__")


def _resolved(target: str) -> object:
    try:
        return pkgutil.resolve_name(target)
    except (ImportError, AttributeError):
        return None

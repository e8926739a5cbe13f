"""The entry point of SGLang's plugin group ``sglang.srt.plugins``: version gate, hooks, self-check.

SGLang calls ``register`` in each of its processes before anything runs, and only logs what it raises; whether a hook
took is therefore checked where it matters (``missing_hooks``, called by the backend's constructor).
"""

from __future__ import annotations

import importlib.metadata
import logging
import pkgutil

from hicache_ext.errors import UnsupportedError
from hicache_ext.sglang import adapters, model_weights, pd_hooks, prefill_cost, weights_hooks
from hicache_ext.sglang import kernel_hooks as sglang_hooks

logger = logging.getLogger(__name__)

TESTED_SGLANG = "0.5.23"


def register() -> None:
    """Register all hooks. Called by SGLang, once a process."""
    check_sglang_version()
    weights_hooks.register()
    model_weights.register()
    adapters.register()
    sglang_hooks.register()
    pd_hooks.register()
    prefill_cost.register()


def check_sglang_version(installed: str | None = None) -> None:
    """Refuse an SGLang that is known to be unsafe, warn about one that was not tested.

    Releases before the tested one left LoRA and cache_salt out of the page hashes in places, and lack the calls this
    package answers. Raises UnsupportedError.
    """
    if installed is None:
        installed = importlib.metadata.version("sglang")
    if installed == TESTED_SGLANG:
        return
    if _numbers(installed) < _numbers(TESTED_SGLANG):
        raise UnsupportedError(
            f"SGLang {installed}", f"this package needs {TESTED_SGLANG}", f"pip install sglang=={TESTED_SGLANG}"
        )
    logger.warning("hicache_ext was tested with SGLang %s; this is %s", TESTED_SGLANG, installed)


def missing_hooks() -> list[str]:
    """Targets of hooks that are not in force in this process."""
    targets = (*weights_hooks.UPDATE_TARGETS, weights_hooks.RELEASE_TARGET, weights_hooks.FLUSH_TARGET)
    targets = (*targets, model_weights.LOAD_TARGET, *pd_hooks.targets())
    return [target for target in targets if not _hooked(target)] + sglang_hooks.verify()


def missing_adapter_hooks() -> list[str]:
    """Targets of the hooks that keep LoRA adapters apart and that are not in force in this process."""
    targets = (adapters.START_TARGET, *adapters.LOAD_TARGETS, adapters.REQUEST_TARGET)
    return [target for target in targets if not _hooked(target)]


def missing_decode_hooks() -> list[str]:
    """Targets of the decode writer's hooks that are not in force in this process."""
    return [target for target in pd_hooks.targets() if not _hooked(target)]


def _hooked(target: str) -> bool:
    try:
        return hasattr(pkgutil.resolve_name(target), "__wrapped__")
    except (ImportError, AttributeError):
        return False


def _numbers(version: str) -> tuple[int, ...]:
    release = version.split("+")[0].split(".post")[0]
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in release.split(".")[:3])

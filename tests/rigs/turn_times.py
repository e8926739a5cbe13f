"""When a real server of the CPU rig does what for a request, by an environment variable.

``HICACHE_EXT_RIG_TURN_TIMES=PATH`` makes the server add a line to the file at the end of each of ``STEPS``: a JSON list
of the step, its begin and its end (``time.monotonic``, which all processes of a machine share). For benchmarks; without
the variable nothing is hooked.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

VARIABLE = "HICACHE_EXT_RIG_TURN_TIMES"

_BACKEND = "hicache_ext.sglang.backend.HiCacheExtBackend"
_CONTROLLER = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
STEPS = {
    "arrives": f"{_SCHEDULER}.handle_generate_request",
    "is looked for": f"{_CONTROLLER}._storage_hit_query",
    "tier looks up": f"{_BACKEND}.batch_exists",
    "tier reads": f"{_BACKEND}.batch_get_v1",
    "prefetch is seen": "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.check_prefetch_progress",
    "is loaded": "sglang.srt.managers.cache_controller.HiCacheController.start_loading",
    "is computed": f"{_SCHEDULER}.run_batch",
}


class Step(NamedTuple):
    name: str
    begin: float
    end: float


def register() -> None:
    """Hook the steps in this process if the variable asks for it."""
    if not os.environ.get(VARIABLE):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for name, target in STEPS.items():
        if not any(getattr(hook, "notes_the_time", False) for _, hook, _ in HookRegistry._hooks.get(target, ())):
            HookRegistry.register(target, _noting(name), HookType.AROUND)


def read_steps(file: Path) -> list[Step]:
    """All that was noted so far, in the order of their ends."""
    text = file.read_text()
    return [Step(*json.loads(line)) for line in text[: text.rfind("\n") + 1].splitlines()]


def _noting(name: str) -> Callable[..., Any]:
    def around(original: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        begin = time.monotonic()
        result = original(*arguments, **named)
        if name != "prefetch is seen" or result:
            with open(os.environ[VARIABLE], "a") as file:
                file.write(json.dumps([name, begin, time.monotonic()]) + "\n")
        return result

    around.notes_the_time = True  # type: ignore[attr-defined]
    return around

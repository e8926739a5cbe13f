"""What decode-side offload takes of the scheduler in each step, from a server of the rig, by an environment variable.

``HICACHE_EXT_RIG_STEP_COSTS=PATH`` makes a decode node add a line to the file whenever it has run out of work: a JSON
list with the microseconds of each step since the line before. For campaigns; without the variable nothing is hooked.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

VARIABLE = "HICACHE_EXT_RIG_STEP_COSTS"
_TARGET = "hicache_ext.sglang.pd_hooks.Stopwatch.step_ends"

_costs: list[float] = []


def register() -> None:
    """Hook the stopwatch of this process if the variable asks for it."""
    if not os.environ.get(VARIABLE):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if not HookRegistry._hooks.get(_TARGET):
        HookRegistry.register(_TARGET, before_step_ends, HookType.BEFORE)


def before_step_ends(stopwatch: Any) -> None:
    """BEFORE ``Stopwatch.step_ends``: note a step in which requests advanced; write when there was none."""
    if stopwatch._requests:
        _costs.append(round(stopwatch._this_step * 1e6, 1))
    elif _costs:
        with open(os.environ[VARIABLE], "a") as file:
            file.write(json.dumps(_costs) + "\n")
        _costs.clear()


def read_step_costs(file: Path, offset: int) -> tuple[list[float], int]:
    """Microseconds of the steps written from ``offset`` on, and where the next call should begin."""
    try:
        with file.open() as lines:
            lines.seek(offset)
            text = lines.read()
    except FileNotFoundError:
        return [], offset
    whole = text[: text.rfind("\n") + 1]
    return [cost for line in whole.splitlines() for cost in json.loads(line)], offset + len(whole)

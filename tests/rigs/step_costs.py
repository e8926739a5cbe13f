"""What decode-side offload takes of the scheduler in each step, from a server of the rig, by an environment variable.

``HICACHE_EXT_RIG_STEP_COSTS=PATH`` makes a decode node add a line to the file whenever it has run out of work: a JSON
list with the microseconds of each step since the line before. ``PATH.readable`` gets a line for each answer that our
writer wrote: the seconds from its last token until its last whole page can be read by others. For campaigns; without
the variable nothing is timed.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

VARIABLE = "HICACHE_EXT_RIG_STEP_COSTS"

_costs: list[float] = []
_this_step = 0.0
_requests = 0


def register() -> None:
    """Time our manager, or SGLang's own, if the variable asks for it."""
    if os.environ.get(VARIABLE):
        from hicache_ext.sglang import decode_manager

        decode_manager.replace_manager = with_timed_calls(decode_manager.replace_manager)


def with_timed_calls(make: Callable[..., Any]) -> Callable[..., Any]:
    """What makes a manager, ours or SGLang's, whose calls are timed."""

    @functools.wraps(make)
    def made(*arguments: Any, **named: Any) -> Any:
        manager = make(*arguments, **named)
        manager.offload_kv_cache = timed(manager.offload_kv_cache, requests=1)
        manager.check_offload_progress = timed(manager.check_offload_progress, then=step_ends)
        if (writer := getattr(manager, "writer", None)) is not None:
            note_when_readable(writer)
        return manager

    return made


def note_when_readable(writer: Any) -> None:
    """Have our writer note when each answer has ended, and when its last page was written."""
    advanced, write = writer.request_advanced, writer._writer._write
    ended: dict[Any, float] = {}
    """By continuation."""

    def request_advanced(request: Any, output: Any, finished: bool) -> Any:
        began = advanced(request, output, finished)
        if began and finished:
            ended[writer._continuations[request]] = time.perf_counter()
        return began

    def write_and_note(jobs: Any) -> Any:
        outcomes = write(jobs)
        for pieces, outcome in zip(jobs, outcomes, strict=True):
            continuation = pieces[-1].continuation
            if outcome.name == "WRITTEN" and pieces[-1].end_page == continuation.copied_pages:
                since = ended.pop(continuation, None)
                if since is not None:
                    with open(os.environ[VARIABLE] + ".readable", "a") as file:
                        file.write(f"{time.perf_counter() - since}\n")
        return outcomes

    writer.request_advanced, writer._writer._write = request_advanced, write_and_note


def timed(hook: Callable[..., Any], requests: int = 0, then: Callable[[], None] = lambda: None) -> Callable[..., Any]:
    """A call whose time counts for the step; ``requests`` advance with each call of it."""

    @functools.wraps(hook)
    def call(*arguments: Any, **named: Any) -> Any:
        global _this_step, _requests
        started = time.perf_counter()
        try:
            return hook(*arguments, **named)
        finally:
            _this_step += time.perf_counter() - started
            _requests += requests
            then()

    return call


def step_ends() -> None:
    """Note a step in which requests advanced; write when there was none."""
    global _this_step, _requests
    if _requests:
        _costs.append(round(_this_step * 1e6, 1))
    elif _costs:
        with open(os.environ[VARIABLE], "a") as file:
            file.write(json.dumps(_costs) + "\n")
        _costs.clear()
    _this_step, _requests = 0.0, 0


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

"""When each layer of a restored prompt landed, and how long the forward waited for it, by an environment variable.

``HICACHE_EXT_RIG_LAYER_TIMES=PATH`` makes a server with a linker add a line to the file for each event of SGLang's
layer counter: a JSON list of the event, the batch, the layer, its begin and its end (``time.monotonic``). For the
benchmark; without the variable nothing is hooked. Layers that the forward finds there are noted, too.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

VARIABLE = "HICACHE_EXT_RIG_LAYER_TIMES"

_COUNTER = "sglang.srt.mem_cache.unified_cache.unified_cache_linker.LayerWiseLoadCounter"


class LayerEvent(NamedTuple):
    """``starts`` (a batch of loads, layer -1), ``lands`` or ``waits``."""

    name: str
    batch: int
    layer: int
    begin: float
    end: float


def register() -> None:
    """Hook the counter in this process if the variable asks for it."""
    if not os.environ.get(VARIABLE):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for method, hook in (("update_producer", _starts), ("complete", _lands), ("wait_until", _waits)):
        if not HookRegistry._hooks.get(f"{_COUNTER}.{method}"):
            HookRegistry.register(f"{_COUNTER}.{method}", hook, HookType.AROUND)


def read_events(file: Path) -> list[LayerEvent]:
    """All that was noted so far."""
    if not file.exists():
        return []
    text = file.read_text()
    return [LayerEvent(*json.loads(line)) for line in text[: text.rfind("\n") + 1].splitlines()]


def _note(name: str, batch: int, layer: int, begin: float) -> None:
    with open(os.environ[VARIABLE], "a") as file:
        file.write(json.dumps([name, batch, layer, begin, time.monotonic()]) + "\n")


def _starts(original: Callable[..., Any], counter: Any) -> Any:
    begin = time.monotonic()
    index = original(counter)
    _note("starts", index, -1, begin)
    return index


def _lands(original: Callable[..., Any], counter: Any, index: int, layer: int) -> None:
    begin = time.monotonic()
    original(counter, index, layer)
    _note("lands", index, layer, begin)


def _waits(original: Callable[..., Any], counter: Any, threshold: int) -> None:
    batch, begin = counter.consumer_index, time.monotonic()
    known = batch in counter.futures
    original(counter, threshold)
    if known:
        _note("waits", batch, threshold, begin)

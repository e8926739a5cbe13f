"""Waiting for what another thread or process brings about."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from hicache_ext.runtime.call_deadline import ending_at


def wait_until(condition: Callable[[], Any], what: str = "what the test waits for", seconds: float = 60.0) -> float:
    """How long it took until ``condition()`` was true, in seconds. The limit only ends a test that would hang."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, f"{what}: not there after {seconds:g} s"
        time.sleep(0.01)
    return time.monotonic() - began


def count_fetched(prefetcher: Any, keys: Sequence[bytes]) -> int:
    """How many of these pages are in the buffer of a prefetch."""
    with prefetcher._condition:
        return [fetch.under_way for fetch in map(prefetcher._pages.get, keys) if fetch is not None].count(False)


def ending_within(seconds: float) -> AbstractContextManager[None]:
    """Calls of a store inside end within ``seconds``, as under guards."""
    return ending_at(time.monotonic() + seconds)

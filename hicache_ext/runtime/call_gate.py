"""The gate of a store's calls."""

from __future__ import annotations

import threading
from collections import deque

from hicache_ext.errors import StoreClosedError


class CallGate:
    """Counts calls in flight, so that close() waits for them and later calls are refused."""

    def __init__(self, name: str) -> None:
        self._name = name
        # One entry for each call in flight. Every call passes several gates, and append and pop need no lock, which
        # would cost five times as much.
        self._under_way: deque[None] = deque()
        self._left = threading.Condition()
        self._closed = False

    def __enter__(self) -> None:
        self._under_way.append(None)
        # Checked after the append, because shut() closes the gate before it looks at the calls.
        if self._closed:
            self.__exit__()
            raise StoreClosedError(self._name)

    def __exit__(self, *_: object) -> None:
        self._under_way.pop()
        if self._closed:
            with self._left:
                self._left.notify_all()

    def shut(self) -> bool:
        """Close the gate and wait until no call is in flight; return False if it was already closed."""
        with self._left:
            if self._closed:
                return False
            self._closed = True
            self._left.wait_for(lambda: not self._under_way)
            return True

    def shut_within(self, seconds: float) -> bool:
        """Close the gate; return whether no call is in flight after at most ``seconds``."""
        with self._left:
            self._closed = True
            return self._left.wait_for(lambda: not self._under_way, seconds)

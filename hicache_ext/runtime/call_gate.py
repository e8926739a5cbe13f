"""The gate of a store's calls."""

from __future__ import annotations

import threading
from collections import deque

from hicache_ext.errors import StoreClosedError


class CallGate:
    """Counts calls under way, so that close() waits for them and later ones are refused."""

    def __init__(self, name: str) -> None:
        self._name = name
        # One entry for each call under way. Every call passes several gates: to append and to pop is a step without a
        # lock, which would be five times as dear.
        self._under_way: deque[None] = deque()
        self._left = threading.Condition()
        self._closed = False

    def __enter__(self) -> None:
        self._under_way.append(None)
        # Only now: shut() looks at the calls after it has closed the gate.
        if self._closed:
            self.__exit__()
            raise StoreClosedError(self._name)

    def __exit__(self, *_: object) -> None:
        self._under_way.pop()
        if self._closed:
            with self._left:
                self._left.notify_all()

    def shut(self) -> bool:
        """Close the gate and wait until nobody is inside; False when it was closed already."""
        with self._left:
            if self._closed:
                return False
            self._closed = True
            self._left.wait_for(lambda: not self._under_way)
            return True

    def shut_within(self, seconds: float) -> bool:
        """Close the gate; whether nobody is inside after ``seconds``."""
        with self._left:
            self._closed = True
            return self._left.wait_for(lambda: not self._under_way, seconds)

"""What the examination of bad pages asks a Redis tier for: one page at a time, each over a connection of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hicache_ext.storage.contract.bad_pages import Removal, Stored
from hicache_ext.storage.tiers.redis.connection import Connection
from hicache_ext.storage.tiers.redis.page_calls import PageCall, read_again, remove_bad

Ask = Callable[[bytes, Callable[[Connection, Sequence[PageCall]], None]], Any]
"""(key, the commands for its page) -> the page's result; raises NotReadError."""


class RedisMedium:
    """``Medium`` of bad_pages.py."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    def read_again(self, key: bytes, most: int) -> Stored | None:
        answer = self._ask(key, lambda connection, calls: read_again(connection, calls[0], most))
        return answer if isinstance(answer, Stored) else None

    def remove(self, key: bytes, bad: Stored) -> Removal:
        answer = self._ask(key, lambda connection, calls: remove_bad(connection, calls[0], bad))
        # A miss: it is being cleared.
        return answer if isinstance(answer, Removal) else Removal.CHANGED

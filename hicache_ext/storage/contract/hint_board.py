"""A board for hints: an ability of some stores.

All nodes that reach the pool share the board. It keeps the newest hints only, and nobody waits: a hint that is late or
missed costs a read from the pool when the next turn arrives. Reasons: docs/decisions/pull-rule.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from hicache_ext.errors import StoreError
from hicache_ext.storage.contract.abilities import ability
from hicache_ext.storage.contract.store import PageStore

AT_ONCE = 64
"""Most hints returned by one read; the rest come with the next one."""


@dataclass(frozen=True, slots=True)
class BoardLimits:
    """``keep``: hints on the board; ``longest``: bytes of one; ``lifetime``: seconds until a hint is stale."""

    keep: int
    longest: int
    lifetime: float


@runtime_checkable
class HintBoard(Protocol):
    """Calls may take as long as a call of the store, and raise StoreError or OSError. Any thread."""

    def post_hint(self, hint: bytes, limits: BoardLimits) -> None:
        """Add a hint, and remove the oldest beyond ``limits.keep``."""
        ...

    def read_hints(self, since: Any, limits: BoardLimits) -> tuple[Any, list[bytes]]:
        """Hints added after ``since``, oldest first, at most ``AT_ONCE``; and the ``since`` of the next call.

        With ``since=None`` there are none: hints from before the first read are stale. Too long ones are left out.
        """
        ...


def board_among(tiers: Sequence[PageStore], name: str) -> HintBoard:
    """The board of the tier ``name``, whatever is wrapped around it. Raises StoreError."""
    store = next((tier for tier in tiers if tier.name == name), None)
    board = None if store is None else ability(store, HintBoard)
    if board is None:
        raise StoreError(f"tier {name!r} is not in use, not open yet, or carries no hints")
    return board

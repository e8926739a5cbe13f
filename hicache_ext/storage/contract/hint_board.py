"""Where hints are left and found: an ability that some stores have.

A board is shared by everybody who reaches the pool. It keeps the newest hints only and nobody waits for anything: a
hint that comes too late, or that a reader missed, costs a read from the pool when the next turn arrives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from hicache_ext.errors import NoBoardError
from hicache_ext.storage.contract.abilities import ability
from hicache_ext.storage.contract.store import PageStore

AT_ONCE = 64
"""Hints that one look takes at most; the rest come with the next one."""


@dataclass(frozen=True, slots=True)
class BoardLimits:
    """``keep``: hints on the board; ``longest``: bytes of one; ``lifetime``: seconds after which none matters."""

    keep: int
    longest: int
    lifetime: float


@runtime_checkable
class HintBoard(Protocol):
    """Calls may wait as long as one call of the store, and raise StoreError or OSError; from any thread."""

    def post_hint(self, hint: bytes, limits: BoardLimits) -> None:
        """Leave a hint, and remove the oldest beyond ``limits.keep``."""
        ...

    def read_hints(self, since: Any, limits: BoardLimits) -> tuple[Any, list[bytes]]:
        """Hints left after ``since``, oldest first, at most ``AT_ONCE``; and what to pass the next time.

        With ``since=None`` there are none: what was left before the first look is old. Longer ones are left out.
        """
        ...


def board_among(tiers: Sequence[PageStore], name: str) -> HintBoard:
    """The board of the tier ``name``, whatever is wrapped around it. Raises NoBoardError."""
    store = next((tier for tier in tiers if tier.name == name), None)
    board = None if store is None else ability(store, HintBoard)
    if board is None:
        raise NoBoardError(f"tier {name!r} is not in use, not open yet, or carries no hints")
    return board

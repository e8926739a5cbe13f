"""Optional abilities of stores outside the contract, and how to find them behind wrappers.

An ability is a small runtime-checkable protocol. Wrappers forward none of them: a caller that needs one calls
``ability(store, Protocol)``, which looks through the wrappers (``inner``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import numpy as np
import numpy.typing as npt

from hicache_ext.errors import StoreError
from hicache_ext.runtime.whole_file import parsed
from hicache_ext.storage.contract.store import PageStore

_Ability = TypeVar("_Ability")

Gauges = Mapping[str, float]


def layers(store: PageStore) -> Iterator[PageStore]:
    """Yield the store and those it wraps, outermost first; a tier that is not open yet (late_open.py) wraps nothing."""
    layer: PageStore | None = store
    while layer is not None:
        yield layer
        layer = getattr(layer, "inner", None)


def ability(store: PageStore, wanted: Callable[..., _Ability]) -> _Ability | None:
    """Return the outermost layer that has the ability ``wanted``, which is a protocol or a wrapper class."""
    # A Callable, because mypy does not accept a protocol as type[...].
    kind = cast("type[_Ability]", wanted)
    return next((layer for layer in layers(store) if isinstance(layer, kind)), None)


@runtime_checkable
class Gauged(Protocol):
    """A store that reports its state as gauges."""

    def gauges(self) -> Gauges:
        """Return current values for some of the gauges in ``reports.UNKNOWN``, from memory alone: no I/O, and no lock
        that is held during I/O. Also works after close()."""


def gauges_of(store: PageStore) -> dict[str, float]:
    """Return the gauges of a store and its wrappers; the outermost layer that has a gauge wins."""
    known: dict[str, float] = {}
    for layer in layers(store):
        if isinstance(layer, Gauged):
            known = {**layer.gauges(), **known}
    return known


@runtime_checkable
class IdentityKeeper(Protocol):
    """A store that keeps the documents of ``register_identity`` where every node can read them."""

    def identities(self) -> dict[bytes, dict[str, Any]]:
        """Return the documents by digest. For tools, on their own thread: this may take seconds. Raises StoreError."""


@runtime_checkable
class Resizable(Protocol):
    """A store whose capacity may change while it is in use (a reload of the configuration)."""

    def can_resize(self, capacity: int | None) -> bool:
        """Return whether ``resize`` accepts ``capacity`` (bytes; None for no limit)."""

    def resize(self, capacity: int | None) -> None:
        """Set the capacity in bytes, as at startup. The next writes evict what exceeds it."""


@runtime_checkable
class RemovesCopies(Protocol):
    """A store that removes a page only if it is still the copy that the caller has seen: another process may have
    replaced it since."""

    def remove_copies(self, copies: Mapping[bytes, bytes]) -> int:
        """Remove the pages with these keys whose copies have these ``envelope.page_seal``; return how many were
        present, as far as known here. Compares and removes in one step, as far as the medium can."""


@runtime_checkable
class PageLister(Protocol):
    """A store that can list its pages often and cheaply, regardless of which process wrote or removed them."""

    def block_hashes(self, digest: bytes) -> npt.NDArray[np.int64]:
        """Return the first 8 bytes of the page hash (big-endian; the block hash of SGLang's KV events) of every page of
        this identity that can be found now. Unordered, and a page may appear twice.

        For one thread at a time. Pages unchanged since the last call must cost next to nothing. Raises OSError or
        StoreError if the pages cannot be listed now."""


@runtime_checkable
class TakesHints(Protocol):
    """A store whose eviction follows hints that requests carry (serving/kv_hints.py). Pages are named by page hashes,
    which apply to every identity, in the order of their chain. Raises StoreError or OSError."""

    def lease_pages(self, hashes: Sequence[bytes], seconds: float, namespace: str) -> int:
        """Protect these pages, present now or later, from eviction for ``seconds``; return how many are held, 0 if
        there is no room. Leases of the same ``namespace`` share its part of the room."""

    def end_leases(self, hashes: Sequence[bytes]) -> int:
        """End the leases whose last page is one of these, and return how many ended."""

    def demote_pages(self, hashes: Sequence[bytes]) -> int:
        """Evict these pages before all others, except pinned or leased ones; return how many are present."""


# -- a board for hints -------------------------------------------------------------------------------------------------
#
# All nodes that reach the pool share the board. It keeps only the newest hints, and nobody waits for it: a late or
# missed hint costs one read from the pool when the next turn arrives. Reasons: docs/decisions/pull-rule.md.

AT_ONCE = 64
"""Most hints returned by one read; the next read returns the rest."""
KEPT_HINTS = 256
"""Hints kept on a board; the oldest are removed first."""
MOST_PAGES_OF_A_HINT = 2048
LONGEST_HINT = 64 + 32 * MOST_PAGES_OF_A_HINT
"""Length of the longest hint, in bytes."""
HINTS_LAST = 60.0
"""Seconds after which a hint is ignored; the nodes' clocks must agree better than this."""


@runtime_checkable
class HintBoard(Protocol):
    """A board for hints. Its calls may take as long as a store's, and raise StoreError or OSError. Threads: any."""

    def post_hint(self, hint: bytes) -> None:
        """Add a hint, and remove the oldest beyond ``KEPT_HINTS``."""

    def read_hints(self, since: Any) -> tuple[Any, list[bytes]]:
        """Return at most ``AT_ONCE`` hints added after ``since``, oldest first, and the ``since`` for the next call.

        With ``since=None`` there are none: hints from before the first read are stale. Omits hints that are too long.
        """


def board_among(tiers: Sequence[PageStore], name: str) -> HintBoard:
    """Return the board of the tier ``name``, whatever wraps it. Raises StoreError."""
    store = next((tier for tier in tiers if tier.name == name), None)
    board = None if store is None else ability(store, HintBoard)
    if board is None:
        raise StoreError(f"tier {name!r} is not in use, not open yet, or carries no hints")
    return board


# -- identity documents ------------------------------------------------------------------------------------------------
#
# Identity documents come from a shared medium, where any writer may have left anything in their place.


LARGEST_DOCUMENT = 1 << 20
"""Bytes of one document; ours have a few hundred."""
LARGEST_SUM = 16 << 20
"""Most bytes of documents read from one medium."""


def document_in(stored: bytes) -> dict[str, Any] | None:
    """Return the document in ``stored``, or None if there is no valid one."""
    return parsed(stored) if len(stored) <= LARGEST_DOCUMENT else None

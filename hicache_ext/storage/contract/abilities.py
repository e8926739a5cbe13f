"""What some stores can do beside the contract, and how it is found behind wrappers.

An ability is a small runtime-checkable protocol. A wrapper forwards none of them: whoever needs one asks
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
    """The store, and what it wraps, outermost first; a tier that is not open yet (late_open.py) wraps nothing."""
    layer: PageStore | None = store
    while layer is not None:
        yield layer
        layer = getattr(layer, "inner", None)


def ability(store: PageStore, wanted: Callable[..., _Ability]) -> _Ability | None:
    """The outermost layer that has the ability: ``wanted`` is a protocol, or a class of wrapper."""
    # A Callable, because mypy does not take a protocol for a type[...].
    kind = cast("type[_Ability]", wanted)
    return next((layer for layer in layers(store) if isinstance(layer, kind)), None)


@runtime_checkable
class Gauged(Protocol):
    """A store that says how it is."""

    def gauges(self) -> Gauges:
        """Some of ``reports.UNKNOWN``, as they are now. From memory alone: no I/O, and no lock that is held during any.
        Also after close()."""


def gauges_of(store: PageStore) -> dict[str, float]:
    """What a store and its wrappers say: of a gauge that several know, what the outermost says."""
    known: dict[str, float] = {}
    for layer in layers(store):
        if isinstance(layer, Gauged):
            known = {**layer.gauges(), **known}
    return known


@runtime_checkable
class IdentityKeeper(Protocol):
    """A store that keeps the documents of ``register_identity`` where every node can read them."""

    def identities(self) -> dict[bytes, dict[str, Any]]:
        """Digest -> document. For tools, on a thread of theirs: it may take seconds. Raises StoreError."""


@runtime_checkable
class Resizable(Protocol):
    """A store whose capacity may change while it is in use (a reload of the configuration)."""

    def can_resize(self, capacity: int | None) -> bool:
        """Whether ``resize`` takes this; bytes, None for no limit."""

    def resize(self, capacity: int | None) -> None:
        """``capacity`` as at the start, in bytes. What is too much goes with the next writes."""


@runtime_checkable
class RemovesCopies(Protocol):
    """A store that removes a page only as long as it is the copy that somebody has seen: another process may have
    replaced it since."""

    def remove_copies(self, copies: Mapping[bytes, bytes]) -> int:
        """Remove pages whose copies have these ``envelope.page_seal``, by their keys; how many were there, as far as it
        is known here. Compared and removed in one step, as far as the medium can."""


@runtime_checkable
class PageLister(Protocol):
    """A store that can say often, and cheaply, which pages it holds, whoever wrote or removed them."""

    def block_hashes(self, digest: bytes) -> npt.NDArray[np.int64]:
        """Of every page of this identity that can be found now: the first 8 bytes of its page hash (big-endian), which
        SGLang's KV events call its block hash. In no order, and a page may come twice.

        For one thread at a time. What nobody has changed since the last call must cost next to nothing. Raises OSError
        or StoreError where it cannot be told now."""


@runtime_checkable
class TakesHints(Protocol):
    """A store whose eviction follows what requests say of pages (serving/kv_hints.py). Pages are named by their page
    hashes, which hold for every identity, in the order of their chain. Raises StoreError or OSError."""

    def lease_pages(self, hashes: Sequence[bytes], seconds: float, namespace: str) -> int:
        """Keep these pages, now or later, from eviction for so long: how many are held, 0 where there is no room.
        ``namespace``: those with the same share their part of it."""

    def end_leases(self, hashes: Sequence[bytes]) -> int:
        """End the leases whose last page is one of these; how many."""

    def demote_pages(self, hashes: Sequence[bytes]) -> int:
        """Have these pages go before all others, but for those that are pinned or leased; how many are here."""


# -- a board for hints -------------------------------------------------------------------------------------------------
#
# All nodes that reach the pool share the board. It keeps the newest hints only, and nobody waits: a hint that is late
# or missed costs a read from the pool when the next turn arrives. Reasons: docs/decisions/pull-rule.md.

AT_ONCE = 64
"""Most hints returned by one read; the rest come with the next one."""
KEPT_HINTS = 256
"""On a board; the oldest go first."""
MOST_PAGES_OF_A_HINT = 2048
LONGEST_HINT = 64 + 32 * MOST_PAGES_OF_A_HINT
"""Bytes."""
HINTS_LAST = 60.0
"""Seconds after which a hint is ignored; the nodes' clocks must agree better than this."""


@runtime_checkable
class HintBoard(Protocol):
    """Calls may take as long as a call of the store, and raise StoreError or OSError. Any thread."""

    def post_hint(self, hint: bytes) -> None:
        """Add a hint, and remove the oldest beyond ``KEPT_HINTS``."""

    def read_hints(self, since: Any) -> tuple[Any, list[bytes]]:
        """Hints added after ``since``, oldest first, at most ``AT_ONCE``; and the ``since`` of the next call.

        With ``since=None`` there are none: hints from before the first read are stale. Too long ones are left out.
        """


def board_among(tiers: Sequence[PageStore], name: str) -> HintBoard:
    """The board of the tier ``name``, whatever is wrapped around it. Raises StoreError."""
    store = next((tier for tier in tiers if tier.name == name), None)
    board = None if store is None else ability(store, HintBoard)
    if board is None:
        raise StoreError(f"tier {name!r} is not in use, not open yet, or carries no hints")
    return board


# -- identity documents ------------------------------------------------------------------------------------------------
#
# Identity documents as a shared medium holds them: whoever may write there may leave anything in their places.


LARGEST_DOCUMENT = 1 << 20
"""Bytes; ours have a few hundred."""
LARGEST_SUM = 16 << 20
"""Bytes of all documents that are read from one medium."""


def document_in(stored: bytes) -> dict[str, Any] | None:
    """The document; None where this is none."""
    return parsed(stored) if len(stored) <= LARGEST_DOCUMENT else None

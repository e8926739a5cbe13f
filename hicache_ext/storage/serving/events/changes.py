"""What changed between two looks at the tiers, in events of a bounded length.

Blocks are as SGLang's KV events name them (``PageLister``); a *medium* is one of SGLang's words for where a block is.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hicache_ext.storage.contract.abilities import PageLister, ability
from hicache_ext.storage.contract.store import PageStore

Words = npt.NDArray[np.int64]
Blocks = Mapping[str, Words]
"""Medium -> its blocks, in ascending order, each once."""

LONGEST_EVENT = 2048
"""Blocks in one event."""
NO_BLOCKS: Words = np.empty(0, np.int64)


class Kind(enum.Enum):
    STORED = "stored"
    REMOVED = "removed"
    CLEARED = "cleared"
    """Forget all that this stream has told; it has neither medium nor blocks."""


class Change(NamedTuple):
    kind: Kind
    medium: str = ""
    blocks: Words = NO_BLOCKS


@dataclass(frozen=True, slots=True)
class Media:
    """What a block of a tier is said to be on."""

    private: str
    """This machine alone has it."""
    shared: str


def blocks_in(tiers: Sequence[PageStore], identities: Sequence[bytes], media: Media) -> Blocks:
    """What the tiers that can tell (``PageLister``) hold: pages of which all parts (one identity each) are there.

    On one thread at a time. Raises OSError or StoreError."""
    found: dict[str, list[Words]] = {}
    for tier in tiers if identities else ():
        lister = ability(tier, PageLister)
        if lister is not None:
            blocks = _each_once(lister.block_hashes(identities[0]))
            for identity in identities[1:]:
                blocks = blocks[_are_among(blocks, _each_once(lister.block_hashes(identity)))]
            found.setdefault(media.shared if tier.describe().shared else media.private, []).append(blocks)
    return {medium: of[0] if len(of) == 1 else _each_once(np.concatenate(of)) for medium, of in found.items()}


def changes_between(before: Blocks, now: Blocks) -> Iterator[Change]:
    """What a subscriber that knows ``before`` must be told, so that it knows ``now``."""
    for medium in dict.fromkeys((*before, *now)):
        old, new = before.get(medium, NO_BLOCKS), now.get(medium, NO_BLOCKS)
        if not np.array_equal(old, new):
            yield from _events(Kind.REMOVED, medium, old[~_are_among(old, new)])
            yield from _events(Kind.STORED, medium, new[~_are_among(new, old)])


def _events(kind: Kind, medium: str, blocks: Words) -> Iterator[Change]:
    for begin in range(0, len(blocks), LONGEST_EVENT):
        yield Change(kind, medium, blocks[begin : begin + LONGEST_EVENT])


# numpy's own unique, intersect1d and the like hold the GIL for as long as they take: a second with some million blocks.


def _each_once(blocks: Words) -> Words:
    """In ascending order."""
    ascending = np.sort(blocks)
    first = np.ones(len(ascending), np.bool_)
    np.not_equal(ascending[1:], ascending[:-1], out=first[1:])
    once: Words = ascending if first.all() else ascending[first]
    return once


def _are_among(blocks: Words, others: Words) -> npt.NDArray[np.bool_]:
    """Which of ``blocks`` are among ``others``; both ascending."""
    if not len(others):
        return np.zeros(len(blocks), np.bool_)
    at = np.searchsorted(others, blocks)
    np.minimum(at, len(others) - 1, out=at)
    same: npt.NDArray[np.bool_] = others[at] == blocks
    return same

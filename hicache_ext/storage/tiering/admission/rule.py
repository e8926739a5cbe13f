"""Which classes of pages are worth writing at their first request.

A tier of so many pages that drops what was used longest ago holds each page for the same time after its last use, its
life (Che, Tung and Wang 2002). The more classes are written, the shorter it is. From the curves of the classes follow,
for each choice of classes: the life, the pages that are read from the tier, and the pages that are written. Of the
choices that keep most of what the best one reads, the one that writes least is taken.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hicache_ext.storage.tiering.admission.experience import EDGES, Curves, Floats


@dataclass(frozen=True, slots=True)
class Choice:
    """What to write at the first request, and what is expected of it, for each page that is used."""

    admitted: npt.NDArray[np.bool_]
    """[class]"""
    life: float
    """Pages used, after its last use, until a page is evicted."""
    hits: float
    writes: float


def life_of_everything(curves: Curves, capacity: float) -> float:
    """Pages used until a page is evicted, if all pages are written. ``capacity`` in pages."""
    return _life(curves.rate @ _held(curves), capacity)


def choose(
    curves: Curves,
    firsts: int,
    capacity: float,
    keep: float | None,
    most_writes: float = math.inf,
    runs: npt.NDArray[np.int64] | None = None,
) -> Choice:
    """Classes below ``firsts`` are of first requests; pages of the others were asked for before and are always written.

    ``capacity`` in pages. ``keep``: the share of the hits of the best choice that is to be kept; None: write everything
    that ``most_writes`` allows. ``most_writes`` for each page used: hits are given up for it, those of the classes
    first that are read least for what they write. ``runs`` [run, place]: classes of pages that follow one another; none
    is chosen without those before it.
    """
    held = _held(curves)
    returned = 1 - curves.left
    everything = _life(curves.rate @ held, capacity)
    shares = np.array([np.interp(everything, EDGES, row) for row in returned[:firsts]])
    if runs is not None:
        # Who comes back for a page comes back for those before it: where it seems otherwise, few pages were seen.
        shares[runs] = np.maximum.accumulate(shares[runs][:, ::-1], axis=1)[:, ::-1]
    order = np.argsort(-shares, kind="stable")
    order = order[curves.rate[order] > 0]
    # Row m: the first m classes of that order, and all pages that were asked for before.
    rates = np.concatenate([[0.0], curves.rate[order]])
    pages = curves.rate[firsts:] @ held[firsts:] + _summed(curves.rate[order, None] * held[order])
    reads = curves.rate[firsts:] @ returned[firsts:] + _summed(curves.rate[order, None] * returned[order])
    lives = np.array([_life(row, capacity) for row in pages])
    hits = np.array([np.interp(life, EDGES, row) for life, row in zip(lives, reads, strict=True)])
    # A page that is asked for again is written then, unless it was there.
    writes = np.cumsum(rates) + np.maximum(0.0, curves.rate[firsts:].sum() - hits)
    allowed = writes <= most_writes
    if not allowed.any():
        best = int(np.argmin(writes))
    elif keep is None:
        best = len(order) if allowed[-1] else int(np.flatnonzero(allowed & (hits >= hits[allowed].max()))[-1])
    else:
        good = allowed & (hits >= keep * hits[allowed].max())
        best = int(np.argmin(np.where(good, writes, np.inf)))
    admitted = np.arange(len(curves.rate)) >= firsts
    admitted[order[:best]] = True
    if keep is None and best == len(order):
        admitted[:] = True
    return Choice(admitted, float(lives[best]), float(hits[best]), float(writes[best]))


def _held(curves: Curves) -> Floats:
    """[class, edge] for how long a page is held on average, in a tier whose life is the edge."""
    mean = (curves.left[:, 1:] + curves.left[:, :-1]) / 2
    return np.concatenate([np.zeros((len(mean), 1)), np.cumsum(mean * np.diff(EDGES), axis=1)], axis=1)


def _summed(rows: Floats) -> Floats:
    """Sums of the first rows: none, one, two ..."""
    return np.concatenate([np.zeros((1, rows.shape[1])), np.cumsum(rows, axis=0)])


def _life(pages: Floats, capacity: float) -> float:
    """``pages``: how many are held, for each life of EDGES."""
    return float(np.interp(capacity, pages, EDGES))

"""How long it takes until pages are asked for again, by what is known of them when they are written.

A sample of pages, chosen by their hashes, is followed from each use to the next. The clock counts pages that were
used: no seconds, so that the ranks of a model, which are asked for the same pages, learn the same. Each use begins an
interval of some class (``classes.py``); it ends with the next use, or is given up when the sample is full. ``curves``
makes of them for each class the share of its pages that have not come back after some time. It goes by what was seen
lately of intervals of each age, as life tables do, so that those that have not ended count as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Name = tuple[int, int]
"""Of a page: words of its identity and its hash."""

BUCKETS = 64
"""Two for each doubling."""
EDGES: Floats = np.concatenate([[0.0], 2.0 ** (np.arange(1, BUCKETS + 1) / 2)])
_SAMPLE = 1 << 14
_FINEST = 2
"""At first one page of ``2 ** _FINEST`` is followed."""


@dataclass(frozen=True, slots=True)
class Curves:
    """Of each class."""

    rate: Floats
    """Pages of it for each page used."""
    left: Floats
    """[class, edge] share of its pages that have not come back."""


class Experience:
    """Not locked: the caller is."""

    def __init__(self, classes: int, sample: int = _SAMPLE, finest: int = _FINEST) -> None:
        self.clock = 0
        self._sparse = finest
        self._slots: dict[Name, int] = {}
        self._free = list(range(sample))
        self._began = np.zeros(sample, np.int64)
        self._class = np.full(sample, -1, np.int16)
        self._passed = np.zeros(sample, np.int64)
        """Buckets that the interval was counted in."""
        self._ended = np.zeros((classes, BUCKETS))
        """[class, bucket] intervals that ended in it."""
        self._exposed = np.zeros((classes, BUCKETS + 1))
        """[class, bucket] intervals that ended in it or lived through it; as differences from bucket to bucket."""
        self._begun = np.zeros(classes)
        self._watched = 0.0
        """Pages used for which ``_begun`` counts."""

    def sampled(self, words: npt.NDArray[np.int64]) -> npt.NDArray[np.intp]:
        """The positions of the pages that are followed."""
        return np.flatnonzero((words[:, 5] & ((1 << self._sparse) - 1)) == 0)

    def pass_time(self, pages: int) -> None:
        """So many pages were used."""
        self.clock += pages
        self._watched += pages

    def classes_of(self, names: Sequence[Name]) -> npt.NDArray[np.int64]:
        """Of the intervals that pages are in; -1 where one is not followed."""
        slots = np.array([self._slots.get(name, -1) for name in names], np.int64)
        return np.where(slots < 0, -1, self._class[slots])

    def used(self, names: Sequence[Name], new_classes: npt.NDArray[np.int64]) -> None:
        """Pages are used now, and are of ``new_classes`` from now on. ``names``: no page twice."""
        most = max(1, len(self._class) // 8)
        for first in range(0, len(names), most):
            self._used(names[first : first + most], new_classes[first : first + most])

    def _used(self, names: Sequence[Name], new_classes: npt.NDArray[np.int64]) -> None:
        found = [self._slots.pop(name, -1) for name in names]
        while len(self._free) < found.count(-1):
            self._give_up(list(self._slots)[: max(1, len(self._slots) // 8)])
        slots = np.array(found)
        followed = slots[slots >= 0]
        ended_in, of = bucket(self.clock - self._began[followed]), self._class[followed]
        np.add.at(self._ended, (of, ended_in), 1)
        np.add.at(self._exposed, (of, self._passed[followed]), 1)
        np.add.at(self._exposed, (of, ended_in + 1), -1)
        slots[slots < 0] = [self._free.pop() for _ in range(len(slots) - len(followed))]
        # Put last: the first in the table is the one that was used longest ago.
        self._slots.update(zip(names, slots.tolist(), strict=True))
        self._began[slots], self._class[slots], self._passed[slots] = self.clock, new_classes, 0
        np.add.at(self._begun, new_classes, 1 << self._sparse)

    def _give_up(self, names: list[Name]) -> None:
        self._count_waiting()
        for name in names:
            slot = self._slots.pop(name)
            self._class[slot] = -1
            self._free.append(slot)

    def _count_waiting(self) -> None:
        """Count the buckets that intervals have lived through, which have not ended."""
        live = np.flatnonzero(self._class >= 0)
        now_in = bucket(self.clock - self._began[live])
        rows, size = self._class[live].astype(np.int64) * (BUCKETS + 1), self._exposed.size
        entered = np.bincount(rows + self._passed[live], minlength=size)
        left = np.bincount(rows + now_in, minlength=size)
        self._exposed += (entered - left).reshape(self._exposed.shape)
        self._passed[live] = now_in

    @property
    def horizon(self) -> int:
        """Pages used since the use that is longest ago among those that are followed."""
        for slot in self._slots.values():
            return int(self.clock - self._began[slot])
        return 0

    def thin_out(self, life: float) -> None:
        """Follow half as many pages, if the sample is about full and does not reach back for ``life`` pages used."""
        if len(self._free) > len(self._class) // 4 or self.horizon >= life or self._sparse >= 30:
            return
        self._sparse += 1
        mask = (1 << self._sparse) - 1
        self._give_up([name for name in self._slots if name[1] & mask])

    def curves(self, like: Iterable[npt.NDArray[np.int64]] = ()) -> Curves:
        """What was learnt so far. ``like``: the classes of each kind; of one with few pages, what is known of its kind
        counts for the rest."""
        self._count_waiting()
        ended, exposed = self._ended.copy(), self._exposed.cumsum(axis=1)[:, :BUCKETS]
        for kind in like:
            of_kind, of_all = exposed[kind].sum(axis=0), ended[kind].sum(axis=0)
            hazard = np.divide(of_all, of_kind, out=np.zeros_like(of_all), where=of_kind > 0)
            ended[kind] += _PRIOR * hazard
            exposed[kind] += _PRIOR
        hazard = np.divide(ended, exposed, out=np.zeros_like(ended), where=exposed > 0)
        left = np.concatenate([np.ones((len(ended), 1)), np.cumprod(1 - np.minimum(hazard, 1.0), axis=1)], axis=1)
        return Curves(self._begun / max(1.0, self._watched), left)

    def fade(self, share: float) -> None:
        """Only ``share`` of the past counts from now on."""
        for counts in (self._ended, self._exposed, self._begun):
            counts *= share
        self._watched *= share


_PRIOR = 5.0
"""Pages of a class that what is known of all of its kind counts for."""


def bucket(gap: npt.NDArray[np.int64] | int) -> npt.NDArray[np.int64]:
    """The bucket i of a gap: EDGES[i] <= gap < EDGES[i + 1]."""
    return np.searchsorted(EDGES, gap, side="right").clip(1, BUCKETS) - 1

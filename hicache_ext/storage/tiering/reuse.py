"""Time until pages are requested again, by class: by what is known about them when they are written.

A sample of pages, chosen by their hashes, is tracked from each use to the next. The clock counts pages used, not
seconds, so that the ranks of a model, which see the same requests, learn the same. Each use begins an
interval of some class; it ends with the next use, or is given up when the sample is full. ``curves`` derives for
each class the share of its pages that have not returned after some time. Like a life table, it uses recent
observations of intervals of each age, so that intervals that have not ended count as well.

The pages of one request that nobody has requested before are a run. The class depends on the length of the run, the
place in it, and how often something else has followed the page before it: a continuation of a system prompt differs
from the next turn of a conversation. The last page of a run has a class of its own.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hicache_ext.page.envelope import IDENTITY_LENGTH
from hicache_ext.storage.contract.store import PageKeys

Floats = npt.NDArray[np.float64]
Name = tuple[int, int]
"""A page's name: words of its identity and its hash."""

BUCKETS = 64
"""Number of buckets of time, two per doubling."""
EDGES: Floats = np.concatenate([[0.0], 2.0 ** (np.arange(1, BUCKETS + 1) / 2)])
_SAMPLE = 1 << 14
_FINEST = 2
"""Initially one page in ``2 ** _FINEST`` is tracked."""


@dataclass(frozen=True, slots=True)
class Curves:
    """Reuse statistics per class."""

    rate: Floats
    """[class] pages of the class per page used."""
    left: Floats
    """[class, edge] share of the class's pages that have not returned."""


class Experience:
    """The sample of pages and what was learnt from it. The caller locks."""

    def __init__(self, classes: int, sample: int = _SAMPLE, finest: int = _FINEST) -> None:
        self.clock = 0
        self._sparse = finest
        self._slots: dict[Name, int] = {}
        self._free = list(range(sample))
        self._began = np.zeros(sample, np.int64)
        self._class = np.full(sample, -1, np.int16)
        self._buckets_counted = np.zeros(sample, np.int64)
        """[slot] number of buckets in which the interval was already counted as exposed."""
        self._ended = np.zeros((classes, BUCKETS))
        """[class, bucket] intervals that ended in the bucket."""
        self._exposed = np.zeros((classes, BUCKETS + 1))
        """[class, bucket] intervals that ended in the bucket or outlived it; as differences between buckets."""
        self._begun = np.zeros(classes)
        self._watched = 0.0
        """Pages used in the period that ``_begun`` covers."""

    def sampled(self, words: npt.NDArray[np.int64]) -> npt.NDArray[np.intp]:
        """Return the positions of the pages that are tracked."""
        return np.flatnonzero((words[:, 5] & ((1 << self._sparse) - 1)) == 0)

    def pass_time(self, pages: int) -> None:
        """Advance the clock by ``pages`` used."""
        self.clock += pages
        self._watched += pages

    def classes_of(self, names: Sequence[Name]) -> npt.NDArray[np.int64]:
        """Return the classes of the pages' current intervals; -1 for a page that is not tracked."""
        slots = np.array([self._slots.get(name, -1) for name in names], np.int64)
        return np.where(slots < 0, -1, self._class[slots])

    def used(self, names: Sequence[Name], new_classes: npt.NDArray[np.int64]) -> None:
        """Record a use of pages, which are of ``new_classes`` from now on. ``names`` must be unique."""
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
        np.add.at(self._exposed, (of, self._buckets_counted[followed]), 1)
        np.add.at(self._exposed, (of, ended_in + 1), -1)
        slots[slots < 0] = [self._free.pop() for _ in range(len(slots) - len(followed))]
        # Appended, so that the first page in the table is the least recently used.
        self._slots.update(zip(names, slots.tolist(), strict=True))
        self._began[slots], self._class[slots], self._buckets_counted[slots] = self.clock, new_classes, 0
        np.add.at(self._begun, new_classes, 1 << self._sparse)

    def _give_up(self, names: list[Name]) -> None:
        self._count_waiting()
        for name in names:
            slot = self._slots.pop(name)
            self._class[slot] = -1
            self._free.append(slot)

    def _count_waiting(self) -> None:
        """Count the buckets that intervals still open have outlived."""
        live = np.flatnonzero(self._class >= 0)
        now_in = bucket(self.clock - self._began[live])
        rows, size = self._class[live].astype(np.int64) * (BUCKETS + 1), self._exposed.size
        entered = np.bincount(rows + self._buckets_counted[live], minlength=size)
        left = np.bincount(rows + now_in, minlength=size)
        self._exposed += (entered - left).reshape(self._exposed.shape)
        self._buckets_counted[live] = now_in

    @property
    def horizon(self) -> int:
        """Pages used since the oldest last use in the sample."""
        for slot in self._slots.values():
            return int(self.clock - self._began[slot])
        return 0

    def thin_out(self, life: float) -> None:
        """Track half as many pages if the sample is nearly full and reaches back less than ``life`` pages used."""
        if len(self._free) > len(self._class) // 4 or self.horizon >= life or self._sparse >= 30:
            return
        self._sparse += 1
        mask = (1 << self._sparse) - 1
        self._give_up([name for name in self._slots if name[1] & mask])

    def curves(self, like: Iterable[npt.NDArray[np.int64]] = ()) -> Curves:
        """Return what was learnt so far. ``like``: groups of similar classes; a class with few pages is complemented by
        the statistics of its group."""
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
        """Weight the past by ``share``."""
        for counts in (self._ended, self._exposed, self._begun):
            counts *= share
        self._watched *= share


_PRIOR = 5.0
"""Weight, in pages of a class, of the statistics of its whole group."""


def bucket(gap: npt.NDArray[np.int64] | int) -> npt.NDArray[np.int64]:
    """Return the bucket i of a gap: EDGES[i] <= gap < EDGES[i + 1]."""
    return np.searchsorted(EDGES, gap, side="right").clip(1, BUCKETS) - 1


_LENGTHS = np.array([4, 16, 64])
_PLACES = np.array([2, 8, 32])
UNKNOWN, FIRST, SECOND, MANY = range(4)
"""Kind of a run: the page before it is unknown; or it was followed by nothing else, by few other runs, or by many."""
_KINDS = 4
_FEW = 8
FIRSTS = (len(_LENGTHS) + 1) * (len(_PLACES) + 1) * _KINDS + _KINDS
"""Number of classes of first requests, which come first."""
RUNS = (
    np.arange(len(_LENGTHS) + 1)[:, None, None] * (len(_PLACES) + 1) * _KINDS
    + np.arange(_KINDS)[:, None]
    + np.arange(len(_PLACES) + 1) * _KINDS
).reshape(-1, len(_PLACES) + 1)
"""[kind of run, place] classes of runs from head to tail."""
MOST_SEEN = 3
CLASSES = FIRSTS + MOST_SEEN
"""Number of all classes; the last ones are of pages requested once, twice, and more often before."""
_MOST_PARENTS = 1 << 14
_MOST_RUNS = 1 << 12


def classes_of_run(length: int, first: int, count: int, kind: int, *, ends: bool) -> npt.NDArray[np.int64]:
    """Return the classes of ``count`` pages of a run of ``length``, from its page ``first`` on. ``ends``: whether they
    include the last page of the run."""
    of_length = int(np.searchsorted(_LENGTHS, length, side="right"))
    of_places = np.searchsorted(_PLACES, np.arange(first, first + count), side="right")
    found = (of_length * (len(_PLACES) + 1) + of_places) * _KINDS + kind
    if ends and count:
        found[-1] = FIRSTS - _KINDS + kind
    return found


def seen_again(before: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the classes of pages that were requested again; ``before``: their former classes, -1 if unknown."""
    return np.clip(before + 1, FIRSTS, CLASSES - 1)


class Continuations:
    """Which runs follow which pages: noted by look-ups, queried when the runs are written. Threads: any; a call waits
    only for a few dictionary operations."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._followed: OrderedDict[int, int] = OrderedDict()
        """First word of a page hash -> number of runs that have followed that page."""
        self._kinds: OrderedDict[int, int] = OrderedDict()
        """First word of the hash of a run's first page -> kind of the run."""

    def note(self, before: int, first: int) -> int:
        """Note that the run that begins with the page ``first`` follows the page ``before``; return its kind."""
        with self._lock:
            kind = self._kinds.get(first)
            if kind is None:
                followed = self._followed.pop(before, 0)
                self._followed[before] = followed + 1
                kind = FIRST if not followed else SECOND if followed < _FEW else MANY
                self._kinds[first] = kind
                _forget_oldest(self._followed, _MOST_PARENTS)
                _forget_oldest(self._kinds, _MOST_RUNS)
            return kind

    def kind(self, first: int) -> int:
        """Return the kind of the run that begins with the page ``first``."""
        return self._kinds.get(first, UNKNOWN)

    def looked_up(self, keys: Sequence[bytes], leading: int) -> None:
        """Note a lookup of a chain whose first ``leading`` pages are present: the pages written next follow these."""
        if 0 < leading < len(keys):
            self.note(_first_word(keys, leading - 1), _first_word(keys, leading))


def _first_word(keys: Sequence[bytes], page: int) -> int:
    if isinstance(keys, PageKeys):
        return int(keys.words[page, IDENTITY_LENGTH // 8])
    return int.from_bytes(keys[page][IDENTITY_LENGTH : IDENTITY_LENGTH + 8], "little", signed=True)


def _forget_oldest(table: OrderedDict[int, int], most: int) -> None:
    if len(table) > most:
        table.popitem(last=False)


_BITS = 1 << 24
"""Bits of each of two filters: 2 MiB."""
_FULL = 1 << 20
"""Pages after which a filter is full: sixteen bits per page, and a false positive rate of one in four hundred."""


class Firsts:
    """Two Bloom filters: when one is full, the other, older one is emptied and used next. So at least the last
    ``_FULL`` pages are remembered, and at most twice as many. A false positive, which is rare, makes a page be written
    too early. The caller locks."""

    def __init__(self, bits: int = _BITS, full: int = _FULL) -> None:
        """``bits``: a power of two."""
        self._full = full
        self._mask = np.int64(bits - 1)
        self._filters = [np.zeros(bits >> 3, np.uint8), np.zeros(bits >> 3, np.uint8)]
        self._count = 0

    def note(self, words: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Note these pages as offered; return a mask of those offered before. ``words``: from ``key_words``."""
        # Page hashes are SHA-256: their four words are four independent hashes.
        bits = (words[:, 2:6] ^ words[:, :1] ^ words[:, 1:2]) & self._mask
        places, flags = bits >> 3, np.left_shift(1, bits & 7).astype(np.uint8)
        newer, older = self._filters
        known: npt.NDArray[np.bool_] = ((newer[places] & flags) != 0).all(axis=1)
        if not known.all():
            known_before = known | ((older[places] & flags) != 0).all(axis=1)
            self._count += int((~known).sum())
            # Unbuffered, because two of these pages may share a byte.
            np.bitwise_or.at(newer, places[~known].ravel(), flags[~known].ravel())
            known = known_before
        if self._count >= self._full:
            self._filters = [older, newer]
            older[:] = 0
            self._count = 0
        return known

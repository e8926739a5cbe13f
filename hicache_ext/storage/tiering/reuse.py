"""How long it takes until pages are asked for again, by what is known of them when they are written: their class.

A sample of pages, chosen by their hashes, is followed from each use to the next. The clock counts pages that were
used: no seconds, so that the ranks of a model, which are asked for the same pages, learn the same. Each use begins an
interval of some class; it ends with the next use, or is given up when the sample is full. ``curves`` makes of them for
each class the share of its pages that have not come back after some time. It goes by what was seen lately of intervals
of each age, as life tables do, so that those that have not ended count as well.

The pages of one request that nobody has asked for before are a run. A class is made of the length of the run, the place
in it, and how often something else has followed the page before it: what follows a system prompt is another thing than
the next turn of a conversation. The last page of a run is a class by itself.
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


_LENGTHS = np.array([4, 16, 64])
_PLACES = np.array([2, 8, 32])
UNKNOWN, FIRST, SECOND, MANY = range(4)
"""The page before a run is not known; or nothing else has followed it, or few runs, or many."""
_KINDS = 4
_FEW = 8
FIRSTS = (len(_LENGTHS) + 1) * (len(_PLACES) + 1) * _KINDS + _KINDS
"""Classes of first requests are those below this."""
RUNS = (
    np.arange(len(_LENGTHS) + 1)[:, None, None] * (len(_PLACES) + 1) * _KINDS
    + np.arange(_KINDS)[:, None]
    + np.arange(len(_PLACES) + 1) * _KINDS
).reshape(-1, len(_PLACES) + 1)
"""[kind of run, place] the classes of runs from head to tail."""
MOST_SEEN = 3
CLASSES = FIRSTS + MOST_SEEN
"""Classes of pages that were asked for once, twice, and more often before."""
_MOST_PARENTS = 1 << 14
_MOST_RUNS = 1 << 12


def classes_of_run(length: int, first: int, count: int, kind: int, *, ends: bool) -> npt.NDArray[np.int64]:
    """The classes of ``count`` pages of a run of ``length``, from its page ``first`` on. ``ends``: the last of them is
    the last of the run."""
    of_length = int(np.searchsorted(_LENGTHS, length, side="right"))
    of_places = np.searchsorted(_PLACES, np.arange(first, first + count), side="right")
    found = (of_length * (len(_PLACES) + 1) + of_places) * _KINDS + kind
    if ends and count:
        found[-1] = FIRSTS - _KINDS + kind
    return found


def seen_again(before: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The classes of pages that were asked for again; ``before``: those that they were of, -1: not known."""
    return np.clip(before + 1, FIRSTS, CLASSES - 1)


class Continuations:
    """Which runs follow which pages: noted by look-ups, asked when the runs are written. Threads: any; nobody waits for
    anything but a few operations on dictionaries."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._followed: OrderedDict[int, int] = OrderedDict()
        """First word of a page hash -> how many runs have followed that page."""
        self._kinds: OrderedDict[int, int] = OrderedDict()
        """The same of the first page of a run -> its kind."""

    def note(self, before: int, first: int) -> int:
        """The run that begins with the page ``first`` follows the page ``before``: its kind."""
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
        """Of the run that begins with the page ``first``."""
        return self._kinds.get(first, UNKNOWN)

    def looked_up(self, keys: Sequence[bytes], leading: int) -> None:
        """A chain of which the first ``leading`` pages are there: what is written next follows the last of them."""
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
"""Of each of two filters: 2 MiB."""
_FULL = 1 << 20
"""Pages after which a filter is full: sixteen bits a page, and one in four hundred is taken for another one."""


class Firsts:
    """Two Bloom filters: when one is full, the other, older one is emptied and goes on. So the last ``_FULL`` pages are
    remembered at least, and twice as many at most. A page that was never offered is rarely taken for one that was; it
    is then written too early. Not locked: the caller is."""

    def __init__(self, bits: int = _BITS, full: int = _FULL) -> None:
        """``bits``: a power of two."""
        self._full = full
        self._mask = np.int64(bits - 1)
        self._filters = [np.zeros(bits >> 3, np.uint8), np.zeros(bits >> 3, np.uint8)]
        self._count = 0

    def note(self, words: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which of these pages were offered before; all of them are from now on. ``words``: of ``key_words``."""
        # Page hashes are SHA-256: their four words are four independent hashes.
        bits = (words[:, 2:6] ^ words[:, :1] ^ words[:, 1:2]) & self._mask
        places, flags = bits >> 3, np.left_shift(1, bits & 7).astype(np.uint8)
        newer, older = self._filters
        known: npt.NDArray[np.bool_] = ((newer[places] & flags) != 0).all(axis=1)
        if not known.all():
            known_before = known | ((older[places] & flags) != 0).all(axis=1)
            self._count += int((~known).sum())
            # One after the other: two of these pages may share a byte.
            np.bitwise_or.at(newer, places[~known].ravel(), flags[~known].ravel())
            known = known_before
        if self._count >= self._full:
            self._filters = [older, newer]
            older[:] = 0
            self._count = 0
        return known

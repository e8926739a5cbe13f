"""What is known of a page when it is written for the first time: its class.

The pages of one request that nobody has asked for before are a run. A class is made of the length of the run, the place
in it, and how often something else has followed the page before it: what follows a system prompt is another thing than
the next turn of a conversation. The last page of a run is a class by itself.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hicache_ext.page.envelope import IDENTITY_LENGTH
from hicache_ext.storage.contract.store import PageKeys

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

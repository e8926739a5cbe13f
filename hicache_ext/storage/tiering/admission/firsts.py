"""Remembers which pages were offered before, in a few bits each."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

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

    @property
    def bytes(self) -> int:
        return sum(filter_.nbytes for filter_ in self._filters)

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

"""The two planes of a page: bits that repeat, which an entropy coder makes fewer, and bits that do not.

Numbers are little-endian. ``top`` of 16 and 32 bits is the exponent of a float with 8 bits of it: the sign goes from
the highest bit to the lowest, then the highest byte into its plane. ``top`` of 8 bits has the bits 3 to 6 of two
neighbours.

The native core (planes.c) takes a page apart without the GIL, at about the speed of memory. A codec needs it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hicache_ext import native
from hicache_ext.errors import HicacheExtError
from hicache_ext.native import address, words

Bytes = npt.NDArray[np.uint8]


def needed_core() -> native.Core:
    """Raises HicacheExtError where it is not there."""
    if (core := native.core()) is None:
        raise HicacheExtError(f"a codec needs the native core: {native.why_not()}; {native.REMEDY}")
    return core


class _SplitPage(native.Arguments):
    function = "hicache_split"
    _fields_ = words("page top rest bits count")


class _JoinPlanes(native.Arguments):
    function = "hicache_join"
    _fields_ = words("top rest page bits count")


@dataclass(frozen=True, slots=True)
class Split:
    """How numbers of one size are taken apart."""

    bits: int
    """8, 16 or 32: of a number."""
    group: int
    """Bytes of a page that give one byte of ``top``; a page has a multiple of them."""

    def planes(self, page: int) -> tuple[int, int]:
        """Bytes of ``top`` and of ``rest`` of a page with so many."""
        return page // self.group, page - page // self.group

    def split(self, page: Bytes, top: Bytes, rest: Bytes) -> None:
        """Fill ``top`` and ``rest``."""
        self._check(page, top, rest)
        needed_core()(_SplitPage(address(page), address(top), address(rest), self.bits, top.size))

    def join(self, top: Bytes, rest: Bytes, page: Bytes) -> None:
        """Fill ``page``."""
        self._check(page, top, rest)
        needed_core()(_JoinPlanes(address(top), address(rest), address(page), self.bits, top.size))

    def _check(self, page: Bytes, top: Bytes, rest: Bytes) -> None:
        """The core does not look where arrays end. Raises ValueError: a programming error."""
        if page.size % self.group or (top.size, rest.size) != self.planes(page.size):
            raise ValueError(f"{page.size} bytes are not {top.size} and {rest.size} of {self.bits} bits")


SPLITS = {8: Split(8, 2), 16: Split(16, 2), 32: Split(32, 4)}
"""By bits of a number."""

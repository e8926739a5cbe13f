"""The two planes of a page: bits that repeat, which an entropy coder makes fewer, and bits that do not.

Numbers are little-endian. ``top`` of 16 and 32 bits is the exponent of a float with 8 bits of it: the sign goes from
the highest bit to the lowest, then the highest byte into its plane. ``top`` of 8 bits has the bits 3 to 6 of two
neighbours.

The native core (planes.c) takes a page apart without the GIL, at about the speed of memory; numpy does without it. Both
give equal bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hicache_ext import native
from hicache_ext.native import address, words

Bytes = npt.NDArray[np.uint8]
Move = Callable[[Bytes, Bytes, Bytes], None]

_PIECE = 64 << 10


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
        if core := native.core():
            core(_SplitPage(address(page), address(top), address(rest), self.bits, top.size))
        else:
            self.split_with_numpy(page, top, rest)

    def join(self, top: Bytes, rest: Bytes, page: Bytes) -> None:
        """Fill ``page``."""
        self._check(page, top, rest)
        if core := native.core():
            core(_JoinPlanes(address(top), address(rest), address(page), self.bits, top.size))
        else:
            self.join_with_numpy(top, rest, page)

    def split_with_numpy(self, page: Bytes, top: Bytes, rest: Bytes) -> None:
        for pieces in self._pieces(page, top, rest):
            _SPLIT[self.bits](*pieces)

    def join_with_numpy(self, top: Bytes, rest: Bytes, page: Bytes) -> None:
        for piece, of_top, of_rest in self._pieces(page, top, rest):
            _JOIN[self.bits](of_top, of_rest, piece)

    def _pieces(self, page: Bytes, top: Bytes, rest: Bytes) -> Iterator[tuple[Bytes, Bytes, Bytes]]:
        """What numpy makes of a piece on the way stays in the processor's cache."""
        of_top, of_rest = self.planes(_PIECE)
        for piece in range(-(-page.size // _PIECE)):
            yield (
                page[piece * _PIECE :][:_PIECE],
                top[piece * of_top :][:of_top],
                rest[piece * of_rest :][:of_rest],
            )

    def _check(self, page: Bytes, top: Bytes, rest: Bytes) -> None:
        """The core does not look where arrays end. Raises ValueError: a programming error."""
        if page.size % self.group or (top.size, rest.size) != self.planes(page.size):
            raise ValueError(f"{page.size} bytes are not {top.size} and {rest.size} of {self.bits} bits")


SPLITS = {8: Split(8, 2), 16: Split(16, 2), 32: Split(32, 4)}
"""By bits of a number."""


def _split_16(page: Bytes, top: Bytes, rest: Bytes) -> None:
    numbers = page.view("<u2")
    turned = numbers << 1
    turned |= numbers >> 15
    np.copyto(rest, turned, casting="unsafe")
    turned >>= 8
    np.copyto(top, turned, casting="unsafe")


def _join_16(top: Bytes, rest: Bytes, page: Bytes) -> None:
    turned = top.astype("<u2")
    turned <<= 8
    turned |= rest
    numbers = page.view("<u2")
    np.right_shift(turned, 1, out=numbers)
    turned <<= 15
    numbers |= turned


def _split_32(page: Bytes, top: Bytes, rest: Bytes) -> None:
    numbers = page.view("<u4")
    turned = numbers << 1
    turned |= numbers >> 31
    of_numbers = turned.view(np.uint8).reshape(-1, 4)
    np.copyto(rest.reshape(-1, 3), of_numbers[:, :3])
    np.copyto(top, of_numbers[:, 3])


def _join_32(top: Bytes, rest: Bytes, page: Bytes) -> None:
    turned = np.empty(len(top), "<u4")
    of_numbers = turned.view(np.uint8).reshape(-1, 4)
    np.copyto(of_numbers[:, :3], rest.reshape(-1, 3))
    np.copyto(of_numbers[:, 3], top)
    numbers = page.view("<u4")
    np.right_shift(turned, 1, out=numbers)
    turned <<= 31
    numbers |= turned


def _split_8(page: Bytes, top: Bytes, rest: Bytes) -> None:
    pairs = page.view("<u2")
    chosen = (pairs >> 3 & 0x0F) | (pairs >> 7 & 0xF0)
    np.copyto(top, chosen, casting="unsafe")
    chosen = (pairs & 0x07) | (pairs >> 4 & 0x78) | (pairs >> 8 & 0x80)
    np.copyto(rest, chosen, casting="unsafe")


def _join_8(top: Bytes, rest: Bytes, page: Bytes) -> None:
    high, low = top.astype("<u2"), rest.astype("<u2")
    pairs = (high & 0x0F) << 3 | (high & 0xF0) << 7
    pairs |= (low & 0x07) | (low & 0x78) << 4 | (low & 0x80) << 8
    np.copyto(page.view("<u2"), pairs)


_SPLIT: Mapping[int, Move] = {8: _split_8, 16: _split_16, 32: _split_32}
_JOIN: Mapping[int, Move] = {8: _join_8, 16: _join_16, 32: _join_32}

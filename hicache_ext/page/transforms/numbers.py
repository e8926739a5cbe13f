"""The numbers of a page, taken apart by the native core (planes.c) without the GIL: what a codec needs.

*Planes* (``Split``): bits that repeat, which an entropy coder makes fewer, and bits that do not. Numbers are
little-endian. ``top`` of 16 and 32 bits is the exponent of a float with 8 bits of it: the sign goes from the highest
bit to the lowest, then the highest byte into its plane. ``top`` of 8 bits has the bits 3 to 6 of two neighbours.

*Rows* (``Rows``): the numbers of one head of one token in one layer, as codes of 8 bits and a scale. ``scale`` is the
row's largest magnitude by the largest code, rounded up to bfloat16. Codes are int8 (number / scale, to the nearest) or
fp8 (e4m3). All arithmetic is that of float32, step by step; numbers of 2**100 and more are refused.

Pages may lie at any address.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hicache_ext import native
from hicache_ext.native import address, words

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint16]


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
        native.needed()(_SplitPage(address(page), address(top), address(rest), self.bits, top.size))

    def join(self, top: Bytes, rest: Bytes, page: Bytes) -> None:
        """Fill ``page``."""
        self._check(page, top, rest)
        native.needed()(_JoinPlanes(address(top), address(rest), address(page), self.bits, top.size))

    def _check(self, page: Bytes, top: Bytes, rest: Bytes) -> None:
        """The core does not look where arrays end. Raises ValueError: a programming error."""
        if page.size % self.group or (top.size, rest.size) != self.planes(page.size):
            raise ValueError(f"{page.size} bytes are not {top.size} and {rest.size} of {self.bits} bits")


SPLITS = {8: Split(8, 2), 16: Split(16, 2), 32: Split(32, 4)}
"""By bits of a number."""


KINDS = {"bfloat16": 0, "float16": 1, "float32": 2}
"""The dtypes whose numbers can be quantised."""
_LARGEST_SCALE = 0x7180


class _Quantise(native.Arguments):
    function = "hicache_quantise"
    _fields_ = words("page kind code length row_count scales codes")


class _Restore(native.Arguments):
    function = "hicache_restore"
    _fields_ = words("scales codes kind code length row_count page")


@dataclass(frozen=True, slots=True)
class Rows:
    """How the pages of one pool are quantised."""

    dtype: str
    """One of ``KINDS``."""
    length: int
    """Numbers of a row."""
    code: str
    """``int8`` or ``fp8``."""

    @property
    def words(self) -> int:
        """Words of 16 bits in a number."""
        return 2 if self.dtype == "float32" else 1

    def quantise(self, page: Words, scales: Words, codes: Bytes) -> bool:
        """Fill ``scales`` and ``codes``. False where the page has a number of 2**100 or more, an infinity or a NaN."""
        self._check(page, scales, codes)
        how = KINDS[self.dtype], self.code == "fp8", self.length, len(scales)
        return bool(native.needed()(_Quantise(address(page), *how, address(scales), address(codes))))

    def restore(self, scales: Words, codes: Bytes, page: Words) -> bool:
        """Fill ``page``. False where these are no scales."""
        self._check(page, scales, codes)
        if scales.size and int(scales.max()) >= _LARGEST_SCALE:
            return False
        how = KINDS[self.dtype], self.code == "fp8", self.length, len(scales)
        native.needed()(_Restore(address(scales), address(codes), *how, address(page)))
        return True

    def _check(self, page: Words, scales: Words, codes: Bytes) -> None:
        """The core does not look where arrays end. Raises ValueError: a programming error."""
        if codes.size != scales.size * self.length or page.size != codes.size * self.words:
            raise ValueError(f"{page.size} words are not {scales.size} rows of {self.length} numbers")

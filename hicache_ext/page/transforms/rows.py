"""The numbers of a page, row by row (those of one head of one token in one layer), as codes of 8 bits and a scale.

``scale`` is the row's largest magnitude by the largest code, rounded up to bfloat16. Codes are int8 (number / scale,
to the nearest) or fp8 (e4m3). All arithmetic is that of float32, step by step; numbers of 2**100 and more are refused.
The native core (planes.c) does it without the GIL.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hicache_ext import native
from hicache_ext.native import address, words
from hicache_ext.page.transforms.planes import needed_core

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint16]

KINDS = {"bfloat16": 0, "float16": 1, "float32": 2}
"""The dtypes whose numbers can be quantised."""
_LARGEST_SCALE = 0x7180


class _Quantise(native.Arguments):
    function = "hicache_quantise"
    _fields_ = words("page kind code length row_count scales codes")


class _Restore(native.Arguments):
    function = "hicache_restore"
    _fields_ = words("scales codes kind code length row_count page")


class Code(enum.Enum):
    """What a number becomes."""

    INT8 = "int8"
    FP8 = "fp8"


@dataclass(frozen=True, slots=True)
class Rows:
    """How the pages of one pool are quantised."""

    dtype: str
    """One of ``KINDS``."""
    length: int
    """Numbers of a row."""
    code: Code

    @property
    def words(self) -> int:
        """Words of 16 bits in a number."""
        return 2 if self.dtype == "float32" else 1

    def quantise(self, page: Words, scales: Words, codes: Bytes) -> bool:
        """Fill ``scales`` and ``codes``. False where the page has a number of 2**100 or more, an infinity or a NaN."""
        self._check(page, scales, codes)
        how = KINDS[self.dtype], self.code is Code.FP8, self.length, len(scales)
        return bool(needed_core()(_Quantise(address(page), *how, address(scales), address(codes))))

    def restore(self, scales: Words, codes: Bytes, page: Words) -> bool:
        """Fill ``page``. False where these are no scales."""
        self._check(page, scales, codes)
        if scales.size and int(scales.max()) >= _LARGEST_SCALE:
            return False
        how = KINDS[self.dtype], self.code is Code.FP8, self.length, len(scales)
        needed_core()(_Restore(address(scales), address(codes), *how, address(page)))
        return True

    def _check(self, page: Words, scales: Words, codes: Bytes) -> None:
        """The core does not look where arrays end. Raises ValueError: a programming error."""
        if codes.size != scales.size * self.length or page.size != codes.size * self.words:
            raise ValueError(f"{page.size} words are not {scales.size} rows of {self.length} numbers")
        if not page.flags.aligned or not scales.flags.aligned:
            raise ValueError("words at an odd address")

"""The numbers of a page, row by row (those of one head of one token in one layer), as codes of 8 bits and a scale.

``scale`` is the row's largest magnitude by the largest code, rounded up to bfloat16. Codes are int8 (number / scale,
to the nearest) or fp8 (e4m3). The native core (planes.c) does it without the GIL, numpy without the core. Both give
equal bytes: all arithmetic is that of float32, step by step.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hicache_ext import native
from hicache_ext.native import address, words

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint16]
Floats = npt.NDArray[np.float32]

KINDS = {"bfloat16": 0, "float16": 1, "float32": 2}
"""The dtypes whose numbers can be quantised."""
_ROUND = np.float32(1.5 * 2.0**23)
"""Added to a number, it leaves an integer in the low bits."""
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_TOO_LARGE = np.uint32(0x71800000)
"""2**100: with larger numbers, infinities and NaNs a page is not quantised."""
_TOO_SMALL = np.uint32(0x0D800000)
"""2**-100: a row of smaller numbers becomes zeros."""
_BIAS_8 = np.uint32(120 << 23)
"""Exponents of float32 less those of fp8."""
_NORMAL_8 = np.uint32(0x3C800000)
"""2**-6, the smallest normal number of fp8."""
_STEPS_8 = np.float32(2.0**9)
"""Of smaller ones, in 1."""
_LARGEST_SCALE = 0x7180
_PIECE = 16 << 10
"""Numbers that numpy takes at once: what it makes of them on the way stays in the processor's cache."""


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
        if core := native.core():
            how = KINDS[self.dtype], self.code is Code.FP8, self.length, len(scales)
            return bool(core(_Quantise(address(page), *how, address(scales), address(codes))))
        return self.quantise_with_numpy(page, scales, codes)

    def restore(self, scales: Words, codes: Bytes, page: Words) -> bool:
        """Fill ``page``. False where these are no scales."""
        self._check(page, scales, codes)
        if scales.size and int(scales.max()) >= _LARGEST_SCALE:
            return False
        if core := native.core():
            how = KINDS[self.dtype], self.code is Code.FP8, self.length, len(scales)
            core(_Restore(address(scales), address(codes), *how, address(page)))
        else:
            self.restore_with_numpy(scales, codes, page)
        return True

    def quantise_with_numpy(self, page: Words, scales: Words, codes: Bytes) -> bool:
        largest = np.float32(448.0 if self.code is Code.FP8 else 127.0)
        for of_page, of_scales, of_codes in self._pieces(page, scales, codes):
            bits = _WIDEN[self.dtype](of_page).reshape(-1, self.length)
            top = (bits & _MAGNITUDE).max(axis=1)
            if (top >= _TOO_LARGE).any():
                return False
            some = top >= _TOO_SMALL
            scale = (np.where(some, top, np.uint32(0x3F800000)).view(np.float32) / largest).view(np.uint32)
            scale = (scale + np.uint32(0xFFFF)) >> np.uint32(16)
            np.copyto(of_scales, np.where(some, scale, np.uint32(0)), casting="unsafe")
            inverse = np.float32(1.0) / (scale << np.uint32(16)).view(np.float32)
            made = _ENCODE[self.code](bits, inverse[:, None])
            made[~some] = 0
            np.copyto(of_codes, made.reshape(-1), casting="unsafe")
        return True

    def restore_with_numpy(self, scales: Words, codes: Bytes, page: Words) -> None:
        for of_page, of_scales, of_codes in self._pieces(page, scales, codes):
            scale = (of_scales.astype(np.uint32) << np.uint32(16)).view(np.float32)
            numbers = _DECODE[self.code](of_codes.reshape(-1, self.length), scale[:, None])
            _NARROW[self.dtype](numbers.reshape(-1), of_page)

    def _pieces(self, page: Words, scales: Words, codes: Bytes) -> Iterator[tuple[Words, Words, Bytes]]:
        rows = max(1, _PIECE // self.length)
        numbers = rows * self.length
        for piece in range(-(-len(scales) // rows)):
            yield (
                page[piece * numbers * self.words :][: numbers * self.words],
                scales[piece * rows :][:rows],
                codes[piece * numbers :][:numbers],
            )

    def _check(self, page: Words, scales: Words, codes: Bytes) -> None:
        """The core does not look where arrays end. Raises ValueError: a programming error."""
        if codes.size != scales.size * self.length or page.size != codes.size * self.words:
            raise ValueError(f"{page.size} words are not {scales.size} rows of {self.length} numbers")
        if not page.flags.aligned or not scales.flags.aligned:
            raise ValueError("words at an odd address")


Bits = npt.NDArray[np.uint32]


def _from_bfloat16(page: Words) -> Bits:
    bits: Bits = page.astype(np.uint32)
    bits <<= np.uint32(16)
    return bits


def _from_float16(page: Words) -> Bits:
    # numpy's own conversion is exact; infinities and NaNs stay above every number that is allowed.
    bits: Bits = page.view(np.float16).astype(np.float32).view(np.uint32)
    return bits


def _from_float32(page: Words) -> Bits:
    low_first = page.reshape(-1, 2)
    bits: Bits = low_first[:, 0] | low_first[:, 1].astype(np.uint32) << np.uint32(16)
    return bits


def _to_bfloat16(numbers: Floats, page: Words) -> None:
    bits = numbers.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    np.copyto(page, rounded >> np.uint32(16), casting="unsafe")


def _to_float16(numbers: Floats, page: Words) -> None:
    np.copyto(page, np.clip(numbers, np.float32(-65504.0), np.float32(65504.0)).astype(np.float16).view(np.uint16))


def _to_float32(numbers: Floats, page: Words) -> None:
    bits, low_first = numbers.view(np.uint32), page.reshape(-1, 2)
    np.copyto(low_first[:, 0], bits & np.uint32(0xFFFF), casting="unsafe")
    np.copyto(low_first[:, 1], bits >> np.uint32(16), casting="unsafe")


def _int8(bits: Bits, inverse: Floats) -> Bits:
    made = bits.view(np.float32) * inverse
    made += _ROUND
    codes: Bits = made.view(np.uint32) & np.uint32(0xFF)
    return codes


def _fp8(bits: Bits, inverse: Floats) -> Bits:
    size = ((bits & _MAGNITUDE).view(np.float32) * inverse).view(np.uint32)
    small = np.minimum(size.view(np.float32), np.float32(1.0)) * _STEPS_8
    small += _ROUND
    normal = size - _BIAS_8 + np.uint32(0x7FFFF) + (size >> np.uint32(20) & np.uint32(1))
    codes: Bits = np.where(size < _NORMAL_8, small.view(np.uint32) & np.uint32(0xFF), normal >> np.uint32(20))
    codes |= bits >> np.uint32(24) & np.uint32(0x80)
    return codes


def _of_int8(codes: Bytes, scale: Floats) -> Floats:
    numbers: Floats = codes.view(np.int8).astype(np.float32)
    numbers *= scale
    return numbers


_SIZES_OF_FP8 = np.array(
    [code / 512 if code < 8 else (8 + code % 8) / 8 * 2.0 ** (code // 8 - 7) for code in range(128)], np.float32
)


def _of_fp8(codes: Bytes, scale: Floats) -> Floats:
    sizes = _SIZES_OF_FP8[codes & 0x7F] * scale
    bits = sizes.view(np.uint32) | (codes & np.uint32(0x80)) << np.uint32(24)
    numbers: Floats = bits.view(np.float32)
    return numbers


_WIDEN = {"bfloat16": _from_bfloat16, "float16": _from_float16, "float32": _from_float32}
_NARROW = {"bfloat16": _to_bfloat16, "float16": _to_float16, "float32": _to_float32}
_ENCODE = {Code.INT8: _int8, Code.FP8: _fp8}
_DECODE = {Code.INT8: _of_int8, Code.FP8: _of_fp8}

"""Splitting and quantising a page's numbers for codecs: in the native core (planes.c) without the GIL, or in numpy.

Both produce the same bytes; numpy is used if the native core was not built.

*Planes* (``Split``): bits that repeat, which an entropy coder compresses, and bits that do not. Numbers are
little-endian. For 16 and 32 bits, ``top`` is the exponent of a float with an 8-bit exponent: the sign moves from the
highest bit to the lowest, then the highest byte goes into its plane. For 8 bits, ``top`` has bits 3 to 6 of two
neighbours.
*Rows* (``Rows``): the numbers of one head of one token in one layer, as 8-bit codes and a scale. ``scale`` is the row's
largest magnitude divided by the largest code, rounded up to bfloat16. Codes are int8 (number / scale, to the nearest)
or fp8 (e4m3). All arithmetic is float32, step by step; numbers of 2**100 and more are refused.

Pages may lie at any address.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hicache_ext import native

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint16]
Bits = npt.NDArray[np.uint32]
Floats = npt.NDArray[np.float32]


PLANES = native.Struct("planes", "page top rest bits count join")
_PIECE = 64 << 10
"""Bytes of a page that numpy processes at a time."""


@dataclass(frozen=True, slots=True)
class Split:
    """How to split numbers of one size into planes."""

    bits: int
    """Bits of a number: 8, 16 or 32."""
    group: int
    """Bytes of a page per byte of ``top``; a page has a multiple of them."""

    def planes(self, page: int) -> tuple[int, int]:
        """Return the bytes of ``top`` and of ``rest`` for a page of ``page`` bytes."""
        return page // self.group, page - page // self.group

    def split(self, page: Bytes, top: Bytes, rest: Bytes) -> None:
        """Fill ``top`` and ``rest`` from ``page``."""
        if not self._by_core(page, top, rest, join=False):
            self.split_in_numpy(page, top, rest)

    def join(self, top: Bytes, rest: Bytes, page: Bytes) -> None:
        """Fill ``page`` from ``top`` and ``rest``."""
        if not self._by_core(page, top, rest, join=True):
            self.join_in_numpy(top, rest, page)

    def _by_core(self, page: Bytes, top: Bytes, rest: Bytes, *, join: bool) -> bool:
        """Use the native core; return False if there is none. It does not check array bounds, so this does: raises
        ValueError for a programming error."""
        if page.size % self.group or (top.size, rest.size) != self.planes(page.size):
            raise ValueError(f"{page.size} bytes are not {top.size} and {rest.size} of {self.bits} bits")
        if (core := native.core()) is None:
            return False
        core(PLANES, page, top, rest, self.bits, top.size, join)
        return True

    def split_in_numpy(self, page: Bytes, top: Bytes, rest: Bytes) -> None:
        for piece, of_top, of_rest in self._pieces(page, top, rest):
            if self.bits == 8:
                pairs = piece.view("<u2")
                np.copyto(of_top, (pairs >> 3 & 0x0F) | (pairs >> 7 & 0xF0), casting="unsafe")
                np.copyto(of_rest, (pairs & 0x07) | (pairs >> 4 & 0x78) | (pairs >> 8 & 0x80), casting="unsafe")
                continue
            numbers = piece.view(f"<u{self.group}")
            turned = numbers << 1
            turned |= numbers >> (self.bits - 1)
            if self.bits == 16:
                np.copyto(of_rest, turned, casting="unsafe")
            else:
                np.copyto(of_rest.reshape(-1, 3), turned.view(np.uint8).reshape(-1, 4)[:, :3])
            turned >>= self.bits - 8
            np.copyto(of_top, turned, casting="unsafe")

    def join_in_numpy(self, top: Bytes, rest: Bytes, page: Bytes) -> None:
        for piece, of_top, of_rest in self._pieces(page, top, rest):
            if self.bits == 8:
                high, low = of_top.astype("<u2"), of_rest.astype("<u2")
                pairs = (high & 0x0F) << 3 | (high & 0xF0) << 7
                pairs |= (low & 0x07) | (low & 0x78) << 4 | (low & 0x80) << 8
                np.copyto(piece.view("<u2"), pairs)
                continue
            numbers = piece.view(f"<u{self.group}")
            turned = of_top.astype(numbers.dtype)
            turned <<= self.bits - 8
            if self.bits == 16:
                turned |= of_rest
            else:
                np.copyto(turned.view(np.uint8).reshape(-1, 4)[:, :3], of_rest.reshape(-1, 3))
            np.right_shift(turned, 1, out=numbers)
            turned <<= self.bits - 1
            numbers |= turned

    def _pieces(self, page: Bytes, top: Bytes, rest: Bytes) -> Iterator[tuple[Bytes, Bytes, Bytes]]:
        """Parts that stay in the processor's cache."""
        of_top, of_rest = self.planes(_PIECE)
        for piece in range(-(-page.size // _PIECE)):
            yield page[piece * _PIECE :][:_PIECE], top[piece * of_top :][:of_top], rest[piece * of_rest :][:of_rest]


SPLITS = {8: Split(8, 2), 16: Split(16, 2), 32: Split(32, 4)}
"""Splits by bits of a number."""


KINDS = {"bfloat16": 0, "float16": 1, "float32": 2}
"""The dtypes whose numbers can be quantised."""
_LARGEST_SCALE = 0x7180


_ROUND = np.float32(1.5 * 2.0**23)
"""Added to a number, it leaves an integer in the low bits."""
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_TOO_LARGE = np.uint32(0x71800000)
"""2**100: a page with numbers this large, infinities or NaNs is not quantised."""
_TOO_SMALL = np.uint32(0x0D800000)
"""2**-100: a row of smaller numbers becomes zeros."""
_BIAS_8 = np.uint32(120 << 23)
"""Exponent bias of float32 minus that of fp8, in place."""
_NORMAL_8 = np.uint32(0x3C800000)
"""2**-6, the smallest normal number of fp8."""
_STEPS_8 = np.float32(2.0**9)
"""Steps per unit of subnormal fp8 numbers."""
_NUMBERS = 16 << 10
"""Numbers of a page that numpy processes at a time."""


ROWS = native.Struct("rows", "page kind code length row_count scales codes restore")


@dataclass(frozen=True, slots=True)
class Rows:
    """How to quantise the pages of one pool."""

    dtype: str
    """One of ``KINDS``."""
    length: int
    """Numbers per row."""
    code: str
    """``int8`` or ``fp8``."""

    @property
    def words(self) -> int:
        """Return the number of 16-bit words in a number."""
        return 2 if self.dtype == "float32" else 1

    def quantise(self, page: Words, scales: Words, codes: Bytes) -> bool:
        """Fill ``scales`` and ``codes``. Return False if the page has a number >= 2**100, an infinity or a NaN."""
        done = self._by_core(page, scales, codes, restore=False)
        return self.quantise_in_numpy(page, scales, codes) if done is None else done

    def restore(self, scales: Words, codes: Bytes, page: Words) -> bool:
        """Fill ``page``. Return False if the scales are invalid."""
        if scales.size and int(scales.max()) >= _LARGEST_SCALE:
            return False
        if self._by_core(page, scales, codes, restore=True) is None:
            self.restore_in_numpy(scales, codes, page)
        return True

    def _by_core(self, page: Words, scales: Words, codes: Bytes, *, restore: bool) -> bool | None:
        """Return the native core's result, or None if there is no core. It does not check array bounds, so this does:
        raises ValueError for a programming error."""
        if codes.size != scales.size * self.length or page.size != codes.size * self.words:
            raise ValueError(f"{page.size} words are not {scales.size} rows of {self.length} numbers")
        if (core := native.core()) is None:
            return None
        how = KINDS[self.dtype], self.code == "fp8", self.length, len(scales)
        return bool(core(ROWS, page, *how, scales, codes, restore))

    def quantise_in_numpy(self, page: Words, scales: Words, codes: Bytes) -> bool:
        largest = np.float32(448.0 if self.code == "fp8" else 127.0)
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

    def restore_in_numpy(self, scales: Words, codes: Bytes, page: Words) -> None:
        for of_page, of_scales, of_codes in self._pieces(page, scales, codes):
            scale = (of_scales.astype(np.uint32) << np.uint32(16)).view(np.float32)
            numbers = _DECODE[self.code](of_codes.reshape(-1, self.length), scale[:, None])
            _NARROW[self.dtype](numbers.reshape(-1), of_page)

    def _pieces(self, page: Words, scales: Words, codes: Bytes) -> Iterator[tuple[Words, Words, Bytes]]:
        """Parts that stay in the processor's cache."""
        rows = max(1, _NUMBERS // self.length)
        numbers = rows * self.length
        for piece in range(-(-len(scales) // rows)):
            yield (
                page[piece * numbers * self.words :][: numbers * self.words],
                scales[piece * rows :][:rows],
                codes[piece * numbers :][:numbers],
            )


def _to_bfloat16(numbers: Floats, page: Words) -> None:
    bits = numbers.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    np.copyto(page, rounded >> np.uint32(16), casting="unsafe")


def _to_float16(numbers: Floats, page: Words) -> None:
    np.copyto(page, np.clip(numbers, np.float32(-65504.0), np.float32(65504.0)).astype(np.float16).view(np.uint16))


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


_WIDEN: Mapping[str, Callable[[Words], Bits]] = {
    "bfloat16": lambda page: page.astype(np.uint32) << np.uint32(16),
    # numpy's conversion is exact; infinities and NaNs stay above every permitted number.
    "float16": lambda page: page.view(np.float16).astype(np.float32).view(np.uint32),
    "float32": lambda page: page.view(np.uint32),
}
_NARROW: Mapping[str, Callable[[Floats, Words], None]] = {
    "bfloat16": _to_bfloat16,
    "float16": _to_float16,
    "float32": lambda numbers, page: np.copyto(page.view(np.float32), numbers),
}
_ENCODE = {"int8": _int8, "fp8": _fp8}
_DECODE = {"int8": _of_int8, "fp8": _of_fp8}

"""What numbers.py takes apart where the native core was not built: the same bytes, in numpy."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint16]
Floats = npt.NDArray[np.float32]
Move = Callable[[Bytes, Bytes, Bytes], None]

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
_PIECE = 64 << 10
_NUMBERS = 16 << 10


class Planes(Protocol):
    """``numbers.Split``."""

    @property
    def bits(self) -> int: ...

    def planes(self, page: int) -> tuple[int, int]: ...


class Numbers(Protocol):
    """``numbers.Rows``."""

    @property
    def dtype(self) -> str: ...

    @property
    def length(self) -> int: ...

    @property
    def code(self) -> enum.Enum: ...

    @property
    def words(self) -> int: ...


def split(how: Planes, page: Bytes, top: Bytes, rest: Bytes) -> None:
    for pieces in _pieces(how, page, top, rest):
        _SPLIT[how.bits](*pieces)


def join(how: Planes, top: Bytes, rest: Bytes, page: Bytes) -> None:
    for piece, of_top, of_rest in _pieces(how, page, top, rest):
        _JOIN[how.bits](of_top, of_rest, piece)


def _pieces(how: Planes, page: Bytes, top: Bytes, rest: Bytes) -> Iterator[tuple[Bytes, Bytes, Bytes]]:
    of_top, of_rest = how.planes(_PIECE)
    for piece in range(-(-page.size // _PIECE)):
        yield page[piece * _PIECE :][:_PIECE], top[piece * of_top :][:of_top], rest[piece * of_rest :][:of_rest]


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


def quantise(how: Numbers, page: Words, scales: Words, codes: Bytes) -> bool:
    largest = np.float32(448.0 if how.code.value == "fp8" else 127.0)
    for of_page, of_scales, of_codes in _pieces_of_rows(how, page, scales, codes):
        bits = _WIDEN[how.dtype](of_page).reshape(-1, how.length)
        top = (bits & _MAGNITUDE).max(axis=1)
        if (top >= _TOO_LARGE).any():
            return False
        some = top >= _TOO_SMALL
        scale = (np.where(some, top, np.uint32(0x3F800000)).view(np.float32) / largest).view(np.uint32)
        scale = (scale + np.uint32(0xFFFF)) >> np.uint32(16)
        np.copyto(of_scales, np.where(some, scale, np.uint32(0)), casting="unsafe")
        inverse = np.float32(1.0) / (scale << np.uint32(16)).view(np.float32)
        made = _ENCODE[how.code.value](bits, inverse[:, None])
        made[~some] = 0
        np.copyto(of_codes, made.reshape(-1), casting="unsafe")
    return True


def restore(how: Numbers, scales: Words, codes: Bytes, page: Words) -> None:
    for of_page, of_scales, of_codes in _pieces_of_rows(how, page, scales, codes):
        scale = (of_scales.astype(np.uint32) << np.uint32(16)).view(np.float32)
        numbers = _DECODE[how.code.value](of_codes.reshape(-1, how.length), scale[:, None])
        _NARROW[how.dtype](numbers.reshape(-1), of_page)


def _pieces_of_rows(how: Numbers, page: Words, scales: Words, codes: Bytes) -> Iterator[tuple[Words, Words, Bytes]]:
    rows = max(1, _NUMBERS // how.length)
    numbers = rows * how.length
    for piece in range(-(-len(scales) // rows)):
        yield (
            page[piece * numbers * how.words :][: numbers * how.words],
            scales[piece * rows :][:rows],
            codes[piece * numbers :][:numbers],
        )


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
_ENCODE = {"int8": _int8, "fp8": _fp8}
_DECODE = {"int8": _of_int8, "fp8": _of_fp8}

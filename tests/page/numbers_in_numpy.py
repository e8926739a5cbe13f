"""What the native core makes of the numbers of a page, in numpy: the same bytes (page/transforms/numbers.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hicache_ext.page.transforms.numbers import Rows, Split

Array = np.ndarray[Any, Any]


# -- planes ------------------------------------------------------------------------------------------------------------


def split(how: Split, page: Array, top: Array, rest: Array) -> None:
    if how.bits == 8:
        pairs = page.view("<u2")
        top[:] = (pairs >> 3 & 0x0F) | (pairs >> 7 & 0xF0)
        rest[:] = (pairs & 0x07) | (pairs >> 4 & 0x78) | (pairs >> 8 & 0x80)
        return
    numbers = page.view(f"<u{how.group}")
    turned = numbers << 1 | numbers >> (how.bits - 1)
    rest[:] = turned.view(np.uint8).reshape(-1, how.group)[:, :-1].reshape(-1)
    top[:] = turned >> (how.bits - 8)


# -- rows --------------------------------------------------------------------------------------------------------------


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
_SIZES_OF_FP8 = np.array(
    [code / 512 if code < 8 else (8 + code % 8) / 8 * 2.0 ** (code // 8 - 7) for code in range(128)], np.float32
)


def quantise(how: Rows, page: Array, scales: Array, codes: Array) -> bool:
    bits = WIDEN[how.dtype](page).reshape(-1, how.length)
    top = (bits & _MAGNITUDE).max(axis=1, initial=0)
    if (top >= _TOO_LARGE).any():
        return False
    some = top >= _TOO_SMALL
    largest = np.float32(448.0 if how.code == "fp8" else 127.0)
    scale = (np.where(some, top, np.uint32(0x3F800000)).view(np.float32) / largest).view(np.uint32)
    scale = (scale + np.uint32(0xFFFF)) >> np.uint32(16)
    scales[:] = np.where(some, scale, np.uint32(0))
    inverse = np.float32(1.0) / (scale << np.uint32(16)).view(np.float32)
    made = (_fp8 if how.code == "fp8" else _int8)(bits, inverse[:, None])
    made[~some] = 0
    codes[:] = made.reshape(-1)
    return True


def restore(how: Rows, scales: Array, codes: Array, page: Array) -> None:
    scale = (scales.astype(np.uint32) << np.uint32(16)).view(np.float32)[:, None]
    rows = codes.reshape(-1, how.length)
    if how.code == "fp8":
        bits = (_SIZES_OF_FP8[rows & 0x7F] * scale).view(np.uint32)
        numbers = (bits | (rows & np.uint32(0x80)) << np.uint32(24)).view(np.float32)
    else:
        numbers = rows.view(np.int8).astype(np.float32) * scale
    NARROW[how.dtype](numbers.reshape(-1), page)


def _int8(bits: Array, inverse: Array) -> Array:
    made = bits.view(np.float32) * inverse + _ROUND
    return made.view(np.uint32) & np.uint32(0xFF)


def _fp8(bits: Array, inverse: Array) -> Array:
    size = ((bits & _MAGNITUDE).view(np.float32) * inverse).view(np.uint32)
    small = np.minimum(size.view(np.float32), np.float32(1.0)) * _STEPS_8 + _ROUND
    normal = size - _BIAS_8 + np.uint32(0x7FFFF) + (size >> np.uint32(20) & np.uint32(1))
    codes = np.where(size < _NORMAL_8, small.view(np.uint32) & np.uint32(0xFF), normal >> np.uint32(20))
    return codes | bits >> np.uint32(24) & np.uint32(0x80)


def _to_bfloat16(numbers: Array, page: Array) -> None:
    bits = numbers.view(np.uint32)
    page[:] = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)


def _to_float16(numbers: Array, page: Array) -> None:
    page[:] = np.clip(numbers, np.float32(-65504.0), np.float32(65504.0)).astype(np.float16).view(np.uint16)


def _to_float32(numbers: Array, page: Array) -> None:
    page.view(np.float32)[:] = numbers


WIDEN: Mapping[str, Callable[[Array], Array]] = {
    "bfloat16": lambda page: page.astype(np.uint32) << np.uint32(16),
    # numpy's own conversion is exact; infinities and NaNs stay above every number that is allowed.
    "float16": lambda page: page.view(np.float16).astype(np.float32).view(np.uint32),
    "float32": lambda page: page.view(np.uint32),
}
NARROW: Mapping[str, Callable[[Array, Array], None]] = {
    "bfloat16": _to_bfloat16,
    "float16": _to_float16,
    "float32": _to_float32,
}

"""Rows of numbers as codes of 8 bits and one scale each, and back. Compiled by numba (runtime/jit.py), without the GIL;
rows.py does the same with numpy where nothing is compiled, to the bit.

Pages are words of 16 bits. ``kind``: 0 bfloat16, 1 float16, 2 float32, of which a number is two words. All arithmetic
is that of float32, step by step: nothing is fused or reordered. A number is rounded to an integer by adding
1.5 * 2**23, which leaves the integer in the low bits.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hicache_ext.runtime.jit import kernel

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint16]

ROUND = np.float32(12582912.0)
MAGNITUDE = np.uint32(0x7FFFFFFF)
_SIGN_OF_CODE = np.uint32(0x80)
TOO_LARGE = np.uint32(0x71800000)
"""2**100: with larger numbers, infinities and NaNs a page is not quantised."""
TOO_SMALL = np.uint32(0x0D800000)
"""2**-100: a row of smaller numbers becomes zeros."""
_BF16 = np.uint32(16)
_MANTISSA_16 = np.uint32(13)
_MANTISSA_8 = np.uint32(20)
_BIAS_16 = np.uint32(112 << 23)
"""Exponents of float32 less those of float16."""
BIAS_8 = np.uint32(120 << 23)
_NORMAL_16 = np.uint32(0x400)
_LARGEST_16 = np.uint32(0x7BFF)
_INFINITE_16 = np.uint32(0x7C00)
_NORMAL_16_AS_32 = np.uint32(0x38800000)
NORMAL_8_AS_32 = np.uint32(0x3C800000)
_STEP_16 = np.float32(2.0**-24)
_STEPS_16 = np.float32(2.0**24)
_STEP_8 = np.float32(2.0**-9)
STEPS_8 = np.float32(2.0**9)


@kernel("int64(Array(uint16, 1, 'C', readonly=True), int64, boolean, int64, uint16[::1], uint8[::1])")
def quantise(page: Words, kind: int, fp8: bool, row: int, scales: Words, codes: Bytes) -> int:
    """Fill ``scales`` (upper halves of float32) and ``codes``; 0 where the page has a number that cannot be coded."""
    words = np.empty(row, np.uint32)
    numbers = words.view(np.float32)
    signs = np.empty(row, np.uint32)
    word = np.empty(1, np.uint32)
    number = word.view(np.float32)
    limit = np.float32(448.0) if fp8 else np.float32(127.0)
    for r in range(len(scales)):
        at = r * row
        if kind == 0:
            for i in range(row):
                words[i] = np.uint32(page[at + i]) << _BF16
        elif kind == 1:
            for i in range(row):
                half = np.uint32(page[at + i])
                signs[i] = (half & np.uint32(0x8000)) << _BF16
                words[i] = half & np.uint32(0x7FFF)
            for i in range(row):
                half = words[i]
                if half >= _INFINITE_16:
                    words[i] = TOO_LARGE
                elif half >= _NORMAL_16:
                    words[i] = (half << _MANTISSA_16) + _BIAS_16
                else:
                    numbers[i] = np.float32(half) * _STEP_16
            for i in range(row):
                words[i] |= signs[i]
        else:
            for i in range(row):
                words[i] = np.uint32(page[2 * (at + i)]) | np.uint32(page[2 * (at + i) + 1]) << _BF16
        top = np.uint32(0)
        for i in range(row):
            top = max(top, words[i] & MAGNITUDE)
        if top >= TOO_LARGE:
            return 0
        if top < TOO_SMALL:
            scales[r] = 0
            for i in range(row):
                codes[at + i] = 0
            continue
        word[0] = top
        number[0] = number[0] / limit
        # Up, so that the largest number has the largest code at most.
        word[0] = (word[0] + np.uint32(0xFFFF)) >> _BF16
        scales[r] = np.uint16(word[0])
        word[0] = word[0] << _BF16
        inverse = np.float32(1.0) / number[0]
        if fp8:
            for i in range(row):
                signs[i] = words[i] >> np.uint32(24) & _SIGN_OF_CODE
                words[i] &= MAGNITUDE
            for i in range(row):
                numbers[i] = numbers[i] * inverse
            for i in range(row):
                size = words[i]
                small = np.uint32(np.int32(numbers[i] * STEPS_8 + ROUND - ROUND))
                normal = (size - BIAS_8 + np.uint32(0x7FFFF) + (size >> _MANTISSA_8 & np.uint32(1))) >> _MANTISSA_8
                codes[at + i] = np.uint8((small if size < NORMAL_8_AS_32 else normal) | signs[i])
        else:
            for i in range(row):
                numbers[i] = numbers[i] * inverse + ROUND
            for i in range(row):
                codes[at + i] = np.uint8(words[i] & np.uint32(0xFF))
    return 1


@kernel(
    "void(Array(uint16, 1, 'C', readonly=True), Array(uint8, 1, 'C', readonly=True),"
    " int64, boolean, int64, uint16[::1])"
)
def restore(scales: Words, codes: Bytes, kind: int, fp8: bool, row: int, page: Words) -> None:
    """Fill ``page``. All scales are at least 0 and less than 2**100."""
    words = np.empty(row, np.uint32)
    numbers = words.view(np.float32)
    word = np.empty(1, np.uint32)
    number = word.view(np.float32)
    for r in range(len(scales)):
        at = r * row
        word[0] = np.uint32(scales[r]) << _BF16
        scale = number[0]
        if fp8:
            for i in range(row):
                words[i] = ((np.uint32(codes[at + i]) & np.uint32(0x7F)) << _MANTISSA_8) + BIAS_8
            for i in range(row):
                size = np.uint32(codes[at + i]) & np.uint32(0x7F)
                numbers[i] = (numbers[i] if size >= np.uint32(8) else np.float32(size) * _STEP_8) * scale
            for i in range(row):
                words[i] |= (np.uint32(codes[at + i]) & _SIGN_OF_CODE) << np.uint32(24)
        else:
            for i in range(row):
                numbers[i] = np.float32(np.int8(codes[at + i])) * scale
        if kind == 0:
            for i in range(row):
                page[at + i] = np.uint16((words[i] + np.uint32(0x7FFF) + (words[i] >> _BF16 & np.uint32(1))) >> _BF16)
        elif kind == 1:
            for i in range(row):
                page[at + i] = np.uint16(words[i] >> _BF16 & np.uint32(0x8000))
                words[i] &= MAGNITUDE
            for i in range(row):
                size = words[i]
                small = np.uint32(np.int32(min(numbers[i], np.float32(1.0)) * _STEPS_16 + ROUND - ROUND))
                normal = (size - _BIAS_16 + np.uint32(0xFFF) + (size >> _MANTISSA_16 & np.uint32(1))) >> _MANTISSA_16
                half = small if size < _NORMAL_16_AS_32 else min(normal, _LARGEST_16)
                page[at + i] |= np.uint16(half)
        else:
            for i in range(row):
                page[2 * (at + i)] = np.uint16(words[i] & np.uint32(0xFFFF))
                page[2 * (at + i) + 1] = np.uint16(words[i] >> _BF16)

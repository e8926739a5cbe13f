"""Numbers of a page, taken apart: the bits that repeat into one plane, all others into another one. Compiled by numba
(runtime/jit.py), without the GIL; planes.py does the same with numpy where nothing is compiled.

All arrays are bytes, so that pages may begin at any address; numbers are little-endian. ``top`` of 16 and 32 bits is
the exponent of a float with 8 bits of it; ``top`` of 8 bits has the bits 3 to 6 of two neighbours.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hicache_ext.runtime.jit import kernel

Bytes = npt.NDArray[np.uint8]

_SPLIT = "void(Array(uint8, 1, 'C', readonly=True), uint8[::1], uint8[::1])"
_JOIN = "void(Array(uint8, 1, 'C', readonly=True), Array(uint8, 1, 'C', readonly=True), uint8[::1])"


@kernel(_SPLIT)
def split_16(page: Bytes, top: Bytes, rest: Bytes) -> None:
    """The sign goes from the highest bit to the lowest, then each byte into its plane."""
    for number in range(len(top)):
        low, high = page[2 * number], page[2 * number + 1]
        top[number] = (high << 1 | low >> 7) & 0xFF
        rest[number] = (low << 1 | high >> 7) & 0xFF


@kernel(_JOIN)
def join_16(top: Bytes, rest: Bytes, page: Bytes) -> None:
    for number in range(len(top)):
        high, low = top[number], rest[number]
        page[2 * number] = (low >> 1 | high << 7) & 0xFF
        page[2 * number + 1] = (high >> 1 | low << 7) & 0xFF


@kernel(_SPLIT)
def split_32(page: Bytes, top: Bytes, rest: Bytes) -> None:
    """As ``split_16``; the three low bytes of a number stay together."""
    for number in range(len(top)):
        at, to = 4 * number, 3 * number
        lowest, low, high, highest = page[at], page[at + 1], page[at + 2], page[at + 3]
        top[number] = (highest << 1 | high >> 7) & 0xFF
        rest[to] = (lowest << 1 | highest >> 7) & 0xFF
        rest[to + 1] = (low << 1 | lowest >> 7) & 0xFF
        rest[to + 2] = (high << 1 | low >> 7) & 0xFF


@kernel(_JOIN)
def join_32(top: Bytes, rest: Bytes, page: Bytes) -> None:
    for number in range(len(top)):
        to, at = 4 * number, 3 * number
        lowest, low, high, highest = rest[at], rest[at + 1], rest[at + 2], top[number]
        page[to] = (lowest >> 1 | low << 7) & 0xFF
        page[to + 1] = (low >> 1 | high << 7) & 0xFF
        page[to + 2] = (high >> 1 | highest << 7) & 0xFF
        page[to + 3] = (highest >> 1 | lowest << 7) & 0xFF


@kernel(_SPLIT)
def split_8(page: Bytes, top: Bytes, rest: Bytes) -> None:
    """Half a byte of each of two neighbours makes a byte of each plane."""
    for pair in range(len(top)):
        one, other = page[2 * pair], page[2 * pair + 1]
        top[pair] = (one >> 3 & 0x0F) | (other << 1 & 0xF0)
        rest[pair] = (one & 0x07) | (one >> 4 & 0x08) | (other << 4 & 0x70) | (other & 0x80)


@kernel(_JOIN)
def join_8(top: Bytes, rest: Bytes, page: Bytes) -> None:
    for pair in range(len(top)):
        high, low = top[pair], rest[pair]
        page[2 * pair] = (high << 3 & 0x78) | (low & 0x07) | (low << 4 & 0x80)
        page[2 * pair + 1] = (high >> 1 & 0x78) | (low >> 4 & 0x07) | (low & 0x80)

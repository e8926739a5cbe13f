"""The work on a batch before it reaches a tier: keys, page numbers, addresses. Compiled by numba (runtime/jit.py).

Without numba these functions are not called: numpy and ``bytes`` are faster then.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from hicache_ext.runtime.jit import helper, kernel

Words = npt.NDArray[np.int64]

_EACH: Final = 0x0101010101010101
"""Multiplied by a byte: that byte eight times."""
_HASH_WORDS, _TEXT_WORDS = 4, 9
_IDENTITY_WORDS = 2

SEPARATOR: Final = 8 * " "
"""Between page hashes in the text of ``decode_hashes``: each hash begins at a word."""


@helper
def _decode(digits: int) -> tuple[int, int]:
    """Eight characters below 128, given as a word. Returns the four bytes that they spell in hexadecimal, and a word
    that is 0 only if each character is a lower-case hexadecimal digit."""
    letters = digits >> 6 & _EACH
    values = (digits & 0x0F * _EACH) + 9 * letters
    # Letters must be 10 to 15 and the others at most 9.
    wrong = (values & 0x10 * _EACH) | (((values + 6 * _EACH) >> 4 & _EACH) ^ letters)
    wrong |= (values + 0x30 * _EACH + 0x27 * letters) ^ digits
    pairs = (values << 4 | values >> 8) & 0x00FF00FF00FF00FF
    pairs = (pairs | pairs >> 8) & 0x0000FFFF0000FFFF
    return (pairs | pairs >> 16) & 0xFFFFFFFF, wrong


@kernel("int64(int64[::1], int64[::1], int64[:, ::1])")
def decode_hashes(text: Words, identity: Words, keys: Words) -> int:
    """Writes ``identity`` and a page hash of ``text`` into each row of ``keys``; returns 0 when ``text`` is malformed.

    ``text``: one page hash per row, 64 lower-case hexadecimal digits each, SEPARATOR between them; characters below
    128.
    """
    if len(text) + 1 != len(keys) * _TEXT_WORDS:
        return 0
    wrong = 0
    for page in range(len(keys)):
        at = page * _TEXT_WORDS
        for word in range(_IDENTITY_WORDS):
            keys[page, word] = identity[word]
        for word in range(_HASH_WORDS):
            low, wrong_low = _decode(text[at + 2 * word])
            high, wrong_high = _decode(text[at + 2 * word + 1])
            keys[page, _IDENTITY_WORDS + word] = low | high << 32
            wrong |= wrong_low | wrong_high
        if page + 1 < len(keys):
            wrong |= text[at + 2 * _HASH_WORDS] ^ 0x20 * _EACH
    return 1 if wrong == 0 else 0


@kernel("void(int64[::1], int64[::1], int64[::1], int64[:, ::1])")
def address_pages(numbers: Words, starts: Words, strides: Words, addresses: Words) -> None:
    """Sets ``addresses[n, m]`` to where run ``m`` of page ``numbers[n]`` begins; page 0 has it at ``starts[m]``."""
    for page in range(len(numbers)):
        for run in range(len(starts)):
            addresses[page, run] = starts[run] + numbers[page] * strides[run]


@kernel("int64(int64[::1], int64, int64, int64[::1])")
def number_pages(indices: Words, page_size: int, page_count: int, numbers: Words) -> int:
    """Sets ``numbers[n]`` to the page in which the ``n``th group of ``page_size`` token indices begins, in a pool of
    ``page_count`` pages. Returns how many groups are exactly the tokens of their page, in order."""
    sound = 0
    for page in range(len(numbers)):
        number = indices[page * page_size] // page_size
        numbers[page] = number
        differing = 0
        for token in range(page_size):
            differing |= indices[page * page_size + token] ^ (number * page_size + token)
        if differing == 0 and 0 <= number < page_count:
            sound += 1
    return sound

"""What a batch of SGLang's costs before it reaches a tier: compiled by numba where it is there (jit.py).

Not called without it: what numpy and ``bytes`` do is faster than these functions are then.
"""

from __future__ import annotations

from typing import Any, Final

from hicache_ext.runtime.jit import helper, kernel

_EACH: Final = 0x0101010101010101
"""Times a byte: that byte eight times."""
_HASH_WORDS, _TEXT_WORDS = 4, 9
_IDENTITY_WORDS = 2

SEPARATOR: Final = 8 * " "
"""Between page hashes in what ``decode_hashes`` takes: makes each begin at a word."""


@helper
def _decode(digits: Any) -> Any:
    """Eight characters below 128, as a word: the four bytes that these hexadecimal digits are, and a word that is not 0
    unless each is one, and no capital."""
    letters = digits >> 6 & _EACH
    values = (digits & 0x0F * _EACH) + 9 * letters
    # Letters from 10 to 15, others up to 9; and what is made of that again must be what there was.
    wrong = (values & 0x10 * _EACH) | (((values + 6 * _EACH) >> 4 & _EACH) ^ letters)
    wrong |= (values + 0x30 * _EACH + 0x27 * letters) ^ digits
    pairs = (values << 4 | values >> 8) & 0x00FF00FF00FF00FF
    pairs = (pairs | pairs >> 8) & 0x0000FFFF0000FFFF
    return (pairs | pairs >> 16) & 0xFFFFFFFF, wrong


@kernel("int64(int64[::1], int64[::1], int64[:, ::1])")
def decode_hashes(text: Any, identity: Any, keys: Any) -> Any:
    """``text``: as many page hashes as ``keys`` has rows, as SGLang writes them, 64 lower-case digits, with SEPARATOR
    between them; characters below 128. With ``identity`` they are the keys. 0 when the text is something else."""
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
def address_pages(numbers: Any, starts: Any, strides: Any, addresses: Any) -> None:
    """``addresses[n, m]``: where run ``m`` of page ``numbers[n]`` is, page 0 having it at ``starts[m]``."""
    for page in range(len(numbers)):
        for run in range(len(starts)):
            addresses[page, run] = starts[run] + numbers[page] * strides[run]


@kernel("int64(int64[::1], int64, int64, int64[::1])")
def number_pages(indices: Any, page_size: Any, page_count: Any, numbers: Any) -> Any:
    """``numbers[n]``: the page of a pool of ``page_count`` pages that the ``n``th ``page_size`` token indices begin in;
    of how many they are that page's tokens, in order."""
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

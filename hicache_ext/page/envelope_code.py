"""The envelope of a page (envelope.py) in compiled code: checksums and headers of pages that lie at addresses.

Only for functions that numba compiles (runtime/jit.py); importing this module imports numba. A header is 16 words,
little-endian, as docs/page-format.md has them.
"""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt

from hicache_ext.runtime.native_calls import DIGEST, HASH, RESET, UPDATE, call, call_for_two, swapped

Words = npt.NDArray[np.int64]
Unsigned = npt.NDArray[np.uint64]
Checksum = tuple[np.uint64, np.uint64]
"""Two words, low and high."""

HEADER_WORDS = 16
KEY_WORDS = 6
_KEY_WORD, _LENGTH_WORD, _CHECKSUM_WORD, _CREATED_WORD, HEADER_CHECKSUM_WORD = 2, 8, 9, 11, 14
SEALED_WORDS = _CREATED_WORD
"""Leading words that depend on the page alone."""
SEALED_BYTES = 8 * SEALED_WORDS
CHECKED_BYTES = 8 * HEADER_CHECKSUM_WORD


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def checksum_of(functions: Words, state: int, payload: int, addresses: Words, segments: Words, page: int) -> Checksum:
    """The checksum of a page's payload."""
    if len(segments) == 1:
        whole: Checksum = call_for_two(functions[HASH], addresses[page, 0], payload)
        return whole
    call(functions[RESET], state, 0, 0, 0, 0)
    for segment in range(len(segments)):
        call(functions[UPDATE], state, addresses[page, segment], segments[segment], 0, 0)
    digest: Checksum = call_for_two(functions[DIGEST], state, 0)
    return digest


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def write_sealed(
    headers: Unsigned,
    at: int,
    start: int,
    second: int,
    keys: Unsigned,
    page: int,
    payload: int,
    low: np.uint64,
    high: np.uint64,
) -> None:
    """Write the leading words of the header of a page with this checksum at word ``at`` of ``headers``. ``start`` and
    ``second``: the first 16 bytes of every header."""
    headers[at], headers[at + 1] = np.uint64(start), np.uint64(second)
    for word in range(KEY_WORDS):
        headers[at + _KEY_WORD + word] = keys[page, word]
    headers[at + _LENGTH_WORD] = np.uint64(payload)
    headers[at + _CHECKSUM_WORD], headers[at + _CHECKSUM_WORD + 1] = swapped(high), swapped(low)


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def hash_of_header(functions: Words, headers: Unsigned, at: int, length: int) -> Checksum:
    """The checksum of the first ``length`` bytes of the header at word ``at``, as headers hold it: two words."""
    low, high = call_for_two(functions[HASH], headers.ctypes.data + 8 * at, length)
    return swapped(high), swapped(low)


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def finish_header(functions: Words, headers: Unsigned, at: int, created: int) -> None:
    """Write the rest of a header, behind ``write_sealed``."""
    headers[at + _CREATED_WORD] = np.uint64(created)
    for word in range(_CREATED_WORD + 1, HEADER_CHECKSUM_WORD):
        headers[at + word] = np.uint64(0)
    one, other = hash_of_header(functions, headers, at, CHECKED_BYTES)
    headers[at + HEADER_CHECKSUM_WORD], headers[at + HEADER_CHECKSUM_WORD + 1] = one, other

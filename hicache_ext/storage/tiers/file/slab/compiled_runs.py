"""Moves pages between slots and host memory, checksums and headers included, in compiled code without the GIL.

Threads share the pages of a call, which are sorted by place. Neighbours move in one preadv2 or pwritev2, at most as
many bytes at once as stay in the processor's cache until they are checked. A page is good only if the seal of its key,
its length and the checksum of what was read is the one in the index (``envelope.page_seal``). Other pages are left to
page_moves.py and envelope.py, which find out what is wrong.

Importing this module imports numba, and compiles nothing: runtime/jit.py does.
"""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt

from hicache_ext.page.envelope_code import (
    CHECKED_BYTES,
    HEADER_CHECKSUM_WORD,
    HEADER_WORDS,
    SEALED_BYTES,
    Checksum,
    checksum_of,
    finish_header,
    hash_of_header,
    write_sealed,
)
from hicache_ext.runtime.jit import compiled
from hicache_ext.runtime.native_calls import (
    DIGEST,
    ERRNO,
    PREADV2,
    PWRITEV2,
    RESET,
    STATX,
    UPDATE,
    call,
    call_for_two,
    fetch_add,
    int_at,
)
from hicache_ext.runtime.vectored import IOV_MAX
from hicache_ext.storage.tiers.file.slab.slot_code import SEAL, Words

Unsigned = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]
DONE, LOOK_AGAIN = 0, 1
"""Results of a page. A negative one is -errno."""

_LEAST_PORTION = 4096
"""Fewest bytes of a large page read at once: a block, for O_DIRECT."""

PAYLOAD, SLOT, START, SECOND, CREATED, FLAGS, AT_ONCE, FILLER = range(8)
"""Positions in ``facts``: bytes of a payload; bytes of a slot; the first 16 bytes of each header (two words); when
written, in ms; flags of the system call; bytes that a thread takes at a time and moves by one system call, unless a
page has more; the address of a block that fills gaps."""

NUMBER, DESCRIPTOR, HEADERS, FIRST_ROW = range(4)
"""Columns of ``opened``, a row per slab: its number, the descriptors of its slots and headers, the row of
slot 0 in the index."""


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def _error(functions: Words) -> int:
    """The result of pages whose system call has just failed; never DONE."""
    code = int_at(call(functions[ERRNO], 0, 0, 0, 0, 0))
    return -code if code > 0 else LOOK_AGAIN


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def _end_of_run(slabs: Words, slots: Words, segments: Words, vectors: Words, begin: int, end: int) -> int:
    """One behind the last page that moves together with page ``begin``, among those taken (``_taken``)."""
    most = min(IOV_MAX, len(vectors) // 2) // (len(segments) + 1)
    position = begin + 1
    while (
        position < end
        and position - begin < most
        and slabs[position] == slabs[begin]
        and slots[position] == slots[position - 1] + 1
    ):
        position += 1
    return position


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def _opened(opened: Words, slab: int) -> int:
    """The row of a slab that is open; -1 when it is not."""
    found = -1
    for one in range(len(opened)):
        if opened[one, NUMBER] == slab:
            found = one
    return found


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def _gather(
    facts: Words, positions: Words, addresses: Words, segments: Words, vectors: Words, begin: int, end: int
) -> tuple[int, int]:
    """Fill ``vectors`` with the memory of a run; returns their number and their bytes."""
    gap = facts[SLOT] - facts[PAYLOAD]
    count, total = 0, 0
    for page in range(begin, end):
        for segment in range(len(segments)):
            vectors[2 * count], vectors[2 * count + 1] = addresses[positions[page], segment], segments[segment]
            count += 1
        total += facts[PAYLOAD]
        if gap > 0 and page + 1 < end:
            vectors[2 * count], vectors[2 * count + 1] = facts[FILLER], gap
            count += 1
            total += gap
    return count, total


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def _read_large_page(
    functions: Words,
    state: int,
    facts: Words,
    descriptor: int,
    offset: int,
    addresses: Words,
    segments: Words,
    vectors: Words,
    page: int,
) -> tuple[int, np.uint64, np.uint64]:
    """Read a page in portions and hash each while it is in the processor's cache. Returns the bytes read, or the error
    of the system call, and the two words of the checksum."""
    # Portions of about equal size: a small rest would cost a system call of its own.
    portion = -(-facts[PAYLOAD] // max(1, facts[PAYLOAD] // facts[AT_ONCE]))
    portion += -portion % _LEAST_PORTION
    count, total, done = 0, 0, 0
    left = facts[PAYLOAD]
    call(functions[RESET], state, 0, 0, 0, 0)
    for segment in range(len(segments)):
        begin = 0
        while begin < segments[segment]:
            length = min(segments[segment] - begin, max(portion - total, _LEAST_PORTION))
            vectors[2 * count], vectors[2 * count + 1] = addresses[page, segment] + begin, length
            count += 1
            total += length
            begin += length
            left -= length
            if left == 0 or total >= portion or 2 * count == len(vectors):
                moved = call(functions[PREADV2], descriptor, vectors.ctypes.data, count, offset + done, facts[FLAGS])
                if moved != total:
                    return moved if moved < 0 else done + moved, np.uint64(0), np.uint64(0)
                for vector in range(count):
                    call(functions[UPDATE], state, vectors[2 * vector], vectors[2 * vector + 1], 0, 0)
                done += moved
                count, total = 0, 0
    low, high = call_for_two(functions[DIGEST], state, 0)
    return done, low, high


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def _seal(
    functions: Words,
    facts: Words,
    keys: Unsigned,
    headers: Unsigned,
    at: int,
    page: int,
    low: np.uint64,
    high: np.uint64,
) -> Checksum:
    """The two words of the seal of a page with this checksum. Its input is written at word ``at`` of ``headers``."""
    write_sealed(headers, at, facts[START], facts[SECOND], keys, page, facts[PAYLOAD], low, high)
    seal: Checksum = hash_of_header(functions, headers, at, SEALED_BYTES)
    return seal


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def _taken(facts: Words, results: Words, taken: Words) -> tuple[int, int]:
    """Take the next pages for this thread: the first one, and one behind the last."""
    step = max(1, facts[AT_ONCE] // facts[SLOT])
    begin = fetch_add(taken.ctypes.data, step)
    return begin, min(begin + step, len(results))


def _read_pages(
    functions: Words,
    facts: Words,
    slabs: Words,
    slots: Words,
    positions: Words,
    opened: Words,
    addresses: Words,
    segments: Words,
    keys: Unsigned,
    rows: Unsigned,
    headers: Unsigned,
    vectors: Words,
    state: int,
    results: Words,
    taken: Words,
) -> None:
    done = 0
    end = begin = 0
    while True:
        if begin == end:
            begin, end = _taken(facts, results, taken)
        if begin >= len(results):
            break
        behind = _end_of_run(slabs, slots, segments, vectors, begin, end)
        slab, offset = _opened(opened, slabs[begin]), slots[begin] * facts[SLOT]
        descriptor, first = (opened[slab, DESCRIPTOR], opened[slab, FIRST_ROW]) if slab >= 0 else (-1, -1)
        whole = behind - begin > 1 or facts[SLOT] <= facts[AT_ONCE]
        low, high = np.uint64(0), np.uint64(0)
        if whole:
            count, total = _gather(facts, positions, addresses, segments, vectors, begin, behind)
            moved = call(functions[PREADV2], descriptor, vectors.ctypes.data, count, offset, facts[FLAGS])
        else:
            total = facts[PAYLOAD]
            moved, low, high = _read_large_page(
                functions, state, facts, descriptor, offset, addresses, segments, vectors, positions[begin]
            )
        failed = _error(functions) if moved < 0 else LOOK_AGAIN
        for page in range(begin, behind):
            results[page] = failed
            row = first + slots[page]
            if moved == total and 0 <= row < len(rows):
                if whole:
                    low, high = checksum_of(functions, state, facts[PAYLOAD], addresses, segments, positions[page])
                one, other = _seal(functions, facts, keys, headers, 0, positions[page], low, high)
                if rows[row, SEAL] == one and rows[row, SEAL + 1] == other:
                    results[page] = DONE
                    done += 1
        begin = behind
    fetch_add(taken.ctypes.data + 8, done)


def _write_pages(
    functions: Words,
    facts: Words,
    slabs: Words,
    slots: Words,
    positions: Words,
    opened: Words,
    addresses: Words,
    segments: Words,
    keys: Unsigned,
    rows: Unsigned,
    headers: Unsigned,
    vectors: Words,
    state: int,
    results: Words,
    taken: Words,
) -> None:
    done = 0
    end = begin = 0
    while True:
        if begin == end:
            begin, end = _taken(facts, results, taken)
        if begin >= len(results):
            break
        behind = _end_of_run(slabs, slots, segments, vectors, begin, min(end, begin + len(headers) // HEADER_WORDS))
        slab, offset, length = _opened(opened, slabs[begin]), slots[begin] * facts[SLOT], behind - begin
        first = opened[slab, FIRST_ROW] + slots[begin] if slab >= 0 else -1
        result = LOOK_AGAIN
        if 0 <= first <= len(rows) - length:
            for page in range(length):
                position, at = positions[begin + page], page * HEADER_WORDS
                low, high = checksum_of(functions, state, facts[PAYLOAD], addresses, segments, position)
                # The slot is this writer's: nobody reads its seal yet.
                rows[first + page, SEAL], rows[first + page, SEAL + 1] = _seal(
                    functions, facts, keys, headers, at, position, low, high
                )
                finish_header(functions, headers, at, facts[CREATED])
            count, total = _gather(facts, positions, addresses, segments, vectors, begin, behind)
            descriptor = opened[slab, DESCRIPTOR]
            moved = call(functions[PWRITEV2], descriptor, vectors.ctypes.data, count, offset, facts[FLAGS])
            if moved == total:
                total = 8 * HEADER_WORDS * length
                vectors[0], vectors[1] = headers.ctypes.data, total
                descriptor, offset = opened[slab, HEADERS], slots[begin] * 8 * HEADER_WORDS
                moved = call(functions[PWRITEV2], descriptor, vectors.ctypes.data, 1, offset, 0)
                result = DONE if moved == total else LOOK_AGAIN
            if moved < 0:
                result = _error(functions)
        for page in range(begin, behind):
            results[page] = result
        if result == DONE:
            done += length
        begin = behind
    fetch_add(taken.ctypes.data + 8, done)


_SIGNATURE = (
    "void(int64[::1], int64[::1], int64[::1], int64[::1], int64[::1], int64[:, ::1], int64[:, ::1], int64[::1], "
    "uint64[:, ::1], uint64[:, ::1], uint64[::1], int64[::1], int64, int64[::1], int64[::1])"
)

read_pages = compiled(_SIGNATURE, _read_pages)
"""``(functions, facts, slabs, slots, positions, opened, addresses, segments, keys, rows, headers, vectors, state,
results, taken)``

Read all pages, together with the other threads that do the same: each takes some at a time; ``taken[0]`` says
how many are taken and ``taken[1]``, once all threads have ended, how many are DONE. Page ``n`` is in slot ``slots[n]``
of ``slabs[n]``, which ``opened`` says more of; it goes to ``addresses[m]``, ``m`` being ``positions[n]``, a segment
each of ``segments`` bytes, and must have the key ``keys[m]`` and, with it, the seal in ``rows`` of the
index;
``results[n]`` says whether it was it. ``functions`` and ``state`` are those of native_calls.py. The others are the
caller's own: ``headers`` is memory for the headers of a run, ``vectors`` for its iovecs. Never raises."""

write_pages = compiled(_SIGNATURE, _write_pages)
"""The same, to the slots, with headers and seals. What ``results`` does not call DONE may be written in part."""


def _check_headers(functions: Words, headers: Unsigned, start: int, second: int, seals: Unsigned, valid: Words) -> None:
    for page in range(len(headers)):
        valid[page] = 0
        if headers[page, 0] != np.uint64(start) or headers[page, 1] != np.uint64(second):
            continue
        words, at = headers[page], HEADER_CHECKSUM_WORD
        one, other = hash_of_header(functions, words, 0, CHECKED_BYTES)
        if words[at] != one or words[at + 1] != other:
            continue
        seals[page, 0], seals[page, 1] = hash_of_header(functions, words, 0, SEALED_BYTES)
        valid[page] = 1


check_headers = compiled("void(int64[::1], uint64[:, ::1], int64, int64, uint64[:, ::1], int64[::1])", _check_headers)
"""``(functions, headers, start, second, seals, valid)``: which headers, a row each, begin with these two words and
agree with their checksum; the seals of those. Never raises."""

_NO_FOLLOW = 0x100
_TYPE_SIZE_MTIME = 0x1 | 0x2 | 0x40 | 0x200
_MODE_WORD, _SIZE_WORD, _MTIME_WORD = 3, 5, 14
"""Of struct statx, in words."""


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def _hex(digit: int) -> int:
    return digit + (48 if digit < 10 else 87)


def _find_page_files(
    functions: Words, keys: Bytes, directory: int, least: int, oldest: int, path: Bytes, status: Words, present: Bytes
) -> None:
    for page in range(len(keys)):
        # A directory that is named by the first byte of the page hash, a slash, the page hash.
        path[0], path[1] = _hex(keys[page, 16] >> 4), _hex(keys[page, 16] & 15)
        for position in range(32):
            digits = keys[page, 16 + position]
            path[3 + 2 * position], path[4 + 2 * position] = _hex(digits >> 4), _hex(digits & 15)
        answer = call(functions[STATX], directory, path.ctypes.data, _NO_FOLLOW, _TYPE_SIZE_MTIME, status.ctypes.data)
        is_file = (answer & 0xFFFFFFFF) == 0 and (status[_MODE_WORD] >> 32) & 0xF000 == 0x8000
        present[page] = is_file and status[_SIZE_WORD] >= least and status[_MTIME_WORD] >= oldest


find_page_files = compiled(
    "void(int64[::1], uint8[:, ::1], int64, int64, int64, uint8[::1], int64[::1], uint8[::1])", _find_page_files
)
"""``(functions, keys, directory, least, oldest, path, status, present)``: of which ``keys``, a row of 48 bytes each and
all of one identity, whose ``directory`` (a descriptor) is given, there is a page file of at least ``least`` bytes, used
at ``oldest`` (seconds) or later. ``path`` is the caller's own ``PAGE_PATH``, ``status`` is memory for a struct statx.
Never raises."""
PAGE_PATH = b"00/" + bytes(64) + b".page\0"

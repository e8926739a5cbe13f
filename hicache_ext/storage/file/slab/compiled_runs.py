"""Pages moved between slots and host memory, header and checksum included, in compiled code without the GIL.

Threads share the pages of a call, which are sorted by place: neighbours go in one preadv2 or pwritev2, no more at once
than stays in the processor's cache until it is checked, and a page is reported good only if every field of its header
and both checksums are what they must be (``envelope.is_page``, in the same order of bytes). Whatever is not good is
left to slot_io.py and envelope.py, which find out what it is.

Importing this module imports numba and compiles, or takes from its cache, what is below: a second the first time.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from hicache_ext.storage.file.slab.foreign import (
    DIGEST,
    ERRNO,
    HASH,
    PREADV2,
    PWRITEV2,
    RESET,
    UPDATE,
    call,
    call_for_two,
    fetch_add,
    int_at,
    swapped,
)
from hicache_ext.storage.file.vectored import IOV_MAX
from hicache_ext.storage.jit import compiled

DONE, LOOK_AGAIN = 0, 1
"""Results of a page. A negative one is -errno."""

_KEY_WORD, _KEY_WORDS, _LENGTH_WORD, _CHECKSUM_WORD, _CREATED_WORD, _HEADER_CHECKSUM_WORD = 2, 6, 8, 9, 11, 14
_CHECKED_BYTES = 8 * _HEADER_CHECKSUM_WORD
_LEAST_PORTION = 4096
"""Bytes of a large page read at once, at least: a block, which O_DIRECT takes."""

HEADER, PAYLOAD, SLOT, START, SECOND, CREATED, FLAGS, STRIDE, AT_ONCE, FILLER = range(10)
"""Positions in ``facts``, which are: bytes of a header, of a payload and of a slot; the first 16 bytes of each header;
when written, in ms; flags of the system call; bytes from one header in ``headers`` to the next; bytes that a thread
takes at a time and moves by one system call, unless a page has more; the address of a block that fills gaps."""


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def _error(functions: Any) -> Any:
    """The result of pages whose system call has just failed. Never that of a page that is done."""
    code = int_at(call(functions[ERRNO], 0, 0, 0, 0, 0))
    return -code if code > 0 else LOOK_AGAIN


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def _end_of_run(
    facts: Any, slabs: Any, slots: Any, segments: Any, headers: Any, vectors: Any, begin: Any, end: Any
) -> Any:
    """One behind the last page, of those taken together (``_taken``), that moves together with page ``begin``."""
    most = min(len(headers) * 8 // facts[STRIDE], min(IOV_MAX, len(vectors) // 2) // (len(segments) + 3))
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
def _descriptor_of(opened: Any, slab: Any) -> Any:
    """-1 where there is none."""
    found = -1
    for one in range(len(opened)):
        if opened[one, 0] == slab:
            found = opened[one, 1]
    return found


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def _gather(
    facts: Any, positions: Any, addresses: Any, segments: Any, headers: Any, vectors: Any, begin: Any, end: Any
) -> Any:
    """Fill ``vectors`` with the memory of a run: their number, and how many bytes they are."""
    header, stride = facts[HEADER], facts[STRIDE]
    gap = facts[SLOT] - header - facts[PAYLOAD]
    at, count, total = headers.ctypes.data, 0, 0
    for page in range(begin, end):
        vectors[2 * count], vectors[2 * count + 1] = at + (page - begin) * stride, stride
        count += 1
        if header > stride:
            vectors[2 * count], vectors[2 * count + 1] = facts[FILLER], header - stride
            count += 1
        for segment in range(len(segments)):
            vectors[2 * count], vectors[2 * count + 1] = addresses[positions[page], segment], segments[segment]
            count += 1
        total += header + facts[PAYLOAD]
        if gap > 0 and page + 1 < end:
            vectors[2 * count], vectors[2 * count + 1] = facts[FILLER], gap
            count += 1
            total += gap
    return count, total


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def _checksum(functions: Any, state: Any, facts: Any, addresses: Any, segments: Any, page: Any) -> Any:
    """Of a page's payload: its two words, low and high."""
    if len(segments) == 1:
        return call_for_two(functions[HASH], addresses[page, 0], facts[PAYLOAD])
    call(functions[RESET], state, 0, 0, 0, 0)
    for segment in range(len(segments)):
        call(functions[UPDATE], state, addresses[page, segment], segments[segment], 0, 0)
    return call_for_two(functions[DIGEST], state, 0)


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def _read_large_page(
    functions: Any,
    state: Any,
    facts: Any,
    descriptor: Any,
    offset: Any,
    addresses: Any,
    segments: Any,
    headers: Any,
    vectors: Any,
    page: Any,
) -> Any:
    """Read a page in portions, each hashed while it is in the processor's cache: the bytes read, or what the system
    call says, and the two words of the checksum."""
    stride = facts[STRIDE]
    size = facts[HEADER] + facts[PAYLOAD]
    # Of about the same size: what is left over would cost a system call of its own.
    portion = -(-size // max(1, size // facts[AT_ONCE]))
    portion += -portion % _LEAST_PORTION
    count, total, done = 1, facts[HEADER], 0
    vectors[0], vectors[1] = headers.ctypes.data, stride
    if facts[HEADER] > stride:
        vectors[2], vectors[3] = facts[FILLER], facts[HEADER] - stride
        count = 2
    of_payload = count
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
                for vector in range(of_payload, count):
                    call(functions[UPDATE], state, vectors[2 * vector], vectors[2 * vector + 1], 0, 0)
                done += moved
                count, total, of_payload = 0, 0, 0
    low, high = call_for_two(functions[DIGEST], state, 0)
    return done, low, high


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def _is_page(functions: Any, facts: Any, keys: Any, headers: Any, at: Any, page: Any, low: Any, high: Any) -> Any:
    """Whether the page just read, with its header at word ``at`` of ``headers`` and this checksum, is the page asked
    for."""
    if headers[at] != np.uint64(facts[START]) or headers[at + 1] != np.uint64(facts[SECOND]):
        return False
    for word in range(_KEY_WORDS):
        if headers[at + _KEY_WORD + word] != keys[page, word]:
            return False
    if headers[at + _LENGTH_WORD] != np.uint64(facts[PAYLOAD]):
        return False
    if headers[at + _CHECKSUM_WORD] != swapped(high) or headers[at + _CHECKSUM_WORD + 1] != swapped(low):
        return False
    low, high = call_for_two(functions[HASH], headers.ctypes.data + 8 * at, _CHECKED_BYTES)
    return headers[at + _HEADER_CHECKSUM_WORD] == swapped(high) and headers[at + _HEADER_CHECKSUM_WORD + 1] == swapped(
        low
    )


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def _fill_header(
    functions: Any, state: Any, facts: Any, addresses: Any, segments: Any, keys: Any, headers: Any, at: Any, page: Any
) -> None:
    """The header of a page, at word ``at`` of ``headers``."""
    headers[at], headers[at + 1] = np.uint64(facts[START]), np.uint64(facts[SECOND])
    for word in range(_KEY_WORDS):
        headers[at + _KEY_WORD + word] = keys[page, word]
    headers[at + _LENGTH_WORD] = np.uint64(facts[PAYLOAD])
    low, high = _checksum(functions, state, facts, addresses, segments, page)
    headers[at + _CHECKSUM_WORD], headers[at + _CHECKSUM_WORD + 1] = swapped(high), swapped(low)
    headers[at + _CREATED_WORD] = np.uint64(facts[CREATED])
    for word in range(_CREATED_WORD + 1, facts[STRIDE] // 8):
        headers[at + word] = np.uint64(0)
    low, high = call_for_two(functions[HASH], headers.ctypes.data + 8 * at, _CHECKED_BYTES)
    headers[at + _HEADER_CHECKSUM_WORD], headers[at + _HEADER_CHECKSUM_WORD + 1] = swapped(high), swapped(low)


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def _taken(facts: Any, results: Any, taken: Any) -> Any:
    """The pages that this thread moves next: the first one, and one behind the last."""
    step = max(1, facts[AT_ONCE] // facts[SLOT])
    begin = fetch_add(taken.ctypes.data, step)
    return begin, min(begin + step, len(results))


def _read_pages(
    functions: Any,
    facts: Any,
    slabs: Any,
    slots: Any,
    positions: Any,
    opened: Any,
    addresses: Any,
    segments: Any,
    keys: Any,
    headers: Any,
    vectors: Any,
    state: Any,
    results: Any,
    taken: Any,
) -> None:
    done = 0
    end = begin = 0
    while True:
        if begin == end:
            begin, end = _taken(facts, results, taken)
        if begin >= len(results):
            break
        behind = _end_of_run(facts, slabs, slots, segments, headers, vectors, begin, end)
        descriptor, offset = _descriptor_of(opened, slabs[begin]), slots[begin] * facts[SLOT]
        whole = behind - begin > 1 or facts[SLOT] <= facts[AT_ONCE]
        low, high = np.uint64(0), np.uint64(0)
        if whole:
            count, total = _gather(facts, positions, addresses, segments, headers, vectors, begin, behind)
            moved = call(functions[PREADV2], descriptor, vectors.ctypes.data, count, offset, facts[FLAGS])
        else:
            total = facts[HEADER] + facts[PAYLOAD]
            moved, low, high = _read_large_page(
                functions,
                state,
                facts,
                descriptor,
                offset,
                addresses,
                segments,
                headers,
                vectors,
                positions[begin],
            )
        failed = _error(functions) if moved < 0 else LOOK_AGAIN
        for page in range(begin, behind):
            results[page] = failed
            if moved == total:
                if whole:
                    low, high = _checksum(functions, state, facts, addresses, segments, positions[page])
                at = (page - begin) * (facts[STRIDE] // 8)
                if _is_page(functions, facts, keys, headers, at, positions[page], low, high):
                    results[page] = DONE
                    done += 1
        begin = behind
    fetch_add(taken.ctypes.data + 8, done)


def _write_pages(
    functions: Any,
    facts: Any,
    slabs: Any,
    slots: Any,
    positions: Any,
    opened: Any,
    addresses: Any,
    segments: Any,
    keys: Any,
    headers: Any,
    vectors: Any,
    state: Any,
    results: Any,
    taken: Any,
) -> None:
    done = 0
    end = begin = 0
    while True:
        if begin == end:
            begin, end = _taken(facts, results, taken)
        if begin >= len(results):
            break
        behind = _end_of_run(facts, slabs, slots, segments, headers, vectors, begin, end)
        descriptor, offset = _descriptor_of(opened, slabs[begin]), slots[begin] * facts[SLOT]
        for page in range(begin, behind):
            at = (page - begin) * (facts[STRIDE] // 8)
            _fill_header(functions, state, facts, addresses, segments, keys, headers, at, positions[page])
        count, total = _gather(facts, positions, addresses, segments, headers, vectors, begin, behind)
        moved = call(functions[PWRITEV2], descriptor, vectors.ctypes.data, count, offset, facts[FLAGS])
        result = DONE if moved == total else LOOK_AGAIN
        if moved < 0:
            result = _error(functions)
        for page in range(begin, behind):
            results[page] = result
        if result == DONE:
            done += behind - begin
        begin = behind
    fetch_add(taken.ctypes.data + 8, done)


_SIGNATURE = (
    "void(int64[::1], int64[::1], int64[::1], int64[::1], int64[::1], int64[:, ::1], int64[:, ::1], int64[::1], "
    "uint64[:, ::1], uint64[::1], int64[::1], int64, int64[::1], int64[::1])"
)

read_pages = compiled(_SIGNATURE, _read_pages)
"""``(functions, facts, slabs, slots, positions, opened, addresses, segments, keys, headers, vectors, state, results,
taken)``

Read all pages, together with the other threads that do the same: each takes some at a time; ``taken[0]`` says
how many are taken and ``taken[1]``, once all threads have ended, how many are DONE. Page ``n`` is in slot ``slots[n]``
of ``slabs[n]``, of which ``opened`` has the number and the descriptor; it goes to ``addresses[m]``, ``m`` being
``positions[n]``, a segment each of ``segments`` bytes, and must have the key ``keys[m]``; ``results[n]`` says whether
it was it. ``functions`` and ``state`` are those of foreign.py. The others are the caller's own: ``headers`` is memory
for the headers of a run, ``vectors`` for its iovecs. Never raises."""

write_pages = compiled(_SIGNATURE, _write_pages)
"""The same, to the slots. What ``results`` does not call DONE may be written in part."""

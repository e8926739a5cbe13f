"""GET and SET of pages on one connection, checksums and headers included, in compiled code without the GIL.

It talks as long as the server answers what is expected of a healthy one: the page that was asked for, nothing, or OK.
At the first other answer it leaves the connection, which must then be closed, and all pages without a result to
page_calls.py, which finds out what is wrong. So nothing here judges a server, and nothing here needs to be forgiving.

A reply is received straight into host memory, hashed while it is in the processor's cache, and counts only if the
first 88 bytes of its header are those of the page that was asked for, with the checksum of what was received
(envelope.py). Importing this module imports numba, and compiles nothing: runtime/jit.py does.
"""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt

from hicache_ext.page.envelope_code import (
    CHECKED_BYTES,
    HEADER_CHECKSUM_WORD,
    HEADER_WORDS,
    SEALED_WORDS,
    Unsigned,
    Words,
    checksum_of,
    finish_header,
    hash_of_header,
    write_sealed,
)
from hicache_ext.runtime.jit import compiled
from hicache_ext.runtime.native_calls import (
    CLOCK_GETTIME,
    DIGEST,
    ERRNO,
    MEMCPY,
    RECVMSG,
    RESET,
    SENDMSG,
    SETSOCKOPT,
    UPDATE,
    call,
    call_for_two,
    int_at,
)

Bytes = npt.NDArray[np.uint8]

LEFT, DONE, OTHERWISE = 0, 1, 2
"""Results of a page. DONE: read whole and right, or stored by this call. OTHERWISE: it was not there to be read, or was
there when it was to be written."""

ENDED, UNEXPECTED, CLOSED, LATE = 0, 1, 2, 3
"""What a talk ends with. Only after ENDED may the connection be used again. A negative one is -errno."""

SOCKET, DEADLINE, PAYLOAD, START, SECOND, CREATED, WINDOW = range(7)
"""Positions in ``facts``: the descriptor; CLOCK_MONOTONIC in ns until when; bytes of a payload; the first 16 bytes of
each header (two words); when written, in ms; bytes of values that may be under way."""

HEADER = 8 * HEADER_WORDS
_AT_ONCE = 512 << 10
"""Bytes received by one system call: they must stay in the processor's cache until they are hashed."""
_SENT_AT_ONCE = 256 << 10
"""Bytes of small pages gathered for one system call."""
_HASHED_AT_ONCE = 64 << 10
TAIL = 256
"""Bytes received behind a page: its line end and the head of the next reply, in the same system call."""
NAME = 97
"""Characters of an identity and a page hash in hexadecimal, with the colon between them."""
_TIMER_SLACK = 50_000_000
_SOL_SOCKET, _SO_RCVTIMEO, _SO_SNDTIMEO = 1, 20, 21
_MSG_NOSIGNAL = 0x4000
_EAGAIN, _EINTR = 11, 4
_MONOTONIC = 1

CLOCK, TIMER, RECEIVE_TIMER, SEND_TIMER, MESSAGE = 0, 2, 4, 5, 6
"""Positions in ``own``, words of the caller: a struct timespec, a struct timeval, when the timers were set (0: not by
this talk), a struct msghdr."""
OWN_WORDS = 13

BEGIN, END = 0, 1
"""Positions in ``ends``: what ``rest`` holds that no reply has used."""


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def _now(functions: Words, own: Words) -> int:
    call(functions[CLOCK_GETTIME], _MONOTONIC, own.ctypes.data + 8 * CLOCK, 0, 0, 0)
    return int(own[CLOCK]) * 1_000_000_000 + int(own[CLOCK + 1])


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def _set_timer(functions: Words, facts: Words, own: Words, option: int, position: int) -> bool:
    """Bound the next wait by the deadline; False when it has passed."""
    now = _now(functions, own)
    left = facts[DEADLINE] - now
    if left <= 0:
        return False
    if own[position] == 0 or now - own[position] > _TIMER_SLACK:
        left = max(left, 1_000_000)
        own[TIMER], own[TIMER + 1] = left // 1_000_000_000, left % 1_000_000_000 // 1000
        call(functions[SETSOCKOPT], facts[SOCKET], _SOL_SOCKET, option, own.ctypes.data + 8 * TIMER, 16)
        own[position] = now
    return True


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def _status_of_error(functions: Words) -> int:
    """Of a system call that has failed; ENDED where it is to be made again, if the deadline allows."""
    code = int_at(call(functions[ERRNO], 0, 0, 0, 0, 0))
    if code in (_EAGAIN, _EINTR):
        return ENDED
    return -code if code > 0 else UNEXPECTED


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def _send(functions: Words, facts: Words, own: Words, vectors: Words, count: int, total: int) -> int:
    """Send all of ``count`` pieces of ``vectors``, which are used up; a status."""
    first, status = 0, ENDED
    while total > 0 and status == ENDED:
        if not _set_timer(functions, facts, own, _SO_SNDTIMEO, SEND_TIMER):
            return LATE
        own[MESSAGE + 2], own[MESSAGE + 3] = vectors.ctypes.data + 16 * first, count - first
        sent = call(functions[SENDMSG], facts[SOCKET], own.ctypes.data + 8 * MESSAGE, _MSG_NOSIGNAL, 0, 0)
        if sent < 0:
            status = _status_of_error(functions)
            continue
        total -= sent
        while first < count and sent >= vectors[2 * first + 1]:
            sent -= vectors[2 * first + 1]
            first += 1
        if sent > 0:
            vectors[2 * first] += sent
            vectors[2 * first + 1] -= sent
    return status


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def _receive(functions: Words, facts: Words, own: Words, vectors: Words, count: int) -> tuple[int, int]:
    """Fill the pieces of ``vectors`` with what has arrived, at least one byte: a status, and the number of bytes."""
    while True:
        if not _set_timer(functions, facts, own, _SO_RCVTIMEO, RECEIVE_TIMER):
            return LATE, 0
        own[MESSAGE + 2], own[MESSAGE + 3] = vectors.ctypes.data, count
        received = call(functions[RECVMSG], facts[SOCKET], own.ctypes.data + 8 * MESSAGE, 0, 0, 0)
        if received > 0:
            return ENDED, received
        if received == 0:
            return CLOSED, 0
        status = _status_of_error(functions)
        if status != ENDED:
            return status, 0


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def _receive_more(functions: Words, facts: Words, own: Words, vectors: Words, rest: Bytes, ends: Words) -> int:
    """Add at least one byte to ``rest``; a status."""
    kept = ends[END] - ends[BEGIN]
    if ends[BEGIN] > 0:
        for at in range(kept):
            rest[at] = rest[ends[BEGIN] + at]
        ends[BEGIN], ends[END] = 0, kept
    if kept >= len(rest):
        return UNEXPECTED
    vectors[0], vectors[1] = rest.ctypes.data + kept, len(rest) - kept
    status, received = _receive(functions, facts, own, vectors, 1)
    ends[END] += received
    return int(status)


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def _begins_with(rest: Bytes, ends: Words, text: Bytes) -> bool:
    """Whether what is in ``rest`` begins with ``text``, as far as it has come."""
    for at in range(min(len(text), ends[END] - ends[BEGIN])):  # noqa: SIM110 - numba compiles no generator here
        if rest[ends[BEGIN] + at] != text[at]:
            return False
    return True


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def _which_reply(
    functions: Words, facts: Words, own: Words, vectors: Words, rest: Bytes, ends: Words, one: Bytes, other: Bytes
) -> tuple[int, bool]:
    """Take the next reply off ``rest``, which must be ``one`` or ``other``: a status, and whether it was ``one``."""
    while True:
        length = ends[END] - ends[BEGIN]
        is_one, is_other = _begins_with(rest, ends, one), _begins_with(rest, ends, other)
        if not is_one and not is_other:
            return UNEXPECTED, False
        if is_one and length >= len(one):
            ends[BEGIN] += len(one)
            return ENDED, True
        if is_other and length >= len(other):
            ends[BEGIN] += len(other)
            return ENDED, False
        status = _receive_more(functions, facts, own, vectors, rest, ends)
        if status != ENDED:
            return status, False


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def _write_request(text: Bytes, at: int, head: Bytes, keys: Bytes, page: int, tail: Bytes) -> int:
    """Write ``head``, the name of a page in hexadecimal, and ``tail`` to ``text``; one behind the end."""
    for position in range(len(head)):
        text[at + position] = head[position]
    at += len(head)
    for position in range(48):
        byte = keys[page, position]
        high, low = byte >> 4, byte & 15
        text[at] = high + 48 if high < 10 else high + 87
        text[at + 1] = low + 48 if low < 10 else low + 87
        at += 2
        if position == 15:
            text[at] = 58
            at += 1
    for position in range(len(tail)):
        text[at + position] = tail[position]
    return at + len(tail)


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def _send_text(functions: Words, facts: Words, own: Words, vectors: Words, text: Bytes, length: int) -> int:
    vectors[0], vectors[1] = text.ctypes.data, length
    return int(_send(functions, facts, own, vectors, 1, length))


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def _is_page(
    functions: Words, facts: Words, keys: Unsigned, page: int, header: Unsigned, low: np.uint64, high: np.uint64
) -> bool:
    """Whether ``header``, a received one with room for another behind it, is that of the page with this checksum."""
    write_sealed(header, HEADER_WORDS, facts[START], facts[SECOND], keys, page, facts[PAYLOAD], low, high)
    for word in range(SEALED_WORDS):
        if header[word] != header[HEADER_WORDS + word]:
            return False
    one, other = hash_of_header(functions, header, 0, CHECKED_BYTES)
    return bool(header[HEADER_CHECKSUM_WORD] == one and header[HEADER_CHECKSUM_WORD + 1] == other)


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def _receive_page(
    functions: Words,
    facts: Words,
    own: Words,
    vectors: Words,
    rest: Bytes,
    ends: Words,
    addresses: Words,
    segments: Words,
    page: int,
    header: Unsigned,
    state: int,
) -> tuple[int, np.uint64, np.uint64]:
    """Receive header and payload of a page whose length was read: a status, and the checksum of the payload. What
    comes behind them is in ``rest``."""
    got, hashed = 0, 0
    segment, begin = -1, 0
    hashing, from_here = 0, 0
    size = HEADER + facts[PAYLOAD]
    call(functions[RESET], state, 0, 0, 0, 0)
    while got < size:
        # The pieces that are missing, from (segment, begin) on; segment -1 is the header.
        count, wanted, at, offset = 0, 0, segment, begin
        while at < len(segments) and wanted < _AT_ONCE and 2 * count + 4 <= len(vectors):
            place = header.ctypes.data if at < 0 else addresses[page, at]
            length = (HEADER if at < 0 else segments[at]) - offset
            length = min(length, _AT_ONCE - wanted)
            vectors[2 * count], vectors[2 * count + 1] = place + offset, length
            count += 1
            wanted += length
            offset = 0
            at += 1
        if ends[BEGIN] < ends[END]:
            # What came behind the page before goes where it belongs; it is less than a page.
            moved = min(ends[END] - ends[BEGIN], vectors[1])
            call(functions[MEMCPY], vectors[0], rest.ctypes.data + ends[BEGIN], moved, 0, 0)
            ends[BEGIN] += moved
        else:
            whole = got + wanted == size
            if whole:
                vectors[2 * count], vectors[2 * count + 1] = rest.ctypes.data, TAIL
                count += 1
            status, moved = _receive(functions, facts, own, vectors, count)
            if status != ENDED:
                return status, np.uint64(0), np.uint64(0)
            ends[BEGIN], ends[END] = 0, max(0, moved - wanted)
            moved = min(moved, wanted)
        got += moved
        while moved > 0:
            left = (HEADER if segment < 0 else segments[segment]) - begin
            if moved < left:
                begin += moved
                moved = 0
            else:
                moved -= left
                segment += 1
                begin = 0
        arrived = got - HEADER
        if arrived - hashed >= _HASHED_AT_ONCE or got == size:
            while hashed < arrived:
                length = min(segments[hashing] - from_here, arrived - hashed)
                call(functions[UPDATE], state, addresses[page, hashing] + from_here, length, 0, 0)
                hashed += length
                from_here += length
                if from_here == segments[hashing]:
                    hashing += 1
                    from_here = 0
    low, high = call_for_two(functions[DIGEST], state, 0)
    return ENDED, low, high


def _read_pages(
    functions: Words,
    facts: Words,
    positions: Words,
    addresses: Words,
    segments: Words,
    keys: Unsigned,
    names: Bytes,
    get_head: Bytes,
    expected: Bytes,
    absent: Bytes,
    line_end: Bytes,
    text: Bytes,
    rest: Bytes,
    ends: Words,
    vectors: Words,
    header: Unsigned,
    own: Words,
    state: int,
    results: Words,
) -> int:
    size = HEADER + facts[PAYLOAD]
    # While one page is received or answered another is under way, however large they are.
    window = max(facts[WINDOW], 2 * size)
    request = len(get_head) + NAME + len(line_end)
    sent, flying = 0, 0
    status: int = ENDED
    for number in range(len(positions)):
        if sent < len(positions) and (sent == number or flying <= window // 2):
            length = 0
            while sent < len(positions) and length + request <= len(text):
                if flying > 0 and flying + size > window:
                    break
                length = _write_request(text, length, get_head, names, positions[sent], line_end)
                flying += size
                sent += 1
            if length > 0:
                status = _send_text(functions, facts, own, vectors, text, length)
                if status != ENDED:
                    return status
        page = positions[number]
        status, is_there = _which_reply(functions, facts, own, vectors, rest, ends, expected, absent)
        if status != ENDED:
            return status
        flying -= size
        if not is_there:
            results[page] = OTHERWISE
            continue
        status, low, high = _receive_page(
            functions, facts, own, vectors, rest, ends, addresses, segments, page, header, state
        )
        if status != ENDED:
            return status
        status, _ = _which_reply(functions, facts, own, vectors, rest, ends, line_end, line_end)
        if status != ENDED:
            return status
        if not _is_page(functions, facts, keys, page, header, low, high):
            return UNEXPECTED
        results[page] = DONE
    return ENDED if ends[BEGIN] == ends[END] else UNEXPECTED


def _write_pages(
    functions: Words,
    facts: Words,
    positions: Words,
    addresses: Words,
    segments: Words,
    keys: Unsigned,
    names: Bytes,
    length_head: Bytes,
    set_head: Bytes,
    set_tail: Bytes,
    set_end: Bytes,
    there: Bytes,
    missing: Bytes,
    stored: Bytes,
    not_stored: Bytes,
    question: Bytes,
    answer: Bytes,
    line_end: Bytes,
    text: Bytes,
    rest: Bytes,
    ends: Words,
    vectors: Words,
    header: Unsigned,
    own: Words,
    state: int,
    results: Words,
    waiting: Words,
) -> int:
    size = HEADER + facts[PAYLOAD]
    window = max(facts[WINDOW], 2 * size)
    request = len(length_head) + NAME + len(line_end)
    status: int = ENDED
    # Which are there: their payload need not be sent.
    absent, asked = 0, 0
    while asked < len(positions):
        length, first = 0, asked
        while asked < len(positions) and length + request + len(question) <= len(text):
            length = _write_request(text, length, length_head, names, positions[asked], line_end)
            asked += 1
        if asked == len(positions):
            for position in range(len(question)):
                text[length + position] = question[position]
            length += len(question)
        status = _send_text(functions, facts, own, vectors, text, length)
        if status != ENDED:
            return status
        for number in range(first, asked):
            status, is_there = _which_reply(functions, facts, own, vectors, rest, ends, there, missing)
            if status != ENDED:
                return status
            waiting[number] = 1 if is_there else 0
    status, _ = _which_reply(functions, facts, own, vectors, rest, ends, answer, answer)
    if status != ENDED:
        return status
    for number in range(len(positions)):
        if waiting[number]:
            results[positions[number]] = OTHERWISE
        else:
            waiting[absent] = positions[number]
            absent += 1
    if absent == 0:
        return ENDED if ends[BEGIN] == ends[END] else UNEXPECTED
    head = len(set_head) + NAME + len(set_tail)
    answered, flying, number = 0, 0, 0
    while number < absent:
        # Gather pages for one system call: their heads and headers lie in ``text``, one behind the other.
        count, total, length = 0, 0, 0
        while (
            number < absent
            and (total == 0 or total < _SENT_AT_ONCE)
            and (flying == 0 or flying + size <= window)
            and length + head + HEADER + 8 <= len(text)
            # With room for the question.
            and 2 * (count + len(segments) + 3) <= len(vectors)
        ):
            page = waiting[number]
            low, high = checksum_of(functions, state, facts[PAYLOAD], addresses, segments, page)
            write_sealed(header, 0, facts[START], facts[SECOND], keys, page, facts[PAYLOAD], low, high)
            finish_header(functions, header, 0, facts[CREATED])
            end = _write_request(text, length, set_head, names, page, set_tail)
            call(functions[MEMCPY], text.ctypes.data + end, header.ctypes.data, HEADER, 0, 0)
            end += HEADER
            vectors[2 * count], vectors[2 * count + 1] = text.ctypes.data + length, end - length
            count += 1
            for segment in range(len(segments)):
                vectors[2 * count], vectors[2 * count + 1] = addresses[page, segment], segments[segment]
                count += 1
            vectors[2 * count], vectors[2 * count + 1] = set_end.ctypes.data, len(set_end)
            count += 1
            total += end - length + facts[PAYLOAD] + len(set_end)
            length = end
            flying += size
            number += 1
        if count > 0:
            if number == absent:
                vectors[2 * count], vectors[2 * count + 1] = question.ctypes.data, len(question)
                count += 1
                total += len(question)
            status = _send(functions, facts, own, vectors, count, total)
            if status != ENDED:
                return status
        most = window // 2 if number < absent else 0
        while answered < number and flying > most:
            status, is_stored = _which_reply(functions, facts, own, vectors, rest, ends, stored, not_stored)
            if status != ENDED:
                return status
            # Not told before the answer to the question: a reply too many would make each the next page's.
            waiting[answered] = waiting[answered] if is_stored else -1 - waiting[answered]
            answered += 1
            flying -= size
    status, _ = _which_reply(functions, facts, own, vectors, rest, ends, answer, answer)
    if status != ENDED:
        return status
    if ends[BEGIN] != ends[END]:
        return UNEXPECTED
    for number in range(absent):
        # One that came in between is looked at by page_calls.py.
        if waiting[number] >= 0:
            results[waiting[number]] = DONE
    return ENDED


read_pages = compiled(
    "int64(int64[::1], int64[::1], int64[::1], int64[:, ::1], int64[::1], uint64[:, ::1], uint8[:, ::1], uint8[::1], "
    "uint8[::1], uint8[::1], uint8[::1], uint8[::1], uint8[::1], int64[::1], int64[::1], uint64[::1], int64[::1], "
    "int64, int64[::1])",
    _read_pages,
)
"""GET the pages ``positions``, one after the other; how it ended. Only what ``results`` calls DONE is in memory.

Page ``n`` goes to ``addresses[n]``, a segment each of ``segments`` bytes, and must have the key ``keys[n]``, whose
bytes are ``names[n]`` too. ``get_head`` is a request up to its key in hexadecimal, ``expected`` a reply up to its first
byte, ``absent`` the reply where there is no page. ``functions`` and ``state`` are those of native_calls.py. The others
are the thread's own: memory for requests, for received bytes that no reply has used (``rest`` and ``ends``), iovecs,
two headers, ``OWN_WORDS`` zeros. Never raises."""

write_pages = compiled(
    "int64(int64[::1], int64[::1], int64[::1], int64[:, ::1], int64[::1], uint64[:, ::1], uint8[:, ::1], uint8[::1], "
    "uint8[::1], uint8[::1], uint8[::1], uint8[::1], uint8[::1], uint8[::1], uint8[::1], uint8[::1], uint8[::1], "
    "uint8[::1], uint8[::1], uint8[::1], int64[::1], int64[::1], uint64[::1], int64[::1], int64, int64[::1], "
    "int64[::1])",
    _write_pages,
)
"""STRLEN, then SET of what is not there, in the same way. ``question`` ends each of the two: only where ``answer``
follows the last reply, no reply was one too many, and the results count. ``waiting`` is memory, a word a page."""

"""The Triton kernel that moves rows between page-locked host memory and the device; imports triton.

Host memory is accessed by its integer address. A fixed, small number of programs (the quota) shares the work, so
that attention and matrix products keep the rest of the GPU. The code suits both the compiler and the interpreter: loops
are ``while`` loops, since ``range`` over run-time values fails with some versions of interpreter and NumPy.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


# Annotate with constexpr only: the compiler takes names in annotations for globals of the kernel.
def copy_rows(  # type: ignore[no-untyped-def]
    bases,  # (copies, 2) int64: host and device address of token 0
    first,  # the first copy
    host_indices,  # int64
    device_indices,  # int64
    rows,  # tokens * segments
    units,  # copies * groups of rows * chunks of a row
    HOST_PAGE: tl.constexpr,
    HOST_TOKEN: tl.constexpr,
    HOST_SEGMENT: tl.constexpr,
    DEVICE_PAGE: tl.constexpr,
    DEVICE_TOKEN: tl.constexpr,
    DEVICE_SEGMENT: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SEGMENTS: tl.constexpr,
    WORDS: tl.constexpr,  # words per segment
    WIDTH: tl.constexpr,  # bytes per word
    ALIGNMENT: tl.constexpr,  # alignment of every address, in bytes
    ROWS: tl.constexpr,  # rows per tile
    COLUMNS: tl.constexpr,  # words per row of a tile
    CHUNKS: tl.constexpr,  # tiles side by side in a row
    IS_LOAD: tl.constexpr,
):
    word: tl.constexpr = tl.int64 if WIDTH == 8 else tl.int32 if WIDTH == 4 else tl.int16 if WIDTH == 2 else tl.int8
    pointer: tl.constexpr = tl.pointer_type(word)
    groups = (rows + ROWS - 1) // ROWS
    unit = tl.program_id(0)
    while unit < units:
        column = (unit % CHUNKS) * COLUMNS + tl.arange(0, COLUMNS)
        row = (unit // CHUNKS % groups) * ROWS + tl.arange(0, ROWS)
        copy = first + unit // CHUNKS // groups
        in_rows = row < rows
        host_token = tl.load(host_indices + row // SEGMENTS, mask=in_rows, other=0)
        device_token = tl.load(device_indices + row // SEGMENTS, mask=in_rows, other=0)
        host = (
            tl.load(bases + 2 * copy)
            + (host_token // PAGE_SIZE) * HOST_PAGE
            + (host_token % PAGE_SIZE) * HOST_TOKEN
            + (row % SEGMENTS) * HOST_SEGMENT
        )
        device = (
            tl.load(bases + 2 * copy + 1)
            + (device_token // PAGE_SIZE) * DEVICE_PAGE
            + (device_token % PAGE_SIZE) * DEVICE_TOKEN
            + (row % SEGMENTS) * DEVICE_SEGMENT
        )
        # The hint only works on pointers: on the integers the loads stay scalar.
        host_rows = tl.multiple_of(host.to(pointer), ALIGNMENT)[:, None] + column[None, :]
        device_rows = tl.multiple_of(device.to(pointer), ALIGNMENT)[:, None] + column[None, :]
        inside = in_rows[:, None] & (column < WORDS)[None, :]
        if IS_LOAD:
            tl.store(device_rows, tl.load(host_rows, mask=inside), mask=inside)
        else:
            tl.store(host_rows, tl.load(device_rows, mask=inside), mask=inside)
        unit += tl.num_programs(0)


def compiled() -> Any:
    """Return the kernel for GPUs, not specialised on its integers: each value of ``first`` would compile again."""
    return triton.jit(copy_rows, do_not_specialize=["first", "rows", "units"])

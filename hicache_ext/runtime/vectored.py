"""preadv/pwritev of a whole list of buffers: the kernel's limits (1,024 buffers, short transfers) handled once."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

IOV_MAX = 1024
"""Buffers one call may name on Linux (UIO_MAXIOV)."""


def read_into(fd: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
    """Fill ``buffers`` from ``fd`` at ``offset``; return the number of bytes read, short only at the end of the file.

    ``flags`` are those of preadv2. Raises OSError as preadv does.
    """
    return _transfer(os.preadv, fd, buffers, offset, flags)


def write_from(fd: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
    """Write all of ``buffers`` to ``fd`` at ``offset``; return the number of bytes written, always all of them.

    ``flags`` are those of pwritev2. Raises OSError as pwritev does.
    """
    return _transfer(os.pwritev, fd, buffers, offset, flags)


def _transfer(
    call: Callable[[int, Sequence[memoryview], int, int], int],
    fd: int,
    buffers: Sequence[memoryview],
    offset: int,
    flags: int,
) -> int:
    done = 0
    # 1,024 empty buffers in a row would look like the end of the file.
    pending = [buffer for buffer in buffers if buffer.nbytes]
    while pending:
        moved = call(fd, pending[:IOV_MAX], offset + done, flags)
        if moved == 0:
            break
        done += moved
        pending = after(pending, moved)
    return done


def after(buffers: list[memoryview], moved: int) -> list[memoryview]:
    """Return what remains of ``buffers`` after ``moved`` bytes."""
    for position, buffer in enumerate(buffers):
        if moved < buffer.nbytes:
            return [buffer[moved:], *buffers[position + 1 :]]
        moved -= buffer.nbytes
    return []

"""Copies between a page's segments and one piece of memory. Any thread."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_FEW_BYTES = 64 * 1024
"""Copied in less time than it takes to give the GIL away and get it back."""


def copy(source: memoryview, target: memoryview) -> None:
    """As many bytes; without the GIL where they are many (numpy), in one step where they are few."""
    if source.nbytes <= _FEW_BYTES:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def gather(source: Sequence[memoryview], target: memoryview) -> None:
    """The concatenation of ``source`` into ``target``."""
    offset = 0
    for segment in source:
        end = offset + segment.nbytes
        copy(segment, target[offset:end])
        offset = end


def scatter(source: memoryview, target: Sequence[memoryview]) -> None:
    """``source`` into ``target``, one segment after the other."""
    offset = 0
    for segment in target:
        end = offset + segment.nbytes
        copy(source[offset:end], segment)
        offset = end

"""Copies between a page's segments and one run of memory. Any thread."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def gather(source: Sequence[memoryview], target: memoryview) -> None:
    """The concatenation of ``source`` into ``target``."""
    offset = 0
    for segment in source:
        _copy(segment, target[offset : offset + segment.nbytes])
        offset += segment.nbytes


def scatter(source: memoryview, target: Sequence[memoryview]) -> None:
    """``source`` into ``target``, one segment after the other."""
    offset = 0
    for segment in target:
        _copy(source[offset : offset + segment.nbytes], segment)
        offset += segment.nbytes


def _copy(source: memoryview, target: memoryview) -> None:
    # numpy releases the GIL while it copies; assigning memoryviews would not, and delay SGLang's scheduler.
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))

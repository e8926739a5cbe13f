"""How a page is laid out in its slot."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hicache_ext import envelope
from hicache_ext.storage.file.directory import BLOCK


class Shape(NamedTuple):
    """Bytes of a page in a slot."""

    header: int
    length: int
    """Of the page object: header and payload."""
    slot: int


@functools.lru_cache(maxsize=1024)
def shape_of(payload: int) -> Shape:
    """How a page with ``payload`` bytes is stored.

    The header is a whole block where that aligns the payload at no cost in slot size, else the bare fields.
    """
    header = BLOCK if payload % BLOCK == 0 else envelope.FIELDS_LENGTH
    length = header + payload
    return Shape(header, length, -(-length // BLOCK) * BLOCK)


def are_of_one_size(sizes: Sequence[int]) -> bool:
    """Whether these pages, one at least, have the same payload."""
    return sizes.count(sizes[0]) == len(sizes)


def lengths_of(sizes: Sequence[int], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The lengths of the objects of the pages at some positions, all pages having these payloads."""
    if sizes and are_of_one_size(sizes):
        return np.full(len(positions), shape_of(sizes[0]).length)
    return np.array([shape_of(size).length for size in sizes], np.int64)[positions]

"""Numbers taken apart into planes: by the native core and with numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_ext import native
from hicache_ext.page.transforms.numbers import SPLITS, Split


def at_address(content: np.ndarray, start: int) -> np.ndarray:
    """A copy of bytes that begins so far behind a whole word."""
    memory = np.zeros(content.size + 16, np.uint8)
    begin = -memory.ctypes.data % 8 + start
    memory[begin : begin + content.size] = content
    return memory[begin : begin + content.size]


def _pages(split: Split):
    return st.binary(min_size=0, max_size=300).map(lambda page: page[: len(page) // split.group * split.group])


def _planes_of(split: Split, page: bytes) -> list[np.ndarray]:
    return [np.zeros(size, np.uint8) for size in split.planes(len(page))]


@pytest.mark.parametrize("split", SPLITS.values(), ids=str)
def test_numpy_joins_what_it_split(split: Split) -> None:
    # Of more than a piece, and not a whole number of them.
    page = np.random.default_rng(1).integers(0, 256, 200_004, np.uint8)
    both = _planes_of(split, page.tobytes())
    split.split_in_numpy(page, *both)
    joined = np.zeros_like(page)
    split.join_in_numpy(*both, joined)
    assert np.array_equal(joined, page)


@pytest.mark.parametrize("split", SPLITS.values(), ids=str)
def test_the_core_and_numpy_make_equal_planes_at_any_address(split: Split) -> None:
    assert native.core() is not None

    @given(_pages(split), st.integers(0, 7))
    def check(content: bytes, start: int) -> None:
        page = np.frombuffer(content, np.uint8)
        made, plain = ([at_address(plane, start) for plane in _planes_of(split, content)] for _ in range(2))
        split.split(at_address(page, start), *made)
        split.split_in_numpy(page, *plain)
        assert [plane.tobytes() for plane in made] == [plane.tobytes() for plane in plain]
        joined = at_address(np.zeros_like(page), start)
        split.join(*made, joined)
        assert joined.tobytes() == content

    check()


@pytest.mark.parametrize("split", SPLITS.values(), ids=str)
def test_the_core_writes_into_its_planes_alone(split: Split) -> None:
    memory = np.full(3 * 4096, 7, np.uint8)
    page = np.random.default_rng(2).integers(0, 256, 4 * 257, np.uint8)
    sizes = split.planes(page.size)
    top, rest = memory[100 : 100 + sizes[0]], memory[4096 : 4096 + sizes[1]]
    split.split(page, top, rest)
    joined = memory[8192 : 8192 + page.size]
    split.join(top, rest, joined)
    assert np.array_equal(joined, page)
    top[:], rest[:], joined[:] = 7, 7, 7
    assert (memory == 7).all()


def test_the_top_of_16_bits_is_the_exponent_of_a_bfloat16() -> None:
    page = np.array([0x3F80, 0xBF80, 0x4000, 0x0001], "<u2").view(np.uint8)
    top, rest = np.zeros(4, np.uint8), np.zeros(4, np.uint8)
    SPLITS[16].split(page, top, rest)
    assert (top.tolist(), rest.tolist()) == ([127, 127, 128, 0], [0, 1, 0, 2])


def test_the_top_of_8_bits_is_the_exponents_of_two_neighbours() -> None:
    page = np.array([0b0_0111_101, 0b1_1000_010], np.uint8)
    top, rest = np.zeros(1, np.uint8), np.zeros(1, np.uint8)
    SPLITS[8].split(page, top, rest)
    assert (top[0], rest[0]) == (0b1000_0111, 0b1010_0101)


@pytest.mark.parametrize("sizes", [(8, 3, 4), (8, 4, 5), (7, 3, 4), (8, 4, 3)])
def test_planes_of_other_sizes_are_refused_before_the_core_sees_them(sizes: tuple[int, int, int]) -> None:
    page, top, rest = (np.zeros(size, np.uint8) for size in sizes)
    with pytest.raises(ValueError, match="16 bits"):
        SPLITS[16].split(page, top, rest)
    with pytest.raises(ValueError, match="16 bits"):
        SPLITS[16].join(top, rest, page)

"""Numbers taken apart into planes: compiled and with numpy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_ext.page.transforms import planes
from hicache_ext.page.transforms.planes import SPLITS, Split
from hicache_ext.runtime import jit

pytest.importorskip("numba")


@pytest.fixture(scope="module")
def kernels():
    code = planes.part.wait()
    assert code is not None, planes.part.why_not()
    return code.kernels


def _pages(split: Split):
    return st.binary(min_size=0, max_size=300).map(lambda page: page[: len(page) // split.group * split.group])


def _planes_of(split: Split, page: bytes) -> list[np.ndarray]:
    return [np.zeros(size, np.uint8) for size in split.planes(len(page))]


@pytest.mark.parametrize("split", SPLITS.values(), ids=str)
def test_numpy_joins_what_it_split(split: Split) -> None:
    # Of more than a piece, and not a whole number of them.
    page = np.random.default_rng(1).integers(0, 256, 200_004, np.uint8)
    both = _planes_of(split, page.tobytes())
    split.split_with_numpy(page, *both)
    joined = np.zeros_like(page)
    split.join_with_numpy(*both, joined)
    assert np.array_equal(joined, page)


@pytest.mark.parametrize("split", SPLITS.values(), ids=str)
def test_compiled_code_and_numpy_make_equal_planes(split: Split, kernels) -> None:
    @given(_pages(split))
    def check(content: bytes) -> None:
        page = np.frombuffer(content, np.uint8)
        compiled, plain = _planes_of(split, content), _planes_of(split, content)
        kernels[f"split_{split.bits}"](page, *compiled)
        split.split_with_numpy(page, *plain)
        assert [plane.tobytes() for plane in compiled] == [plane.tobytes() for plane in plain]
        joined = np.zeros_like(page)
        kernels[f"join_{split.bits}"](*compiled, joined)
        assert joined.tobytes() == content

    check()


def test_the_top_of_16_bits_is_the_exponent_of_a_bfloat16() -> None:
    page = np.array([0x3F80, 0xBF80, 0x4000, 0x0001], "<u2").view(np.uint8)
    top, rest = np.zeros(4, np.uint8), np.zeros(4, np.uint8)
    SPLITS[16].split_with_numpy(page, top, rest)
    assert (top.tolist(), rest.tolist()) == ([127, 127, 128, 0], [0, 1, 0, 2])


def test_the_top_of_8_bits_is_the_exponents_of_two_neighbours() -> None:
    page = np.array([0b0_0111_101, 0b1_1000_010], np.uint8)
    top, rest = np.zeros(1, np.uint8), np.zeros(1, np.uint8)
    SPLITS[8].split_with_numpy(page, top, rest)
    assert (top[0], rest[0]) == (0b1000_0111, 0b1010_0101)


@pytest.mark.parametrize("sizes", [(8, 3, 4), (8, 4, 5), (7, 3, 4), (8, 4, 3)])
def test_planes_of_other_sizes_are_refused_before_compiled_code_sees_them(sizes: tuple[int, int, int]) -> None:
    page, top, rest = (np.zeros(size, np.uint8) for size in sizes)
    with pytest.raises(ValueError, match="16 bits"):
        SPLITS[16].split(page, top, rest)
    with pytest.raises(ValueError, match="16 bits"):
        SPLITS[16].join(top, rest, page)


@pytest.mark.parametrize("name", [f"{what}_{bits}" for what in ("split", "join") for bits in (8, 16, 32)])
def test_kernels_that_do_something_else_than_numpy_are_not_used(name: str, kernels) -> None:
    wrong = {**kernels, name: lambda *_: None}
    planes.check_kernels(kernels)
    with pytest.raises(ImportError, match="its planes are not those of this version"):
        planes.check_kernels(wrong)


def test_its_source_is_among_those_that_compiled_code_depends_on() -> None:
    assert str(Path("page/transforms/plane_code.py")) in jit._SOURCES

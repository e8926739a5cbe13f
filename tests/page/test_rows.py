"""Rows of numbers as codes of 8 bits: how far off they come back, and which are refused."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_ext import native
from hicache_ext.page.transforms.header import LOSSY_CODECS
from hicache_ext.page.transforms.numbers import _NARROW, _WIDEN, KINDS, ROWS, Rows
from tests.page.test_planes import at_address

LENGTH = 64
ERRORS = {"int8": 0.5 * 129 / 127 / 127, "fp8": 0.5 / 8}
"""Of a number, in parts of the largest one of its row: half a step of the scale, which is rounded up. Of fp8, half of
the last place of the largest number."""
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 0.0}


def words_of(numbers: np.ndarray, dtype: str) -> np.ndarray:
    page = np.zeros(numbers.size * (2 if dtype == "float32" else 1), np.uint16)
    _NARROW[dtype](np.ascontiguousarray(numbers, np.float32).reshape(-1), page)
    return page


def numbers_of(page: np.ndarray, dtype: str) -> np.ndarray:
    return _WIDEN[dtype](page).view(np.float32).reshape(-1, LENGTH)


def there_and_back(page: np.ndarray, dtype: str, code: str) -> np.ndarray:
    how = Rows(dtype, LENGTH, code)
    codes = np.empty(page.size // how.words, np.uint8)
    scales, back = np.empty(codes.size // LENGTH, np.uint16), np.empty_like(page)
    assert how.quantise(page, scales, codes)
    assert how.restore(scales, codes, back)
    return back


@pytest.mark.parametrize("code", LOSSY_CODECS)
@pytest.mark.parametrize("dtype", KINDS)
def test_numbers_come_back_within_half_a_step(dtype: str, code: str) -> None:
    random = np.random.default_rng(0)
    sizes = np.exp(random.uniform(-8, 8, (500, 1)))
    page = words_of(random.standard_normal((500, LENGTH)) * sizes, dtype)
    before = numbers_of(page, dtype)
    after = numbers_of(there_and_back(page, dtype, code), dtype)
    largest = np.abs(before).max(axis=1, keepdims=True)
    assert (np.abs(before - after) <= largest * (ERRORS[code] + ROUNDING[dtype]) * 1.0001).all()


@pytest.mark.parametrize("dtype", KINDS)
def test_fp8_keeps_small_numbers_of_a_row_to_four_bits(dtype: str) -> None:
    """What int8 makes zeros: an error in parts of the number itself."""
    row = np.geomspace(1, 2**-12, LENGTH)
    page = words_of(row, dtype)
    before = numbers_of(page, dtype)
    after = numbers_of(there_and_back(page, dtype, "fp8"), dtype)
    assert (np.abs(before - after) <= np.abs(before) * (2.0**-4 + 2.0**-8)).all()


@pytest.mark.parametrize("code", LOSSY_CODECS)
@pytest.mark.parametrize("dtype", KINDS)
def test_numbers_between_the_codes_of_fp8_and_the_steps_of_halves_are_rounded_alike(dtype: str, code: str) -> None:
    """The core and numpy, over all bits of a number: denormal, at the limits, negative."""
    assert native.core() is not None
    random = np.random.default_rng(1)
    page = random.integers(0, 1 << 16, 400 * LENGTH * (2 if dtype == "float32" else 1), np.uint16)
    if dtype == "float16":
        page[page & 0x7C00 == 0x7C00] = 0x0001
    else:
        page[page & 0x7FFF >= 0x7100] = 0x0001
    how = Rows(dtype, LENGTH, code)
    made = []
    for quantise, restore in (
        (how.quantise_in_numpy, how.restore_in_numpy),
        (how.quantise, how.restore),
    ):
        codes = np.zeros(400 * LENGTH, np.uint8)
        scales, back = np.zeros(400, np.uint16), np.zeros_like(page)
        assert quantise(page, scales, codes)
        restore(scales, codes, back)
        made.append((scales, codes, back))
    assert all(np.array_equal(*pair) for pair in zip(*made, strict=True))


@pytest.mark.parametrize("code", LOSSY_CODECS)
@pytest.mark.parametrize("dtype", KINDS)
def test_every_bit_of_a_page_is_quantised_and_restored_alike_at_any_address(dtype: str, code: str) -> None:
    """The core and numpy: also of infinities and NaNs, rows of any length, and scales that nobody writes."""
    core = native.core()
    assert core is not None

    @given(st.integers(1, 70), st.integers(0, 5), st.integers(0, 3), st.booleans(), st.randoms(use_true_random=False))
    def check(length: int, count: int, start: int, harmless: bool, chance: random.Random) -> None:
        how = Rows(dtype, length, code)
        total = length * count
        content = np.frombuffer(chance.randbytes(2 * how.words * total), np.uint16).copy()
        if harmless:
            # No large exponents, and some denormal ones.
            content[how.words - 1 :: how.words] &= np.uint16(chance.choice((0xBBFF, 0x83FF, 0x8FFF)))
        page = at_address(content.view(np.uint8), start)
        scales, codes, back = (at_address(np.zeros(size, np.uint8), start) for size in (2 * count, total, page.size))
        expected = np.zeros(count, np.uint16), np.zeros(total, np.uint8), np.zeros_like(content)
        kind, fp8 = KINDS[dtype], code == "fp8"
        how_many = kind, fp8, length, count, scales, codes
        accepted = core(ROWS, page, *how_many, False)
        assert accepted == how.quantise_in_numpy(content, *expected[:2])
        if not accepted:
            return
        assert (bytes(scales), bytes(codes)) == (bytes(expected[0]), bytes(expected[1]))
        for of_codes in (bytes(codes), chance.randbytes(total)):
            codes[:] = expected[1][:] = np.frombuffer(of_codes, np.uint8)
            core(ROWS, back, *how_many, True)
            how.restore_in_numpy(*expected)
            assert bytes(back) == bytes(expected[2])

    check()


@pytest.mark.parametrize("code", LOSSY_CODECS)
@pytest.mark.parametrize("dtype", KINDS)
def test_rows_of_zeros_stay_zeros_and_harm_no_neighbour(dtype: str, code: str) -> None:
    numbers = np.zeros((3, LENGTH))
    numbers[1] = np.linspace(-1, 1, LENGTH)
    after = numbers_of(there_and_back(words_of(numbers, dtype), dtype, code), dtype)
    assert not after[0].any() and not after[2].any()
    assert np.abs(after[1] - numbers[1]).max() < 0.07


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_row_below_two_to_the_minus_hundred_becomes_zeros(dtype: str) -> None:
    numbers = np.full((2, LENGTH), 2.0**-100)
    numbers[1] = 2.0**-101
    after = numbers_of(there_and_back(words_of(numbers, dtype), dtype, "int8"), dtype)
    assert after[0].all() and not after[1].any()


@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan, 2.0**100, -(2.0**127)], ids=str)
@pytest.mark.parametrize("code", LOSSY_CODECS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_infinities_nans_and_huge_numbers_are_refused(dtype: str, code: str, number: float) -> None:
    numbers = np.ones((5, LENGTH), np.float32)
    numbers[3, 17] = number
    page = words_of(numbers, dtype)
    how = Rows(dtype, LENGTH, code)
    assert not how.quantise(page, np.empty(5, np.uint16), np.empty(5 * LENGTH, np.uint8))


@pytest.mark.parametrize("word", [0x7C00, 0xFC00, 0x7E01, 0xFFFF])
def test_infinities_and_nans_of_halves_are_refused(word: int) -> None:
    page = np.full(LENGTH, 0x3C00, np.uint16)
    page[3] = word
    how = Rows("float16", LENGTH, "int8")
    assert not how.quantise(page, np.empty(1, np.uint16), np.empty(LENGTH, np.uint8))


@pytest.mark.parametrize("code", LOSSY_CODECS)
def test_the_largest_halves_never_become_infinite(code: str) -> None:
    numbers = np.linspace(64000, 65504, LENGTH)
    after = numbers_of(there_and_back(words_of(numbers, "float16"), "float16", code), "float16")
    assert np.isfinite(after).all() and after.max() <= 65504


@pytest.mark.parametrize("scale", [0x7F80, 0xFFFF, 0x8001, 0x7180])
def test_scales_that_nobody_writes_are_refused(scale: int) -> None:
    how = Rows("bfloat16", LENGTH, "int8")
    scales = np.array([0x3F80, scale], np.uint16)
    assert not how.restore(scales, np.zeros(2 * LENGTH, np.uint8), np.zeros(2 * LENGTH, np.uint16))

"""Sizes and durations: what each text means, what is refused, and round trips."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hicache_ext.config import format_duration, format_size, parse_duration, parse_size, rounded_size
from hicache_ext.config.values import LARGEST_SIZE, LONGEST_DURATION
from hicache_ext.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (0, 0),
        (4096, 4096),
        ("17B", 17),
        ("4kB", 4000),
        ("4KB", 4000),
        ("4KiB", 4096),
        ("512MB", 512_000_000),
        ("512MiB", 512 * 2**20),
        ("2TiB", 2 * 2**40),
        (" 2 TB ", 2 * 10**12),
        ("1.5GB", 1_500_000_000),
        ("0.1KiB", 102),
        ("7EiB", 7 * 2**60),
    ],
)
def test_a_size_means_its_bytes(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("5M", "the unit 'M' is ambiguous; write MB or MiB"),
        ("5g", "the unit 'g' is ambiguous; write GB or GiB"),
        ("5Gi", "the unit 'Gi' is ambiguous; write GB or GiB"),
        ("5Gb", "the unit 'Gb' is ambiguous; write GB or GiB"),
        ("5mib", "unknown unit 'mib'; did you mean 'MiB'?"),
        ("5furlongs", "unknown unit 'furlongs'"),
        ("5", "the text '5' has no unit"),
        ("-5MiB", "the text '-5MiB' is negative"),
        (-1, "the number -1 is negative"),
        ("", "the text '' is not accepted"),
        ("1e3MiB", "the text '1e3MiB' is not accepted"),
        ("1,5GB", "the text '1,5GB' is not accepted"),
        ("٣MiB", "the text '٣MiB' is not accepted"),
        ("nan", "the text 'nan' is not accepted"),
        (1.5, "the number 1.5 is not accepted"),
        (math.nan, "the number nan is not accepted"),
        (math.inf, "the number inf is not accepted"),
        (True, "the value true is not accepted"),
        (None, "an empty value is not accepted"),
        ([1], "a list is not accepted"),
        (2**63, "the number 9223372036854775808 is 8EiB or more"),
        pytest.param(10**5000, "a number of more than 30 digits is 8EiB or more", id="10**5000"),
        ("8EiB", "the text '8EiB' is 8EiB or more"),
    ],
)
def test_a_size_that_is_not_clear_is_refused_with_the_reason(text: object, problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_size(text, "tier.capacity")
    assert raised.value.problem == problem
    assert raised.value.key == "tier.capacity"


@given(st.integers(0, LARGEST_SIZE))
@example(1024)
@example(1000)
@example(10**15)
@example(LARGEST_SIZE)
def test_a_formatted_size_is_read_back_to_the_byte(size: int) -> None:
    assert parse_size(format_size(size)) == size


@given(st.integers(0, 10**6), st.integers(0, 999), st.sampled_from(["kB", "MB", "GB", "KiB", "MiB", "GiB"]))
def test_a_fraction_is_exact_and_rounded_down(whole: int, thousandths: int, unit: str) -> None:
    factor = parse_size(f"1{unit}")
    assert parse_size(f"{whole}.{thousandths:03}{unit}") == (whole * 1000 + thousandths) * factor // 1000


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_a_config_error(text: str) -> None:
    said = ""
    try:
        assert 0 <= parse_size(text) <= LARGEST_SIZE
    except ConfigError as error:
        said = str(error)
    assert "\n" not in said


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (0, 0.0),
        (3, 3.0),
        (0.25, 0.25),
        ("10us", 1e-5),
        ("250ms", 0.25),
        ("2s", 2.0),
        ("1.5 s", 1.5),
        ("5m", 300.0),
        ("1h", 3600.0),
        ("7d", 604_800.0),
    ],
)
def test_a_duration_means_its_seconds(text: object, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("5", "the text '5' has no unit"),
        ("5min", "unknown unit 'min'"),
        ("5S", "unknown unit 'S'; did you mean 's'?"),
        ("-5s", "the text '-5s' is negative"),
        (-0.5, "the number -0.5 is negative"),
        (math.nan, "the number nan is not accepted"),
        (math.inf, "the number inf is longer than a year (8760h)"),
        (-math.inf, "the number -inf is negative"),
        pytest.param(10**400, "a number of more than 30 digits is longer than a year (8760h)", id="10**400"),
        (True, "the value true is not accepted"),
        (None, "an empty value is not accepted"),
        ("inf", "the text 'inf' is not accepted"),
    ],
)
def test_a_duration_that_is_not_clear_is_refused_with_the_reason(text: object, problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_duration(text, "deadline")
    assert raised.value.problem == problem
    assert raised.value.key == "deadline"


@given(st.floats(0, LONGEST_DURATION))
@example(5e-324)
@example(0.1)
def test_a_formatted_duration_is_read_back_exactly(seconds: float) -> None:
    assert parse_duration(format_duration(seconds)) == seconds


@given(st.integers(0, 10**12))
def test_whole_microseconds_are_read_back_exactly(microseconds: int) -> None:
    assert parse_duration(format_duration(microseconds / 1e6)) == microseconds / 1e6
    assert parse_duration(f"{microseconds}us") == microseconds / 1e6


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0B"), (1023, "1023B"), (1024, "1KiB"), (57460 << 10, "56.1MiB"), (3 << 40, "3TiB"), (1.5e9, "1.4GiB")],
)
def test_a_size_for_people_to_read(size: float, text: str) -> None:
    assert rounded_size(size) == text

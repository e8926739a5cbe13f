"""Sizes and durations with units, as operators write them.

Sizes are bytes: ``MiB`` is 2**20 and ``MB`` is 10**6; a bare ``M`` is refused because half its readers mean the other
one. Durations are seconds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction

from hicache_ext.config.problems import did_you_mean, quoted, refuse, shown
from hicache_ext.errors import ConfigError

SIZE_ALLOWED = "whole bytes such as 1048576, or a size such as 512MiB, 2TiB or 1.5GB"
DURATION_ALLOWED = "seconds such as 0.25, or a duration such as 10us, 250ms, 2s, 5m, 1h or 7d"

LARGEST_SIZE = 2**63 - 1
LONGEST_DURATION = 8760 * 3600.0
"""One year: far below what timers take, far above any deadline that is meant."""

_PREFIXES = "KMGTPE"
_BINARY_UNITS = {f"{prefix}iB": 1024 ** (power + 1) for power, prefix in enumerate(_PREFIXES)}
_DECIMAL_UNITS = {f"{prefix}B": 1000 ** (power + 1) for power, prefix in enumerate(_PREFIXES)}
_SIZE_UNITS: dict[str, int] = {"B": 1, "kB": 1000, **_DECIMAL_UNITS, **_BINARY_UNITS}
_DURATION_UNITS = {
    "us": Fraction(1, 1_000_000),
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "m": Fraction(60),
    "h": Fraction(3600),
    "d": Fraction(86400),
}
_NUMBER_AND_UNIT = re.compile(r"([+-]?)([0-9]{1,30}(?:\.[0-9]{1,1100})?) ?([A-Za-z]*)", re.ASCII)


def parse_size(value: object, key: str = "") -> int:
    """Bytes for ``value``: a whole number of bytes, or a number with a unit ('512MiB', '1.5GB').

    A fraction of a byte is rounded down. Raises ``ConfigError`` naming ``key``.
    """
    if isinstance(value, str):
        size = math.floor(_number_with_unit(value, key, SIZE_ALLOWED, _size_unit))
    elif isinstance(value, int) and not isinstance(value, bool):
        size = value
        if size < 0:
            raise ConfigError(key, f"{shown(value)} is negative", SIZE_ALLOWED)
    else:
        raise refuse(value, SIZE_ALLOWED, key)
    if size > LARGEST_SIZE:
        raise ConfigError(key, f"{shown(value)} is 8EiB or more", SIZE_ALLOWED)
    return size


def format_size(size: int) -> str:
    """``size`` bytes in the largest unit that holds it exactly; ``parse_size`` gives the same number back."""
    if size:
        for units in (_BINARY_UNITS, _DECIMAL_UNITS):
            for unit, factor in reversed(units.items()):
                if size % factor == 0:
                    return f"{size // factor}{unit}"
    return f"{size}B"


def rounded_size(size: float) -> str:
    """``size`` bytes for people to read: '57.5MiB'."""
    fitting = [name for name, factor in _BINARY_UNITS.items() if size >= factor]
    if not fitting:
        return f"{size:.0f}B"
    return f"{size / _BINARY_UNITS[fitting[-1]]:.1f}".removesuffix(".0") + fitting[-1]


def parse_duration(value: object, key: str = "") -> float:
    """Seconds for ``value``: a number of seconds, or a number with a unit ('250ms', '5m').

    Raises ``ConfigError`` naming ``key``.
    """
    seconds: Fraction | float
    if isinstance(value, str):
        seconds = _number_with_unit(value, key, DURATION_ALLOWED, _duration_unit)
    elif isinstance(value, int | float) and not isinstance(value, bool) and value == value:  # NaN equals nothing
        seconds = value
        if seconds < 0:
            raise ConfigError(key, f"{shown(value)} is negative", DURATION_ALLOWED)
    else:
        raise refuse(value, DURATION_ALLOWED, key)
    if seconds > LONGEST_DURATION:
        raise ConfigError(key, f"{shown(value)} is longer than a year (8760h)", DURATION_ALLOWED)
    return float(seconds)


def format_duration(seconds: float) -> str:
    """``seconds`` in the largest unit that holds it as a whole number; ``parse_duration`` gives the same float back."""
    exact = Fraction(Decimal(repr(seconds)))
    if exact:
        for unit, factor in reversed(_DURATION_UNITS.items()):
            if (exact / factor).denominator == 1:
                return f"{exact / factor}{unit}"
    return f"{Decimal(repr(seconds)):f}s"


def _number_with_unit(
    text: str, key: str, allowed: str, factor_of: Callable[[str, str, str], int | Fraction]
) -> Fraction:
    match = _NUMBER_AND_UNIT.fullmatch(text.strip())
    if match is None:
        raise refuse(text, allowed, key)
    sign, number, unit = match.groups()
    if sign == "-":
        raise ConfigError(key, f"{shown(text)} is negative", allowed)
    if not unit:
        raise ConfigError(key, f"{shown(text)} has no unit", allowed)
    return Fraction(number) * factor_of(unit, key, allowed)


def _size_unit(unit: str, key: str, allowed: str) -> int:
    if unit in _SIZE_UNITS:
        return _SIZE_UNITS[unit]
    letter = unit[0].upper()
    if letter in _PREFIXES and unit[1:] in ("", "i", "b"):
        raise ConfigError(key, f"the unit {unit!r} is ambiguous; write {letter}B or {letter}iB", allowed)
    raise ConfigError(key, f"unknown unit {quoted(unit)}{did_you_mean(unit, _SIZE_UNITS)}", allowed)


def _duration_unit(unit: str, key: str, allowed: str) -> Fraction:
    if unit in _DURATION_UNITS:
        return _DURATION_UNITS[unit]
    if unit.lower() in ("w", "wk", "week", "weeks"):
        raise ConfigError(key, f"unknown unit {quoted(unit)}; did you mean days? A week is 7d", allowed)
    raise ConfigError(key, f"unknown unit {quoted(unit)}{did_you_mean(unit, _DURATION_UNITS)}", allowed)

"""Sizes and durations with units, as operators write them.

Sizes are bytes: ``MiB`` is 2**20 and ``MB`` is 10**6; a bare ``M`` is refused because half its readers mean the other
one. Durations are seconds.

Next come parsers for single values within limits, for the fields of every model: numbers, sizes, durations, paths.

Each is, or returns, a parser for ``schema.Allowed``: it takes the value in the file and returns the parsed one, or
raises ``ConfigError`` with an empty key; the field's ``Allowed`` ends the sentence.

Paths and addresses may have templates, so that all nodes can share one file: ``{hostname}`` is this host's name and
``{env:NAME}`` an environment variable; ``{{`` and ``}}`` are plain braces. There are no templates that differ between
ranks or starts of one server: capacity is a promise for a whole directory, and a cache that moves at every start is
never read.
"""

from __future__ import annotations

import math
import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any, TypeVar

from pydantic import BeforeValidator

from hicache_ext.config.problems import did_you_mean, quoted, refuse, shown
from hicache_ext.errors import ConfigError

SIZE_ALLOWED = "whole bytes such as 1048576, or a size such as 512MiB, 2TiB or 1.5GB"
DURATION_ALLOWED = "seconds such as 0.25, or a duration such as 10us, 250ms, 2s, 5m, 1h or 7d"

LARGEST_SIZE = 2**63 - 1
LONGEST_DURATION = 8760 * 3600.0
"""One year: far below the limits of timers, far above any sensible deadline."""

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
    """Parse ``value`` as bytes: a whole number of bytes, or a number with a unit ('512MiB', '1.5GB').

    A fraction of a byte is rounded down. Raises ``ConfigError`` naming ``key``.
    """
    if isinstance(value, float):
        raise refuse(value, SIZE_ALLOWED, key)
    return math.floor(_quantity(value, key, SIZE_ALLOWED, _SIZE_UNITS, LARGEST_SIZE, "8EiB or more"))


def format_size(size: int) -> str:
    """Format ``size`` bytes in the largest unit that holds it exactly; ``parse_size`` returns the same number."""
    if size:
        for units in (_BINARY_UNITS, _DECIMAL_UNITS):
            for unit, factor in reversed(units.items()):
                if size % factor == 0:
                    return f"{size // factor}{unit}"
    return f"{size}B"


def rounded_size(size: float) -> str:
    """Format ``size`` bytes for people, rounded: '57.5MiB'."""
    fitting = [name for name, factor in _BINARY_UNITS.items() if size >= factor]
    if not fitting:
        return f"{size:.0f}B"
    return f"{size / _BINARY_UNITS[fitting[-1]]:.1f}".removesuffix(".0") + fitting[-1]


def parse_duration(value: object, key: str = "") -> float:
    """Parse ``value`` as seconds: a number of seconds, or a number with a unit ('250ms', '5m').

    Raises ``ConfigError`` naming ``key``.
    """
    too_long = "longer than a year (8760h)"
    return float(_quantity(value, key, DURATION_ALLOWED, _DURATION_UNITS, LONGEST_DURATION, too_long))


def _quantity(
    value: object, key: str, allowed: str, units: Mapping[str, int | Fraction], most: float, too_much: str
) -> Fraction | float:
    amount: Fraction | float
    if isinstance(value, str):
        amount = _number_with_unit(value, key, allowed, units)
    elif isinstance(value, int | float) and not isinstance(value, bool) and value == value:  # NaN equals nothing
        amount = value
        if amount < 0:
            raise ConfigError(key, f"{shown(value)} is negative", allowed)
    else:
        raise refuse(value, allowed, key)
    if amount > most:
        raise ConfigError(key, f"{shown(value)} is {too_much}", allowed)
    return amount


def format_duration(seconds: float) -> str:
    """Format ``seconds`` in the largest unit that gives a whole number; ``parse_duration`` returns the same float."""
    exact = Fraction(Decimal(repr(seconds)))
    if exact:
        for unit, factor in reversed(_DURATION_UNITS.items()):
            if (exact / factor).denominator == 1:
                return f"{exact / factor}{unit}"
    return f"{Decimal(repr(seconds)):f}s"


def _number_with_unit(text: str, key: str, allowed: str, units: Mapping[str, int | Fraction]) -> Fraction:
    match = _NUMBER_AND_UNIT.fullmatch(text.strip())
    if match is None:
        raise refuse(text, allowed, key)
    sign, number, unit = match.groups()
    if sign == "-":
        raise ConfigError(key, f"{shown(text)} is negative", allowed)
    if not unit:
        raise ConfigError(key, f"{shown(text)} has no unit", allowed)
    if unit in units:
        return Fraction(number) * units[unit]
    letter = unit[0].upper()
    if units is _SIZE_UNITS and letter in _PREFIXES and unit[1:] in ("", "i", "b"):
        raise ConfigError(key, f"the unit {unit!r} is ambiguous; write {letter}B or {letter}iB", allowed)
    is_week = units is _DURATION_UNITS and unit.lower() in ("w", "wk", "week", "weeks")
    hint = "; did you mean days? A week is 7d" if is_week else ""
    raise ConfigError(key, f"unknown unit {quoted(unit)}{hint or did_you_mean(unit, units)}", allowed)


# -- parsers of fields -------------------------------------------------------------------------------------------------


TEMPLATES_ALLOWED = "{hostname}, {env:NAME}, and {{ or }} for plain braces"

_PIECE = re.compile(r"\{\{|\}\}|\{[^{}]*\}|[{}]")
_SHELL_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_][A-Za-z0-9_]*)\}|([A-Za-z_][A-Za-z0-9_]*))", re.ASCII)
_ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


def is_environment_name(name: str) -> bool:
    """Return whether ``name`` can be the name of an environment variable."""
    return _ENVIRONMENT_NAME.fullmatch(name) is not None


def expand_templates(text: str, key: str = "") -> str:
    """Replace every template in ``text`` by its value on this node. Raises ``ConfigError`` naming ``key``.

    The value of an environment variable never appears in an error.
    """
    if (shell := _SHELL_VARIABLE.search(text)) is not None:
        # Taken literally, it would create a directory of that name.
        problem = f"{quoted(shell[0])} is no template; did you mean {quoted(f'{{env:{shell[1] or shell[2]}}}')}?"
        raise ConfigError(key, problem, TEMPLATES_ALLOWED)
    return _PIECE.sub(lambda piece: _value(piece.group(), text, key), text)


def _value(piece: str, text: str, key: str) -> str:
    if piece in ("{{", "}}"):
        return piece[0]
    if piece in ("{", "}"):
        raise ConfigError(key, f"{quoted(text)} has a single {piece!r}", TEMPLATES_ALLOWED)
    name = piece[1:-1]
    if name == "hostname":
        return socket.gethostname()
    if name.startswith("env:") and is_environment_name(name[4:]):
        value = os.environ.get(name[4:], "")
        if not value:
            state = "empty" if name[4:] in os.environ else "not set"
            raise ConfigError(key, f"the environment variable {name[4:]} is {state}", "a variable with a value")
        return value
    if name in ("pid", "rank", "tp_rank"):
        reason = "a cache directory serves all ranks and starts of a server"
        raise ConfigError(key, f"the template {piece} is not offered: {reason}", TEMPLATES_ALLOWED)
    raise ConfigError(key, f"unknown template {quoted(piece)}", TEMPLATES_ALLOWED)


Value = TypeVar("Value")
Word = TypeVar("Word")
Parser = Callable[[object], Value]


def not_empty(value: object) -> object:
    """Refuse an empty value: SGLang reads the key as well, and refuses it."""
    if value is None:
        raise refuse(value)
    return value


def whole_number(least: int, most: float) -> Parser[int]:
    """Return a parser for a whole number from ``least`` to ``most`` (``math.inf`` for no limit)."""

    def parse(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise refuse(value)
        return value

    return parse


def size(least: int, most: float, *, or_none: bool = False, units: str = "") -> Parser[int]:
    """Return a parser for ``least`` to ``most`` bytes, as a whole number or with a unit; with ``or_none`` also 0.

    ``units`` replaces ``allowed`` if the unit is wrong.
    """
    return _within(parse_size, format_size, least, most, or_none, units)


def duration(least: float, most: float) -> Parser[float]:
    """Return a parser for ``least`` to ``most`` seconds, written as a number or with a unit."""
    return _within(parse_duration, format_duration, least, most, none=False)


def _within(
    read: Callable[[object], Any], written: Callable[[Any], str], least: float, most: float, none: bool, units: str = ""
) -> Parser[Any]:
    def parse(value: object) -> Any:
        try:
            amount = read(value)
        except ConfigError as error:
            raise ConfigError("", error.problem, units if "unit" in error.problem else "") from None
        if amount < least and not (none and amount == 0):
            raise ConfigError("", f"{shown(value)} is less than {written(least)}", "")
        if amount > most:
            raise ConfigError("", f"{shown(value)} is more than {written(most)}", "")
        return amount

    return parse


def or_word(word: str | None, meaning: Word, parse: Parser[Value]) -> Parser[Value | Word]:
    """Return a parser like ``parse`` that also accepts ``word`` (None: an empty value) and returns ``meaning``."""
    return lambda value: meaning if value == word else parse(value)


def or_auto(parse: Parser[Any] = lambda value: value) -> Parser[Any]:
    """Return a parser like ``parse`` that returns None for ``auto`` and an empty value."""
    return or_word(None, None, or_word("auto", None, parse))


def text(value: object) -> str:
    """Return printable text with templates expanded."""
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise refuse(value)
    return expand_templates(value)


def absolute_path(value: object) -> str:
    """Return an absolute path with templates expanded. Errors show it as written, without environment variables."""
    if not isinstance(value, str) or not value or "\0" in value:
        raise refuse(value)
    path = expand_templates(value)
    if not os.path.isabs(path):
        raise ConfigError("", f"{quoted(value)} is not an absolute path", "")
    return path


from_list = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
"""Converts a list in the file for a field that is a tuple."""


def one_or_more(parse: Callable[[object, str, Sequence[Value]], Value]) -> Parser[tuple[Value, ...]]:
    """Return a parser for one value or a list. ``parse`` takes a value as written, its key, and the values before."""

    def parse_all(value: object) -> tuple[Value, ...]:
        if not isinstance(value, list | tuple):
            return (parse(value, "", ()),)
        if not value:
            raise ConfigError("", "the list is empty", "")
        found: list[Value] = []
        for position, written in enumerate(value):
            found.append(parse(written, f"[{position}]", found))
        return tuple(found)

    return parse_all


def directory_relation(path: str, other: str) -> str:
    """Return in words how the normalised ``path`` collides with ``other``, or ""."""
    if path == other:
        return "is the same directory as"
    if path.startswith(other + "/"):
        return "is inside"
    return "contains" if other.startswith(path + "/") else ""


NO_LIMIT = math.inf

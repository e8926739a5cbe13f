"""Sanitizing for output: addresses and command lines without credentials, and foreign text without characters that a
terminal or a log would interpret."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

_LOGIN = re.compile(r"(?<=://)[^/?#@\s]*@")
_QUERY = re.compile(r"(://[^?\s]*)\?\S*")
_SECRET_OPTION = re.compile(r"--?([\w-]+[-_])?(key|token|password|secret|credentials?)([-_][\w-]+)?", re.IGNORECASE)
"""Matches --hf-token, but not --system-tokens, which is a count."""
HIDDEN = "***"
LONGEST_SHOWN = 200
"""Most characters shown of a foreign name or sentence."""


def shown_text(value: object, most: int = LONGEST_SHOWN) -> str:
    """Return untrusted ``value`` as one line of at most ``most`` characters, with unprintable characters (newlines,
    sequences that move a terminal's cursor, marks that change the text direction) escaped."""
    text = str(value)
    safe = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text[: most + 1])
    return safe if len(safe) <= most else safe[: max(0, most - 3)] + "..."


def shown_address(text: str) -> str:
    """Return ``text`` without the login and the query of an address in it."""
    return _QUERY.sub(rf"\1?{HIDDEN}", _LOGIN.sub(f"{HIDDEN}@", text))


def shown_words(words: Sequence[str]) -> Iterator[str]:
    """Yield the words of a command line, without the values of options that are named like secrets."""
    secret = False
    for word in words:
        option, equals, _ = word.partition("=")
        named = _SECRET_OPTION.fullmatch(option) is not None
        if secret and not word.startswith("--"):
            yield HIDDEN
        else:
            yield f"{option}={HIDDEN}" if named and equals else shown_address(word)
        secret = named and not equals

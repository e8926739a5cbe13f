"""What may be shown: of addresses and command lines nothing that lets anybody in, of text of others nothing that a
terminal or a log takes for more than text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

_LOGIN = re.compile(r"(?<=://)[^/?#@\s]*@")
_QUERY = re.compile(r"(://[^?\s]*)\?\S*")
_SECRET_OPTION = re.compile(r"--?([\w-]+[-_])?(key|token|password|secret|credentials?)([-_][\w-]+)?", re.IGNORECASE)
"""--hf-token, and not --system-tokens, which counts some."""
HIDDEN = "***"
LONGEST_SHOWN = 200
"""Characters of a name or a sentence of others."""


def shown_text(value: object, most: int = LONGEST_SHOWN) -> str:
    """``value``, which anybody may have written, in one line: escapes for what cannot be printed (newlines, sequences
    that move a terminal's cursor, marks that turn the direction of text), cut after ``most`` characters."""
    text = str(value)
    safe = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text[: most + 1])
    return safe if len(safe) <= most else safe[: max(0, most - 3)] + "..."


def shown_address(text: str) -> str:
    """``text`` without the login and the query of an address in it."""
    return _QUERY.sub(rf"\1?{HIDDEN}", _LOGIN.sub(f"{HIDDEN}@", text))


def shown_words(words: Sequence[str]) -> Iterator[str]:
    """The words of a command line, without the values of options that are named like secrets."""
    secret = False
    for word in words:
        option, equals, _ = word.partition("=")
        named = _SECRET_OPTION.fullmatch(option) is not None
        if secret and not word.startswith("--"):
            yield HIDDEN
        else:
            yield f"{option}={HIDDEN}" if named and equals else shown_address(word)
        secret = named and not equals

"""Findings of a store about its own health, for ``hicache-ext doctor``."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Level(enum.Enum):
    """How bad a finding is. With an ERROR the doctor's exit code is 1."""

    OK = "ok"
    """As it should be."""
    NOTE = "note"
    """Worth knowing; nothing has to be done."""
    WARNING = "warning"
    """It works, but at a cost in speed, space or safety."""
    ERROR = "error"
    """It does not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of a diagnosis: the subject, what was found, and, unless it is good, what to do. No secrets."""

    subject: str
    level: Level
    seen: str
    remedy: str = ""


def moves_of(page: str) -> Finding:
    """Return a finding on whether native code moves pages. ``page`` of the documentation has the details."""
    from hicache_ext import native  # It imports numpy, which configurations do without.

    why = native.why_not()
    if why is None:
        return Finding("pages", Level.OK, "move in native code")
    words = f"move in Python, which is slower and holds the GIL: {why}"
    return Finding("pages", Level.WARNING, words, f"{native.REMEDY}; {page}")

"""Findings of a store about its own health, for ``hicache-ext doctor``."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from hicache_ext.runtime.compiled_part import CompiledPart


class Level(enum.Enum):
    """How bad a finding is. With an ERROR the doctor's exit code is 1."""

    OK = "ok"
    """As it should be."""
    NOTE = "note"
    """Worth knowing; nothing has to be done."""
    WARNING = "warning"
    """It works, and costs something: speed, room, safety."""
    ERROR = "error"
    """It does not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of a diagnosis: the subject, what was found, and, unless it is good, what to do. No secrets."""

    subject: str
    level: Level
    seen: str
    remedy: str = ""


def moves_of(part: CompiledPart[Any], page: str) -> Finding:
    """Whether pages move in compiled code; waits until it is compiled. ``page`` of the documentation says more."""
    part.wait()
    why = part.why_not()
    if why is None:
        return Finding("pages", Level.OK, "move in compiled code")
    words = f"move in Python, which is slower and holds the GIL: {why.reason}"
    return Finding("pages", Level.WARNING, words, f"{why.remedy}; {page}")


@runtime_checkable
class Diagnosable(Protocol):
    """A store that can examine its medium: reachability, versions, clock, eviction policy, a round trip."""

    def diagnose(self) -> Sequence[Finding]:
        """Never raises; bounded by the tier's own timeouts. Called on a tool's thread, never by SGLang."""

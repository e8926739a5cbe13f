"""Findings of a store about its own health, for ``hicache-ext doctor``."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


class Level(enum.Enum):
    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of a diagnosis: the subject, what was found, and, unless it is good, what to do. No secrets."""

    subject: str
    level: Level
    seen: str
    remedy: str = ""


@runtime_checkable
class Diagnosable(Protocol):
    """A store that can examine its medium: reachability, versions, clock, eviction policy, a round trip."""

    def diagnose(self) -> Sequence[Finding]:
        """Never raises; bounded by the tier's own timeouts. Called on a tool's thread, never by SGLang."""

"""What each tenant of this process may have, at one place, so that no layer between a request and a file tier carries
anything. Whose pages are whose: tenancy.py, which is imported where there are tenants."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

DEFAULT = "default"
MOST_TENANTS = 62
"""Besides the default one: as many as the index of slabs has numbers for."""
LONGEST_NAME = 64


@dataclass(frozen=True, slots=True)
class Tenant:
    """Limits of one tenant."""

    share: float = 0.0
    """Of the slots of a file tier: what others' pages never displace."""
    lease: float = math.inf
    """Seconds of its longest lease."""


current: Any = None
"""The ``tenancy.Tenants`` in force, set by ``tenancy.put_in_force``."""


def in_force() -> Any:
    """Return the ``tenancy.Tenants`` of the process; None where none are configured: then nothing is asked or paid."""
    return current

"""The limits of each tenant of this process, in one place, so that the layers between a request and a file tier need
not pass them on. tenancy.py, imported only if there are tenants, knows the owners of pages."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

DEFAULT = "default"
MOST_TENANTS = 62
"""Most tenants besides the default one: the index of slabs has no more numbers."""
LONGEST_NAME = 64


@dataclass(frozen=True, slots=True)
class Tenant:
    """Limits of one tenant."""

    share: float = 0.0
    """Share of a file tier's slots that other tenants' pages never displace."""
    lease: float = math.inf
    """Duration of its longest lease, in seconds."""


current: Any = None
"""The ``tenancy.Tenants`` in force, set by ``tenancy.put_in_force``."""


def in_force() -> Any:
    """Return the ``tenancy.Tenants`` of the process, or None if no tenants are configured, which then cost nothing."""
    return current

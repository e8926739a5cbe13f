"""What each tenant of this process may have. ``put_in_force`` makes it that of the process, so that no layer between a
request and a file tier carries anything."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hicache_ext.storage.contract.tenancy import Tenants

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


_in_force: Tenants | None = None


def in_force() -> Tenants | None:
    """None where no tenants are configured: then nothing is asked and nothing costs anything."""
    return _in_force


def put_in_force(limits: Mapping[str, Tenant] | None) -> None:
    """From now on these are the tenants of the process; what is known of pages stays."""
    global _in_force
    if limits is None:
        _in_force = None
    elif _in_force is None:
        from hicache_ext.storage.contract.tenancy import Tenants

        _in_force = Tenants(limits)
    else:
        _in_force.limits = {DEFAULT: Tenant(), **limits}

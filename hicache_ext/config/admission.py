"""How much may be written to a tier: the keys ``write_budget``, ``dwpd`` and ``disk_size`` of every type."""

from __future__ import annotations

import re

from hicache_ext.config.problems import refuse, shown
from hicache_ext.config.units import SIZE_ALLOWED, parse_size
from hicache_ext.errors import ConfigError

BUDGET_ALLOWED = "a size per day, hour or second, such as 20TiB/day or 200MB/s"
DWPD_ALLOWED = "disk writes per day, from 0.01 to 100"
DISK_SIZE_ALLOWED = "a size of at least 1GB, such as 3.84TB"
SMALLEST_DISK = 10**9

DAY = 86400.0
_SECONDS = {"day": DAY, "d": DAY, "hour": 3600.0, "h": 3600.0, "second": 1.0, "s": 1.0}
_BUDGET = re.compile(r"(.+?) ?/ ?([a-z]+)", re.ASCII)


def parse_budget(value: object) -> float:
    """Bytes a second for '20TiB/day'. Raises ConfigError with an empty key."""
    if not isinstance(value, str):
        raise refuse(value, BUDGET_ALLOWED)
    match = _BUDGET.fullmatch(value.strip())
    if match is None:
        raise ConfigError("", f"{shown(value)} does not say in what time", BUDGET_ALLOWED)
    size, time = match.groups()
    if time not in _SECONDS:
        raise ConfigError("", f"{shown(value)} has an unknown unit of time", BUDGET_ALLOWED)
    try:
        written = parse_size(size)
    except ConfigError as error:
        raise ConfigError("", error.problem, f"{BUDGET_ALLOWED}; {SIZE_ALLOWED}") from None
    if not written:
        raise ConfigError("", "nothing could be written", BUDGET_ALLOWED)
    return written / _SECONDS[time]

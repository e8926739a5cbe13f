"""How full the servers of a Redis tier are, as they say themselves."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hicache_ext.storage.tiers.redis.node import Node
from hicache_ext.storage.tiers.redis.settings import RedisSettings


def memory_of(settings: RedisSettings, nodes: Sequence[Node]) -> dict[str, float]:
    """Gauges (contract/reports.py) of all nodes that are up, together; everything they hold counts, whoever wrote it.

    Takes at most a short call per node. Raises redis.RedisError: also where the user may not use INFO.
    """
    used = capacity = 0
    for node in nodes:
        if not node.up:
            continue
        client = settings.admin_client(node.endpoint, database=0)
        try:
            facts = client.info("memory")
        finally:
            client.close()
        used += int(facts["used_memory"])
        limit = int(facts.get("maxmemory", 0))
        # 0 is no limit: then the whole has none.
        capacity = capacity + limit if limit and capacity >= 0 else -1
    if capacity < 0:
        return {"used_bytes": float(used), "capacity_bytes": math.nan, "free_bytes": math.nan}
    return {
        "used_bytes": float(used),
        "capacity_bytes": float(capacity),
        "free_bytes": float(max(0, capacity - used)),
    }

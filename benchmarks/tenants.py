"""What a crawler costs another tenant, through the file tier's index: ``python -m benchmarks.tenants``.

A team has conversations that grow turn by turn; a crawler scans ten times as many pages, each once. Printed is the
share of the team's page uses that are served: alone in a tier of its share, beside the crawler with shares and without,
and beside an idle crawler, whose share it is lent.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks import replay_trace
from hicache_ext.storage.tiers.file.slab.index import SlabIndex

TEAM, CRAWLER = "team", "crawler"
_TIMES = 10
_CRAWLED = 1 << 40
"""Blocks from here on are the crawler's."""


def mixed(team: Sequence[Sequence[int]], *, times: int = _TIMES) -> tuple[list[Sequence[int]], list[str]]:
    """The team's requests, and behind each of them those of a crawler with so many times its pages; whose each is."""
    requests: list[Sequence[int]] = []
    whose: list[str] = []
    crawled = _CRAWLED
    for request in team:
        requests.append(request)
        whose.append(TEAM)
        for _ in range(times):
            requests.append(range(crawled, crawled + len(request)))
            whose.append(CRAWLER)
            crawled += len(request)
    return requests, whose


def served(
    requests: Sequence[Sequence[int]],
    whose: Sequence[str],
    capacity: int,
    shares: dict[str, float] | None,
) -> float:
    """The share of the team's uses that a tier with so many slots serves."""

    def tenancies(index: SlabIndex) -> Iterator[np.ndarray | None]:
        if shares is None:
            yield from [None] * len(whose)
            return
        numbers = index.number_tenants([TEAM, CRAWLER])
        parts = {numbers[name]: share for name, share in shares.items()}
        for name in whose:
            yield index.tenancy(parts, numbers[name])

    hits = replay_trace.served_by_the_index(requests, capacity, tenancies=tenancies)
    of_team = [(some, len(request)) for some, request, name in zip(hits, requests, whose, strict=True) if name == TEAM]
    return sum(some for some, _ in of_team) / sum(uses for _, uses in of_team)


def figures(count: int, capacity: int, share: float = 0.5) -> dict[str, float]:
    """By case: the share of the team's uses that are served."""
    team = replay_trace.multi_turn(count, 1)
    requests, whose = mixed(team)
    shares = {TEAM: share, CRAWLER: 1 - share}
    return {
        "alone in its share": served(team, [TEAM] * len(team), int(share * capacity), None),
        "with shares": served(requests, whose, capacity, shares),
        "without": served(requests, whose, capacity, None),
        "lent the rest": served(team, [TEAM] * len(team), capacity, shares),
        "alone in all": served(team, [TEAM] * len(team), capacity, None),
    }


def main() -> int:
    print("slots   " + "".join(f"{name:>20s}" for name in figures(20, 128)))
    for capacity in (1_000, 4_000):
        print(f"{capacity:6d}  " + "".join(f"{part:20.3f}" for part in figures(1_000, capacity).values()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

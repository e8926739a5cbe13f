"""``hicache-ext curve URL``: what share of page uses a tier serves, and would serve at other capacities.

The tier knows from miniature caches of a sample of its pages (docs/file-tier.md); this draws what its metrics say.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping

from hicache_ext.cli.stats_command import fetch, metrics_url
from hicache_ext.cli.stats_figures import Samples, figures
from hicache_ext.cli.usage import describe, show
from hicache_ext.config import rounded_size
from hicache_ext.storage.serving.metrics_export import PREFIX

_WIDTH = 50
"""Characters of a bar for all uses."""
_TIMES = {"half": 0.5, "capacity": 1.0, "twice": 2.0, "four_times": 4.0}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="the server, e.g. http://127.0.0.1:30000")
    describe(
        parser,
        run=run,
        examples=["hicache-ext curve http://127.0.0.1:30000"],
        problem="the server cannot be read, or no tier of it knows",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print a bar for each capacity of each tier that knows; 1 where none does."""
    samples = fetch(metrics_url(arguments.url))
    curves = {tier["tier"]: tier["hit_share_at"] for tier in figures(None, samples)["tiers"] if tier["hit_share_at"]}
    tiers = [
        {"tier": tier, "capacity_bytes": _capacity(samples, tier), "hit_share_at": shares}
        for tier, shares in curves.items()
    ]
    lines = [line for tier, shares in curves.items() for line in picture(tier, _capacity(samples, tier), shares)]
    show(arguments, {"tiers": tiers}, lines or ["No tier knows yet: a file tier in slabs that was written to does."])
    return 0 if tiers else 1


def picture(tier: str, capacity: float | None, shares: Mapping[str, float]) -> Iterator[str]:
    """A title, and a line with a bar for each capacity."""
    yield f"{tier}: share of page uses served, by capacity"
    for at, share in shares.items():
        times = _TIMES[at]
        size = f"{times:g} times" if capacity is None else rounded_size(int(times * capacity))
        bar = "#" * round(_WIDTH * share)
        yield f"{size:>10} {100 * share:5.1f} % |{bar:<{_WIDTH}}|{' now' if times == 1 else ''}"


def _capacity(samples: Samples, tier: str) -> float | None:
    known = [size for size in samples.each(f"{PREFIX}capacity_bytes", tier=tier) if not math.isnan(size) and size > 0]
    return max(known, default=None)

"""The long form of tests/storage/guards/test_schedules.py: thousands of schedules of calls and faults.

    python -m tests.campaigns.guard_schedules --schedules 4000 --seed 1 --report build/reports/guards.md

Hypothesis makes the schedules from the seed; the first one that breaks a promise is shrunk, printed, and ends the run.
"""

from __future__ import annotations

import argparse
import logging
import platform
import time
from collections import Counter
from pathlib import Path

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.campaigns.reporting import publish
from tests.storage.guards.schedules import TiersMachine

_BATCH = 100
"""Schedules between two lines of progress."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=4000)
    parser.add_argument("--steps", type=int, default=30, help="calls and faults of one schedule, at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", type=Path)
    arguments = parser.parse_args()

    logging.getLogger("hicache_ext").setLevel(logging.CRITICAL)  # tiers come and go here all the time
    seen: Counter[str] = Counter()
    profile = settings(
        max_examples=_BATCH,
        stateful_step_count=arguments.steps,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    begun = time.monotonic()
    for batch in range(-(-arguments.schedules // _BATCH)):

        @seed(arguments.seed * 1_000_003 + batch)
        class Machine(TiersMachine):
            counts = seen

        run_state_machine_as_test(Machine, settings=profile)
        print(f"{seen['schedules']} schedules, {time.monotonic() - begun:.0f} s, no problem", flush=True)
    publish(_report(arguments, seen, time.monotonic() - begun), arguments.report)
    return 0


def _report(arguments: argparse.Namespace, seen: Counter[str], seconds: float) -> str:
    rows = "\n".join(f"| {what} | {amount} |" for what, amount in sorted(seen.items()) if what != "schedules")
    what = f"{seen['schedules']} schedules of up to {arguments.steps} calls and faults (seed {arguments.seed})"
    return f"""# Tiers and guards under random faults

`make guards-campaign`: {what}
over two tiers, in {seconds:.0f} s, Python {platform.python_version()}. Each schedule draws whether there are guards
(three times in four), which of them are written in the background, and whether pages are promoted and fetched ahead. No
promise was broken: every HIT held bytes that had been written under its key, behind a deadline no page that was not a
HIT was touched, no host page changed after its call had returned, nothing past a gap was promoted, what was removed or
cleared without a fault was gone, what was stored was read again once the faults had ended, and no thread and no bounce
memory was left after close().

| what was met | times |
|---|---|
{rows}
"""


if __name__ == "__main__":
    raise SystemExit(main())

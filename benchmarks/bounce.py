"""What a deadline costs the file tier: reads and writes straight into host pages against a copy through bounce memory.

    python benchmarks/bounce.py --directory /mnt/nvme0/scratch --json bounce.json

One process, one batch of pages after the other, the two ways interleaved, medians; beside them what a healthy look-up
costs. The guards of a local file tier are off by default because of these figures (docs/guards.md).
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from hicache_ext.bench.frame import machine_facts, today, write_json
from hicache_ext.cli.main import without_traceback
from hicache_ext.config import format_size, parse_size
from hicache_ext.storage.contract.store import GetResult, PageBatch, PageStore
from hicache_ext.storage.guards.pipeline import GuardedStore, GuardPlan
from hicache_ext.storage.tiers.file.pages.store import PageFileStore

_PAGES = 64
_SEGMENTS = 2
_PLAN = GuardPlan(timeout=60.0, bounce_memory=256 << 20)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=None, help="where to measure; a temporary one if left out")
    parser.add_argument("--sizes", nargs="+", default=["32KiB", "128KiB", "1MiB"], help="of a page")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    rows = []
    for text in arguments.sizes:
        directory = Path(tempfile.mkdtemp(prefix="hicache-bounce-", dir=arguments.directory))
        try:
            rows.append(_measure(directory, parse_size(text), arguments.rounds))
        finally:
            shutil.rmtree(directory, ignore_errors=True)
    print(f"{'page':>8} {'':>6} {'direct GB/s':>12} {'bounced GB/s':>13} {'ratio':>6}")
    for row in rows:
        for call in ("read", "write"):
            direct, bounced = row[f"{call}_direct"], row[f"{call}_bounced"]
            print(f"{row['page']:>8} {call:>6} {direct:12.2f} {bounced:13.2f} {bounced / direct:6.2f}")
        print(f"{row['page']:>8} exists {row['exists_direct']:9.1f} us {row['exists_bounced']:10.1f} us")
    if arguments.json:
        machine = machine_facts(arguments.directory or Path(tempfile.gettempdir()))
        write_json(arguments.json, {"benchmark": "bounce", "date": today(), "machine": machine, "rows": rows})
    return 0


def _measure(directory: Path, size: int, rounds: int) -> dict[str, float | str]:
    memory = memoryview(bytearray(size * _PAGES))
    memory[:] = b"\x5a" * len(memory)
    step = size // _SEGMENTS
    buffers = [
        [memory[page * size + part * step : page * size + (part + 1) * step] for part in range(_SEGMENTS)]
        for page in range(_PAGES)
    ]
    stores: dict[str, PageStore] = {
        "direct": PageFileStore("direct", directory / "direct", capacity=None),
        "bounced": GuardedStore(PageFileStore("bounced", directory / "bounced", capacity=None), _PLAN),
    }
    seconds: dict[str, list[float]] = {}
    keys = [number.to_bytes(48, "big") for number in range(1, _PAGES + 1)]
    batch = PageBatch(keys, buffers)

    def timed(name: str, work: Callable[[], object]) -> None:
        begun = time.perf_counter()
        work()
        seconds.setdefault(name, []).append(time.perf_counter() - begun)

    for turn in range(rounds + 1):
        for name, store in sorted(stores.items(), reverse=bool(turn % 2)):
            store.remove(keys)
            timed(f"write_{name}", lambda store=store: store.set(batch))
            assert store.get(batch) == [GetResult.HIT] * _PAGES
            timed(f"read_{name}", lambda store=store: store.get(batch))
            timed(f"exists_{name}", lambda store=store: store.count_leading(keys[:1]))
    for store in stores.values():
        store.close()
    row: dict[str, float | str] = {"page": format_size(size)}
    for name, all_seconds in seconds.items():
        median = statistics.median(all_seconds[1:])  # the first touch of the memory is another thing
        row[name] = median * 1e6 if name.startswith("exists") else size * _PAGES / median / 1e9
    return row


if __name__ == "__main__":
    sys.exit(without_traceback(main))

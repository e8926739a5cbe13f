"""What eviction of whole packs costs in hits: an LRU cache of pages against one of packs, on a trace of requests.

python -m benchmarks.packs_on_a_trace TRACE.jsonl

A request asks for the blocks of its prompt in order, and is served by the leading run of them that is there. The blocks
that are missing are then written, as packs of neighbours. A use of one block renews its pack.
"""

from __future__ import annotations

import argparse
import sys
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.replay_trace import read_trace

_CAPACITIES = (1_000, 3_000, 10_000, 30_000, 100_000)
_PACKS = (1, 3, 6, 24)


def share_of_hits(requests: Sequence[Sequence[int]], capacity: int, most: int) -> float:
    """The share of block uses that a cache of ``capacity`` blocks serves, with up to ``most`` blocks in a pack."""
    packs: OrderedDict[int, list[int]] = OrderedDict()
    """The one not used for longest first."""
    pack_of: dict[int, int] = {}
    stored = hits = uses = number = 0
    for blocks in requests:
        uses += len(blocks)
        leading = next((n for n, block in enumerate(blocks) if block not in pack_of), len(blocks))
        hits += leading
        for block in blocks:
            if block in pack_of:
                packs.move_to_end(pack_of[block])
        missing = list(dict.fromkeys(block for block in blocks if block not in pack_of))
        for begin in range(0, len(missing), most):
            number += 1
            packs[number] = missing[begin : begin + most]
            stored += len(packs[number])
            for block in packs[number]:
                pack_of[block] = number
        while stored > capacity:
            _, gone = packs.popitem(last=False)
            stored -= len(gone)
            for block in gone:
                del pack_of[block]
    return hits / uses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="lines of JSON with hash_ids, the blocks of a prompt")
    trace: Path = parser.parse_args().trace
    requests = read_trace(trace)
    print("| capacity, blocks |" + "".join(f" {most} in a pack |" for most in _PACKS))
    print("|---|" + "---|" * len(_PACKS))
    for capacity in _CAPACITIES:
        shares = [share_of_hits(requests, capacity, most) for most in _PACKS]
        print(f"| {capacity:,} |" + "".join(f" {share:.4f} |" for share in shares))


if __name__ == "__main__":
    main()

"""Mooncake, Redis and object tiers against their engines' own best clients, on servers started for the run.

    python -m benchmarks.bench_pool --engine redis --markdown FILE.md

Every contender moves the same pages between host memory of this process and a server that is another process. Ours is
the tier, opened from its configuration; the others are the engine's own client, used in the fastest way it offers, with
nothing around it: no envelope, no checksum, and no copy into host memory where the client has a buffer of its own.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.rivals.mooncake import mooncake_servers
from benchmarks.rivals.object import object_stores
from benchmarks.rivals.redis import redis_servers
from hicache_ext.bench.pool import Engine, add_measuring_arguments, compare
from hicache_ext.cli.main import without_traceback
from hicache_ext.runtime.results import standard_output_of

ENGINES = {"mooncake": mooncake_servers, "redis": redis_servers, "object": object_stores}
_METHOD = """\
Client and server share the machine's CPUs and talk over loopback. The engines' own clients do without header and
checksum, and without the copy into host memory where they receive into buffers of their own; redis-py sends from
memoryviews, without a copy. Bare sockets send the bytes of the requests and look at nothing, on as many connections as
our tier: what the server itself can do. Raw Mooncake through memory of its own moves a page as one buffer and copies it
once, as our tier does. The ratio is to the best of the engine's own clients at that point, and to neither of these two.
"""


def engines(names: Sequence[str]) -> list[Engine]:
    return [ENGINES[name]() for name in names]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", action="append", choices=tuple(ENGINES), help="may be repeated (default: all)")
    add_measuring_arguments(parser)
    arguments = parser.parse_args(words)
    with standard_output_of(arguments):
        return compare(arguments, engines(arguments.engine or tuple(ENGINES)), _METHOD)


if __name__ == "__main__":
    sys.exit(without_traceback(main))

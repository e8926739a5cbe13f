"""Mooncake, Redis or object tiers against their engine's own best clients, on a server started for the run.

    python -m benchmarks.bench_pool --engine redis --json FILE

Every contender moves the same pages between host memory of this process and a server that is another process. Ours is
the tier, opened from its configuration; the others are the engine's own client, used in the fastest way it offers, with
nothing around it: no envelope, no checksum, and no copy into host memory where the client has a buffer of its own.
Bare sockets send the bytes of the requests and look at nothing, on as many connections as our tier: what the server
itself can do. Raw Mooncake through memory of its own copies a page once, as our tier does. The ratio is to the best of
the engine's own clients, and to neither of these two.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.rivals import Engine
from benchmarks.rivals.mooncake import mooncake_servers
from benchmarks.rivals.object import object_stores
from benchmarks.rivals.redis import redis_server
from hicache_ext.bench.frame import fresh_directory
from hicache_ext.bench.pool import add_arguments, compare
from hicache_ext.cli.main import without_traceback
from hicache_ext.runtime.commands import standard_output_of, terminated_in_order

ENGINES: dict[str, Engine] = {"mooncake": mooncake_servers, "redis": redis_server, "object": object_stores}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=tuple(ENGINES), required=True)
    add_arguments(parser)
    arguments = parser.parse_args(words)
    with (
        standard_output_of(arguments),
        terminated_in_order(),
        fresh_directory(Path(tempfile.gettempdir())) as directory,
        ENGINES[arguments.engine](directory) as (contenders, own_clients),
    ):
        return compare(arguments, arguments.engine, contenders, tuple(own_clients))


if __name__ == "__main__":
    sys.exit(without_traceback(main))

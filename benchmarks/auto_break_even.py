"""Where ``codec: auto`` begins to encode, and where it should: a sweep of link speeds.

    python -m benchmarks.auto_break_even kv.npy --dtype float8_e4m3fn --threads 1

A Redis server is on the other side of a cable that the kernel makes as narrow as asked (tests/rigs/network_link.py;
needs root). At each speed the same pages are written and read by three tiers, in turns: ``auto`` that never encodes
(plain), ``lossless``, and ``auto``. Printed are medians, how many times its cost encoding gains as ``auto`` takes it
(it encodes above 1), and the two speeds at which nothing is gained: as measured, and as ``auto`` takes it.

``kv.npy``: see bench_codec.py.
"""

from __future__ import annotations

import argparse
import math
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench_codec import DTYPES, pages_of
from hicache_ext import native
from hicache_ext.config import ExtraConfig, load_config
from hicache_ext.page.transforms.codec import Codec, Paying
from hicache_ext.storage.contract.abilities import ability
from hicache_ext.storage.contract.registry import open_tier
from hicache_ext.storage.contract.store import GetResult, PageBatch, PageStore, SetResult
from hicache_ext.storage.contract.transforming.store import TransformedStore
from hicache_ext.testing.server import free_port
from tests.rigs.network_link import Link
from tests.rigs.own_network import own_network
from tests.rigs.redis_servers import redis_program

_WARM = 6
"""Rounds that are not counted: ``auto`` learns from them."""


class _Never(Paying):
    """``auto`` that encodes nothing: it looks for pages in every form, as ``auto`` does."""

    def seconds_per_byte(self) -> None:
        return None


class Arm:
    """One tier with its codec, over the same server."""

    def __init__(self, name: str, store: PageStore, codec: Any, contents: Sequence[bytes], dtype: str) -> None:
        self.name = name
        self.codec = codec
        self.store = TransformedStore(store, codec, None)
        self._identity = os.urandom(16)
        # Two segments, as keys and values have.
        half = len(contents[0]) // 2
        self._sources = [[memoryview(bytearray(part)) for part in (one[:half], one[half:])] for one in contents]
        self._targets = [[memoryview(bytearray(half)) for _ in range(2)] for _ in contents]
        pool = {"name": "kv", "dtype": dtype, "segments": [half, half]}
        self.store.register_identity(self._identity, {"pool": pool})

    def round(self) -> float:
        """Seconds of writing all pages once and reading them once."""
        keys = [self._identity + os.urandom(32) for _ in self._sources]
        began = time.perf_counter()
        written = self.store.set(PageBatch(keys, self._sources))
        read = self.store.get(PageBatch(keys, self._targets))
        seconds = time.perf_counter() - began
        assert set(written) == {SetResult.STORED} and set(read) == {GetResult.HIT}, (self.name, written, read)
        assert self._targets == self._sources
        self.store.remove(keys)
        return seconds

    def gain(self) -> float:
        """Of ``auto``: what encoding gains, in parts of what it costs, as the codec takes it now."""
        store = ability(self.store, TransformedStore)
        assert store is not None
        pages: Any = store.forms(self._identity)[-1].codec
        measured, paying = pages.measured, self.codec.paying
        return float(measured.saved * paying.seconds_per_byte() * paying.threads / measured.seconds)


def break_even(speeds: Sequence[float], gains: Sequence[float]) -> float | None:
    """The speed at which the gain is 1, on the line between the logarithms of two neighbours."""
    for (slow, gained), (fast, less) in pairwise(zip(speeds, gains, strict=True)):
        if gained >= 1 > less:
            share = math.log(gained) / (math.log(gained) - math.log(less))
            return slow * (fast / slow) ** share
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--dtype", default="float8_e4m3fn", choices=list(DTYPES))
    parser.add_argument("--pages", type=int, default=17)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="that encode at once")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--speeds", type=float, nargs="+", default=[100, 200, 300, 400, 600, 800, 1200], help="MB/s")
    given = parser.parse_args()
    # Before anything counts processors.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: given.threads])
    native.needed()
    contents = pages_of(given.file, 64, "page_first", given.dtype)[: given.pages]
    program = redis_program()
    assert program is not None, "redis-server is not installed"
    with own_network(), Link() as link:
        port = free_port()
        listens = ("--bind", link.there, "--port", str(port), "--protected-mode", "no")
        server = subprocess.Popen(
            [*link.command_prefix, program, *listens, "--save", "", "--appendonly", "no"], stdout=subprocess.DEVNULL
        )
        try:
            _wait_for(link.there, port)
            _sweep(given, link, f"redis://{link.there}:{port}", contents)
        finally:
            server.terminate()
            server.wait()


def _sweep(given: argparse.Namespace, link: Link, url: str, contents: Sequence[bytes]) -> None:
    size = len(contents[0])
    print(f"{len(contents)} pages of {size:,} bytes, {given.dtype}, {given.threads} threads\n")
    print("| link, MB/s | plain, MB/s | lossless, MB/s | auto, MB/s | measured gain | gain as auto takes it |")
    print("|---|---|---|---|---|---|")
    plain_speeds, real, taken = [], [], []
    for speed in sorted(given.speeds):
        link.rate = speed * 1e6
        link.narrow()
        arms = [_arm(name, url, codec, contents, given.dtype) for name, codec in _codecs()]
        try:
            rounds = {arm.name: [arm.round() for _ in range(_WARM)][:0] for arm in arms}
            for _ in range(given.rounds):
                for arm in arms:
                    rounds[arm.name].append(arm.round())
            seconds = {name: statistics.median(times) for name, times in rounds.items()}
            gain = arms[-1].gain()
        finally:
            for arm in arms:
                arm.store.close()
        moved = {name: 2 * size * len(contents) / each / 1e6 for name, each in seconds.items()}
        plain_speeds.append(moved["plain"])
        real.append(seconds["plain"] / seconds["lossless"])
        taken.append(gain)
        rates = " | ".join(f"{moved[name]:.0f}" for name in ("plain", "lossless", "auto"))
        print(f"| {speed:.0f} | {rates} | {real[-1]:.3f} | {gain:.2f} |", flush=True)
    should, does = break_even(plain_speeds, real), break_even(plain_speeds, taken)
    if should is None or does is None:
        print("\nnot every line crosses 1: choose other --speeds")
        return
    print(
        f"\nbreak-even at {should:.0f} MB/s of the plain tier as measured, at {does:.0f} as auto takes it: "
        f"{100 * (does / should - 1):+.0f} %"
    )


def _wait_for(host: str, port: int) -> None:
    deadline = time.monotonic() + 10
    while True:
        try:
            socket.create_connection((host, port), 1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _codecs() -> list[tuple[str, Any]]:
    ways: dict[str, Paying | None] = {"plain": _Never(), "lossless": None, "auto": Paying()}
    return [(name, Codec("lossless", paying)) for name, paying in ways.items()]


def _arm(name: str, url: str, codec: Any, contents: Sequence[bytes], dtype: str) -> Arm:
    tier = {"type": "redis", "url": url, "timeout": "30s"}
    config = load_config(ExtraConfig.around({"tiers": {name: tier}})).tiers[name]
    return Arm(name, open_tier(name, config), codec, contents, dtype)


if __name__ == "__main__":
    main()

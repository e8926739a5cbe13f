#!/usr/bin/env python3
"""What a change costs or saves: tiers and copy plans of this checkout against those of another one, in one run.

    python benchmarks/against.py ../before --markdown FILE

Both checkouts do the same calls in turns, on the same file system and the same servers, through the names that stay
(``load_config``, ``open_tiers``, ``PageBatch``). A round's figure is the lower quartile of its calls: on a machine with
other work the upper half measures that work. Copy plans are made and submitted to a driver that does nothing
(benchmarks/kernels/submit.py of each checkout), so that what is timed is the scheduler's thread.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# A script: its directory is on the path, whichever checkout's package is measured.
from checkouts import HERE, Checkout, in_turns, let_code_compile, roots, serve

BATCH_BYTES = 16 << 20
"""A call moves 128 pages, or as many as make so many bytes."""
CHAIN = 10_000
"""Pages of one ``exists``."""
CALLS = 12
"""Of each kind in a round."""


@dataclass(frozen=True, slots=True)
class Tier:
    """One tier to measure, as the configuration has it, with pages of one size."""

    name: str
    payload: int
    tier: dict[str, Any]
    exists: int = CHAIN


class _Store:
    """The tier of one checkout, and its calls."""

    def __init__(self, wanted: dict[str, Any]) -> None:
        from hicache_ext.config import load_config
        from hicache_ext.storage.opening import open_tiers

        self._payload = wanted["payload"]
        self._count = max(1, min(128, BATCH_BYTES // self._payload))
        # One identity for each process: checkouts share servers.
        self._identity = os.urandom(16)
        self._written = 0
        source = bytearray(os.urandom(self._payload)) * self._count
        self._sources = self._segments(source)
        self._received = bytearray(len(source))
        self._targets = self._segments(self._received)
        document = {
            "backend_name": "hicache_ext",
            "module_path": "hicache_ext.storage.backend",
            "class_name": "HiCacheExtBackend",
            "interface_v1": 1,
            "hicache_ext": {"tiers": {"tier": wanted["tier"]}},
        }
        self._store = open_tiers(load_config(document))
        let_code_compile()
        self._kept = self._new_keys(self._count)
        self._put(self._kept)
        self._read()
        assert self._received == source, "what was read is not what was written"
        self._chain = self._kept
        while len(self._chain) < wanted["exists"] and len(self._chain) * self._payload < 1 << 29:
            more = self._new_keys(self._count)
            self._put(more)
            self._chain = [*self._chain, *more]

    def seconds(self, call: str) -> float:
        """The lower quartile of some calls, per page."""
        calls: dict[str, Callable[[], float]] = {"write": self._write, "read": self._read, "exists": self._exists}
        return statistics.quantiles([calls[call]() for _ in range(CALLS)])[0]

    def close(self) -> None:
        self._store.close()

    def _segments(self, memory: bytearray) -> list[tuple[memoryview]]:
        whole = memoryview(memory)
        return [(whole[n * self._payload : (n + 1) * self._payload],) for n in range(self._count)]

    def _new_keys(self, count: int) -> list[bytes]:
        self._written += count
        return [self._identity + n.to_bytes(32, "little") for n in range(self._written - count, self._written)]

    def _put(self, keys: list[bytes]) -> float:
        from hicache_ext.storage.store import PageBatch, SetResult

        batch = PageBatch(keys, self._sources)
        started = time.perf_counter()
        results = self._store.set(batch)
        seconds = time.perf_counter() - started
        assert all(result is SetResult.STORED for result in results), results
        return seconds / len(keys)

    def _write(self) -> float:
        """Always new pages; those of a tier without a capacity are taken away again, untimed."""
        keys = self._new_keys(self._count)
        seconds = self._put(keys)
        self._store.remove(keys)
        return seconds

    def _read(self) -> float:
        from hicache_ext.storage.store import GetResult, PageBatch

        batch = PageBatch(self._kept, self._targets)
        started = time.perf_counter()
        results = self._store.get(batch)
        seconds = time.perf_counter() - started
        assert all(result is GetResult.HIT for result in results), results
        return seconds / len(self._kept)

    def _exists(self) -> float:
        started = time.perf_counter()
        found = self._store.count_leading(self._chain)
        seconds = time.perf_counter() - started
        assert found == len(self._chain), found
        return seconds / len(self._chain)


def _serve() -> None:
    stores: list[_Store] = []

    def answer(question: Any) -> Any:
        if "open" in question:
            stores.append(_Store(question["open"]))
            return None
        if "close" in question:
            stores.pop().close()
            return None
        if "submit" in question:
            return _submit(question["submit"])
        return stores[-1].seconds(question["call"])

    serve(answer)


_LAYOUTS = ("page_first_direct", "layer_first", "page_first")


def _submit(layout: str) -> dict[str, float]:
    # That of the checkout that this process measures: the engines' names are not the same in all.
    specification = importlib.util.spec_from_file_location("submit", Path.cwd() / "benchmarks/kernels/submit.py")
    assert specification is not None and specification.loader is not None
    submit = sys.modules["submit"] = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(submit)
    costs = submit.measure(submit.SubmitCase(layout), 20)[:2]
    return {
        f"{cost.engine}, {what}": getattr(cost, f"{what.replace(' ', '_')}_us") * 1e-6
        for cost in costs
        for what in ("plan", "layers", "write back")
    }


def _tiers(stack: ExitStack, place: Path) -> list[Tier]:
    sys.path.insert(0, str(HERE))
    from tests.rigs.redis_servers import RedisServer, redis_program
    from tests.rigs.s3_server import S3Server, missing_s3_server

    file = {"type": "file", "path": "DIRECTORY", "capacity": "1GiB", "threads": 4}
    tiers = [
        *[
            Tier(f"file, slab, {size >> 10} KiB", size, {**file, "layout": "slab"})
            for size in (1 << 15, 1 << 17, 1 << 20)
        ],
        Tier("file, pages, 1024 KiB", 1 << 20, {**file, "layout": "pages"}),
    ]
    if redis_program() is None:
        print("missing: redis-server", file=sys.stderr)
    else:
        redis = stack.enter_context(RedisServer(place / "redis"))
        tiers += [
            Tier(f"redis, {size >> 10} KiB", size, {"type": "redis", "url": redis.url}, 1000)
            for size in (1 << 15, 1 << 17, 1 << 20)
        ]
    if problem := missing_s3_server():
        print(f"missing: {problem}", file=sys.stderr)
    else:
        s3 = stack.enter_context(S3Server(place / "s3"))
        os.environ.update(s3.environment())
        tiers.append(Tier("object, 1024 KiB", 1 << 20, s3.tier("against"), 16))
    return tiers


def _rows(checkouts: dict[str, Checkout], tiers: list[Tier], layouts: list[str], place: Path, rounds: int) -> Any:
    for tier in tiers:
        for name, checkout in checkouts.items():
            directory = place / f"{name}-{tier.payload}-{tier.tier.get('layout', '')}"
            configured = {key: str(directory) if value == "DIRECTORY" else value for key, value in tier.tier.items()}
            checkout.ask({"open": {"payload": tier.payload, "tier": configured, "exists": tier.exists}})
        for call in ("write", "read", "exists"):
            in_turns(checkouts, {"call": call}, 1)  # warm
            yield f"{tier.name}: {call}", in_turns(checkouts, {"call": call}, rounds)
        for name, checkout in checkouts.items():
            checkout.ask({"close": True})
            shutil.rmtree(place / f"{name}-{tier.payload}-{tier.tier.get('layout', '')}", ignore_errors=True)
    for layout in layouts:
        answers = in_turns(checkouts, {"submit": layout}, max(3, rounds // 4))
        for what in sorted(set.intersection(*(set(found[0]) for found in answers.values()))):
            times = {name: [answer[what] for answer in found] for name, found in answers.items()}
            # A Python loop plans nothing, and writes nothing back.
            if all(seconds > 0 for found in times.values() for seconds in found):
                yield f"{layout}: {what}", times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, nargs="?", help="the other one; left out: this one against itself")
    parser.add_argument("--rounds", type=int, default=20, help=f"of {CALLS} calls each, in turns (default: 20)")
    parser.add_argument("--directory", type=Path, help="on the file system to use")
    parser.add_argument(
        "--only", action="append", help="tiers and layouts of copies whose name contains this; may be repeated"
    )
    parser.add_argument("--markdown", type=Path, help="write the table there, too")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        _serve()
        return
    place = Path(tempfile.mkdtemp(prefix="hicache-against-", dir=arguments.directory))
    lines = []
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, place, ignore_errors=True)
        chosen = arguments.only or [""]
        tiers = [tier for tier in _tiers(stack, place) if any(word in tier.name for word in chosen)]
        layouts = [name for name in _LAYOUTS if any(word in name for word in chosen)]
        checked_out = roots(arguments.checkout or HERE)
        checkouts = {name: Checkout(root, __file__, ["--serve"]) for name, root in checked_out.items()}
        for checkout in checkouts.values():
            stack.callback(checkout.close)
        lines += [
            f"| what | {' | '.join(f'{name}, us' for name in checkouts)} | ratio | quartiles |",
            "|---|--:|--:|--:|---|",
        ]
        print("\n".join(lines), flush=True)
        for what, times in _rows(checkouts, tiers, layouts, place, arguments.rounds):
            base, ours = times.values()
            lower, median, upper = statistics.quantiles([b / a for a, b in zip(base, ours, strict=True)])
            cells = " | ".join(f"{statistics.median(found) * 1e6:,.2f}" for found in times.values())
            lines.append(f"| {what} | {cells} | {median:.2f} | {lower:.2f} to {upper:.2f} |")
            print(lines[-1], flush=True)
    if arguments.markdown is not None:
        arguments.markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

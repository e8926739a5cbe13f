#!/usr/bin/env python3
"""``batch_exists`` of one long chain over three tiers, and how long other threads stand still meanwhile.

Each tier (slabs, page files, Redis) has a third of the chain, in stripes of 128 pages: what a conversation leaves that
was written through tiers in turns. Measured is the call as SGLang makes it, the whole chain at once. A thread beside it
sleeps half a millisecond at a time; what it oversleeps is how long the interpreter was not to be had, which on a server
is SGLang's scheduler. Also measured: each tier by itself, asked for the third that it has.

With ``--against PATH`` another checkout takes turns with this one, round by round, over the same server:
``python benchmarks/look_ups.py --against ../before --markdown FILE``.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

# A script: its directory is on the path, whichever checkout's package is measured.
from checkouts import HERE, Checkout, in_turns, let_code_compile, open_backend, roots, serve

CHAIN = 10_000
BATCH = 128
TIERS = ("slab", "pages", "redis")
_CALLS_A_ROUND = 10
_SLEEP = 0.0005


def _tiers(place: Path, port: int, prefix: str) -> dict[str, dict[str, Any]]:
    return {
        "slab": {"type": "file", "path": str(place / "slab"), "capacity": "256MiB", "layout": "slab"},
        "pages": {"type": "file", "path": str(place / "pages"), "capacity": "256MiB", "layout": "pages"},
        "redis": {"type": "redis", "url": f"redis://127.0.0.1:{port}", "prefix": prefix},
    }


class _Server:
    """Backends of one checkout as SGLang makes them."""

    def __init__(self, place: Path, port: int) -> None:
        from hicache_ext.testing.sglang_cpu import prepare_process

        prepare_process()
        import torch

        from hicache_ext.testing.host_pools import mha_pools, page_indices

        torch.set_num_threads(1)
        self._pools = mha_pools(page_size=16, pages=BATCH, layers=1, heads=1, head_dim=16)
        self._indices = page_indices(16, list(range(BATCH)))
        self._keys = [f"{number * 0x9E3779B97F4A7C15 % (1 << 64):016x}" * 4 for number in range(1, CHAIN + 1)]
        tiers = _tiers(place, port, place.name)
        stripes = [self._keys[first : first + BATCH] for first in range(0, CHAIN, BATCH)]
        self._parts: dict[str, list[str]] = {}
        for number, name in enumerate(TIERS):
            backend = self._open({name: tiers[name]})
            for stripe in stripes[number :: len(TIERS)]:
                assert all(backend.batch_set_v1(stripe, self._indices[: 16 * len(stripe)], None))
                self._parts.setdefault(name, []).extend(stripe)
            backend.close()
        self._all = self._open(tiers)
        self._tiers_of = tiers
        assert self._all.batch_exists(self._keys, None) == CHAIN
        let_code_compile()

    def _open(self, tiers: dict[str, Any]) -> Any:
        # Nothing is fetched ahead: look-ups alone are measured.
        ours = {
            "tiers": tiers,
            "retrieve_locations": [*tiers],
            "store_locations": [*tiers][:1],
            "prefetch": {"buffer": 0},
        }
        return open_backend(self._pools, ours)

    def answer(self, question: str) -> dict[str, float]:
        """Seconds: of the calls of a round the median and the worst, and the worst gap beside them."""
        if question == "all":
            return self._measure(self._all, self._keys)
        backend = self._open({question: self._tiers_of[question]})
        try:
            return self._measure(backend, self._parts[question])
        finally:
            backend.close()

    def _measure(self, backend: Any, keys: list[str]) -> dict[str, float]:
        beside = _Beside()
        seconds = []
        for _ in range(3):
            assert backend.batch_exists(keys, None) == len(keys)
        with beside:
            for _ in range(_CALLS_A_ROUND):
                started = time.perf_counter()
                backend.batch_exists(keys, None)
                seconds.append(time.perf_counter() - started)
        return {"median": statistics.median(seconds), "worst": max(seconds), "gap": beside.worst}


class _Beside:
    """A thread that wants the interpreter often."""

    def __init__(self) -> None:
        self.worst = 0.0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        before = time.perf_counter()
        while not self._end.is_set():
            time.sleep(_SLEEP)
            now = time.perf_counter()
            self.worst = max(self.worst, now - before - _SLEEP)
            before = now


def _report(answers: dict[str, dict[str, list[dict[str, float]]]]) -> str:
    names = list(next(iter(answers.values())))
    head = " | ".join(f"{name}, ms (worst; gap)" for name in names)
    lines = [f"| look-up | {head} | ratio |", "|---|" + "--:|" * (len(names) + 1)]
    for question, by_name in answers.items():
        cells = []
        for rounds in by_name.values():
            middle = statistics.median(one["median"] for one in rounds)
            worst, gap = max(one["worst"] for one in rounds), max(one["gap"] for one in rounds)
            cells.append(f"{middle * 1e3:.1f} ({worst * 1e3:.0f}; {gap * 1e3:.0f})")
        pairs = zip(*by_name.values(), strict=True)
        ratio = statistics.median(one[-1]["median"] / one[0]["median"] for one in pairs)
        lines.append(f"| {question} | {' | '.join(cells)} | {ratio:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout, measured in turns with this one")
    parser.add_argument("--rounds", type=int, default=20, help="of 10 calls each")
    parser.add_argument("--directory", type=Path, help="on the file system to use; /dev/shm has the least noise")
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    parser.add_argument("--serve", nargs=2, metavar=("DIRECTORY", "PORT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        server = _Server(Path(arguments.serve[0]), int(arguments.serve[1]))
        serve(server.answer)
        return
    sys.path.insert(0, str(HERE))
    from tests.rigs.redis_servers import RedisServer

    place = Path(tempfile.mkdtemp(prefix="hicache-look-ups-", dir=arguments.directory))
    checkouts: dict[str, Checkout] = {}
    try:
        with RedisServer(place / "redis") as redis:
            for name, root in roots(arguments.against).items():
                (place / name).mkdir()
                checkouts[name] = Checkout(root, __file__, ["--serve", str(place / name), str(redis.port)])
            answers = {question: in_turns(checkouts, question, arguments.rounds) for question in ("all", *TIERS)}
            for checkout in checkouts.values():
                checkout.close()
    finally:
        shutil.rmtree(place, ignore_errors=True)
    report = _report(answers)
    print(report)
    if arguments.markdown is not None:
        arguments.markdown.write_text(f"{report}\n")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""The way of a page from SGLang's call to the medium and back: how many hands it passes, and how long it takes.

Counted is what one call does on the thread that calls and on the threads that help it: Python functions of this
package that are called, the files they are in, how deep they are nested, and all Python calls together (numpy, torch
and the standard library, too). The tier is what a configuration with one path and a capacity gives; a batch is 128
pages of 32 KiB, as SGLang passes it.

Timed are calls on the same pages in the page cache. With ``--against PATH``, another checkout takes turns with this
one, round by round, each in a process of its own: ``python benchmarks/page_path.py --against ../before``. A round's
figure is its lower quartile: on a machine with other work the upper half measures that work.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

# A script: its directory is on the path, whichever checkout's package is measured.
from checkouts import Checkout, in_turns, let_code_compile, open_backend, roots, serve

PAGES = 128
PAGE_SIZE = 16
LAYERS, HEADS, HEAD_DIM = 4, 4, 32
"""With 2 bytes a number: 32 KiB a page."""
_WARM_UP = 20
_CALLS_A_ROUND = 50


class _Hands:
    """Counts calls while it is in force, on every thread that began under ``watch_new_threads``."""

    def __init__(self, package: Path) -> None:
        self._package = f"{package}{os.sep}"
        self._local = threading.local()
        self._lock = threading.Lock()
        self._on = False
        self.clear()

    def clear(self) -> None:
        self.all_calls = 0
        self.deepest = 0
        self.functions: Counter[str] = Counter()

    def watch_new_threads(self) -> None:
        threading.setprofile(self._profile)

    def count(self, call: Callable[[], Any]) -> dict[str, Any]:
        self.clear()
        self._on, self._local.depth = True, 0
        sys.setprofile(self._profile)
        try:
            call()
        finally:
            sys.setprofile(None)
            self._on = False
        files = {name.partition(":")[0] for name in self.functions}
        return {
            "calls": sum(self.functions.values()),
            "files": len(files),
            "depth": self.deepest,
            "all": self.all_calls,
            "functions": dict(self.functions.most_common()),
        }

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        if not self._on or event not in ("call", "return"):
            return
        code = frame.f_code
        ours = code.co_filename.startswith(self._package)
        if event == "return":
            if ours:
                self._local.depth = max(0, getattr(self._local, "depth", 0) - 1)
            return
        with self._lock:
            self.all_calls += 1
            if ours:
                self._local.depth = getattr(self._local, "depth", 0) + 1
                self.deepest = max(self.deepest, self._local.depth)
                self.functions[f"{code.co_filename[len(self._package) :]}:{code.co_qualname}"] += 1


class _Bench:
    """The backend of one checkout, opened as SGLang opens it, and its calls."""

    def __init__(self, directory: Path, *, watched: bool) -> None:
        """``watched``: the threads that help are counted, too, which makes them slower."""
        from hicache_ext.testing.sglang_cpu import prepare_process

        prepare_process()
        import torch

        import hicache_ext
        from hicache_ext.testing.host_pools import mha_pools, page_indices

        self.hands = _Hands(Path(hicache_ext.__file__).parent)
        if watched:
            self.hands.watch_new_threads()
        torch.set_num_threads(1)
        pools = mha_pools(page_size=PAGE_SIZE, pages=2 * PAGES, layers=LAYERS, heads=HEADS, head_dim=HEAD_DIM)
        # The threads, because what is measured here for them is not the same in every run.
        tier = {"type": "file", "path": str(directory), "capacity": "256MiB", "layout": "slab", "threads": 4}
        ours = {"tiers": {"disk": tier}}
        self.backend = open_backend(pools, ours)
        let_code_compile()
        self._pools = pools
        self._from = page_indices(PAGE_SIZE, list(range(PAGES)))
        self._to = page_indices(PAGE_SIZE, list(range(PAGES, 2 * PAGES)))
        self._names = 0
        self.keys = self._new_keys()
        assert all(self.backend.batch_set_v1(self.keys, self._from, None))
        assert all(self.get())
        kv = pools.host.kv_buffer.view(torch.uint8)
        half = PAGES * PAGE_SIZE
        assert torch.equal(kv[:, :half], kv[:, half : 2 * half]), "what was read is not what was written"

    def _new_keys(self) -> list[str]:
        self._names += PAGES
        return [f"{number:064x}" for number in range(self._names, self._names + PAGES)]

    def get(self) -> list[bool]:
        answer: list[bool] = self.backend.batch_get_v1(self.keys, self._to, None)
        return answer

    def exists(self) -> int:
        return int(self.backend.batch_exists(self.keys, None))

    def set(self) -> list[bool]:
        """Always of new pages."""
        answer: list[bool] = self.backend.batch_set_v1(self._new_keys(), self._from, None)
        return answer

    def hands_of(self) -> dict[str, dict[str, Any]]:
        counted: dict[str, dict[str, Any]] = {}
        for name, call in (("batch_get_v1", self.get), ("batch_exists", self.exists), ("batch_set_v1", self.set)):
            for _ in range(_WARM_UP):
                call()
            # The least of some: threads that found nothing to help with, and clocks that were due, are not the way.
            counted[name] = min((self.hands.count(call) for _ in range(_WARM_UP)), key=lambda found: found["calls"])
        return counted

    def seconds_of(self, call: Callable[[], Any], calls: int) -> list[float]:
        seconds = []
        for _ in range(calls):
            started = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - started)
        return seconds


def _serve(directory: Path, *, watched: bool) -> None:
    """One checkout: "hands", or the name of a call to time."""
    bench = _Bench(directory, watched=watched)
    serve(
        lambda question: (
            bench.hands_of()
            if question == "hands"
            else statistics.quantiles(bench.seconds_of(getattr(bench, question), _CALLS_A_ROUND))[0]
        )
    )
    bench.backend.close()


def _start(root: Path, directory: Path, *, watched: bool) -> Checkout:
    return Checkout(root, __file__, ["--serve", str(directory), *(["--watched"] if watched else [])])


def _report_hands(checked_out: dict[str, Path], place: Path, functions: bool) -> None:
    hands: dict[str, dict[str, Any]] = {}
    for name, root in checked_out.items():
        checkout = _start(root, place / f"{name}-watched", watched=True)
        hands[name] = checkout.ask("hands")
        checkout.close()
    print("| call | checkout | calls | files | depth | all Python calls |\n|---|---|--:|--:|--:|--:|")
    for call in next(iter(hands.values())):
        for name, found in hands.items():
            row = found[call]
            print(f"| {call} | {name} | {row['calls']} | {row['files']} | {row['depth']} | {row['all']} |")
    if functions:
        for call, found in list(hands.values())[-1].items():
            print(f"\n{call}:")
            for function, count in found["functions"].items():
                print(f"{count:5} {function}")


def _report_times(checked_out: dict[str, Path], place: Path, rounds: int) -> None:
    checkouts: dict[str, Checkout] = {}
    try:
        for name, root in checked_out.items():
            checkouts[name] = _start(root, place / name, watched=False)
        print(f"\n| call of {PAGES} pages | " + " | ".join(f"{name}, us" for name in checkouts) + " | ratio |")
        print("|---|" + "--:|" * (len(checkouts) + 1))
        for call in ("get", "exists", "set"):
            times = in_turns(checkouts, call, rounds)
            cells = " | ".join(f"{statistics.median(found) * 1e6:.0f}" for found in times.values())
            ratios = [one[-1] / one[0] for one in zip(*times.values(), strict=True)]
            print(f"| {call} | {cells} | {statistics.median(ratios):.3f} |", flush=True)
    finally:
        for checkout in checkouts.values():
            checkout.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout, measured in turns with this one")
    parser.add_argument("--rounds", type=int, default=60, help="of 50 calls each; 0 times nothing")
    parser.add_argument("--functions", action="store_true", help="name every function that is called")
    parser.add_argument("--directory", type=Path, help="on the file system to use; /dev/shm has the least noise")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--watched", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        _serve(arguments.serve, watched=arguments.watched)
        return
    place = Path(tempfile.mkdtemp(prefix="hicache-page-path-", dir=arguments.directory))
    checked_out = roots(arguments.against)
    try:
        _report_hands(checked_out, place, arguments.functions)
        if arguments.rounds:
            _report_times(checked_out, place, arguments.rounds)
    finally:
        shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    main()

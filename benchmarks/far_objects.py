#!/usr/bin/env python3
"""Small pages in an object store that is 20 ms away: this checkout against another one, in turns.

``python benchmarks/far_objects.py --against ../before --markdown FILE``

An S3 server of this machine (rivals/far_s3.js), in memory, answers each request 20 ms later than it could. Both
checkouts open the tier from its configuration and write a chain of pages in calls of 128, from one thread or several at
once, look it up, and read it back; then they look it up by a store that was opened a moment ago and knows nothing. What
is read is compared byte for byte, outside the timed part.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# A script: its directory is on the path, whichever checkout's package is measured.
from checkouts import HERE, Checkout, in_turns, roots, serve

PAGE = 128 << 10
BATCH = 128
CALLS = 2
DELAY = 0.02
QUESTIONS = ("write", "look up", "read", "look up, just opened", "look up what is not there")


class _Tier:
    """The object tier of one checkout. One round after the other, in the order of ``QUESTIONS``."""

    def __init__(self, tier: dict[str, Any], threads: int) -> None:
        from concurrent.futures import ThreadPoolExecutor

        import numpy as np

        self._threads = ThreadPoolExecutor(threads)
        self._calls = CALLS * threads

        self._tier = tier
        self._store = self._open()
        self._identity = os.urandom(16)
        self._sources = [np.frombuffer(os.urandom(PAGE), np.uint8).copy() for _ in range(BATCH)]
        self._targets = [[np.zeros(PAGE, np.uint8) for _ in range(BATCH)] for _ in range(self._calls)]
        self._keys: list[bytes] = []

    def _open(self) -> Any:
        from hicache_ext.config import ExtraConfig, load_config
        from hicache_ext.storage.contract.registry import open_tier

        return open_tier("cold", load_config(ExtraConfig.around({"tiers": {"cold": self._tier}})).tiers["cold"])

    def answer(self, question: str) -> float:
        """Pages a second."""
        if question == "write":
            self._keys = [self._identity + os.urandom(32) for _ in range(BATCH * self._calls)]
        store = self._open() if question == "look up, just opened" else self._store
        asked = [self._identity + os.urandom(32) for _ in self._keys] if "not there" in question else self._keys
        begun = time.perf_counter()
        if question.startswith("look up"):
            found = store.count_leading(asked)
        else:
            found = sum(self._threads.map(lambda call: self._move(question, call), range(self._calls)))
        seconds = time.perf_counter() - begun
        assert found == (0 if "not there" in question else len(asked)), (question, found, store.metrics.snapshot())
        if question == "read":
            for targets in self._targets:
                assert all((one == other).all() for one, other in zip(self._sources, targets, strict=True))
                for target in targets:
                    target[:] = 0
        if store is not self._store:
            store.close()
        return len(asked) / seconds

    def _move(self, question: str, call: int) -> int:
        from hicache_ext.storage.store import GetResult, PageBatch, SetResult

        memory = self._sources if question == "write" else self._targets[call]
        batch = PageBatch(self._keys[call * BATCH : (call + 1) * BATCH], [[page.data] for page in memory])
        if question == "write":
            return int(self._store.set(batch).count(SetResult.STORED))
        return int(self._store.get(batch).count(GetResult.HIT))


def _report(answers: dict[str, dict[str, list[float]]]) -> str:
    names = list(next(iter(answers.values())))
    lines = [f"| pages a second | {' | '.join(names)} | ratio |", "|---|" + "--:|" * (len(names) + 1)]
    for question, by_name in answers.items():
        cells = []
        for rounds in by_name.values():
            low, middle, high = statistics.quantiles(rounds, n=4)
            cells.append(f"{middle:,.0f} [{low:,.0f}, {high:,.0f}]")
        ratio = statistics.median(one[-1] / one[0] for one in zip(*by_name.values(), strict=True))
        lines.append(f"| {question} | {' | '.join(cells)} | {ratio:.1f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout, measured in turns with this one")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--delay", type=float, default=DELAY, help="seconds that each request takes longer")
    parser.add_argument("--threads", type=int, default=1, help="that call at the same time")
    parser.add_argument("--directory", type=Path, help="for the server's files")
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    parser.add_argument("--serve", nargs=3, metavar=("URL", "ENDPOINT", "THREADS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        url, endpoint, threads = arguments.serve
        key = {"env": "HICACHE_TEST_S3_KEY"}
        tier = {"type": "object", "url": url, "endpoint": endpoint, "allow_http": True, "timeout": "60s"}
        serve(_Tier({**tier, "access_key": key, "secret_key": key}, int(threads)).answer)
        return
    sys.path.insert(0, str(HERE))
    from tests.rigs.s3_server import FarS3Server

    place = Path(tempfile.mkdtemp(prefix="hicache-far-", dir=arguments.directory))
    try:
        with FarS3Server(place, arguments.delay) as server:
            os.environ.update(server.environment())
            words = [server.endpoint, str(arguments.threads)]
            checkouts = {
                name: Checkout(root, __file__, ["--serve", server.url(f"checkout-{number}"), *words])
                for number, (name, root) in enumerate(roots(arguments.against).items())
            }
            for question in QUESTIONS:
                in_turns(checkouts, question, 1)
            rounds = [
                {question: in_turns(checkouts, question, 1) for question in QUESTIONS} for _ in range(arguments.rounds)
            ]
            for checkout in checkouts.values():
                checkout.close()
    finally:
        shutil.rmtree(place, ignore_errors=True)
    answers = {
        question: {name: [one[question][name][0] for one in rounds] for name in checkouts} for question in QUESTIONS
    }
    report = _report(answers)
    print(report)
    if arguments.markdown is not None:
        arguments.markdown.write_text(f"{report}\n")


if __name__ == "__main__":
    main()

"""Does writing slow decoding? One prefill node, several decode nodes beside each other, the same requests in turns.

``python -m tests.campaigns.decode_throughput [ROUNDS]``: decode nodes without offload, with SGLang's own, with our
writer over a healthy pool, a dead one, one that dies after a while, and one whose every call takes half a second. In
each round each node decodes the same batch, the order rotated; a node's figure is generated tokens over the time
between the batch's first token and its end. Needs root (network namespace). The scheduler cost per step is in the logs.
"""

from __future__ import annotations

import re
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from hicache_ext.bench.harness import interleaved
from hicache_ext.config.model import ExtraConfig
from hicache_ext.testing.pd_pair import PdGeneration, PdPair, decode_node
from hicache_ext.testing.server import SglangServer
from hicache_ext.testing.tier_faults import VARIABLE
from hicache_ext.testing.tiny_model import make_tiny_model

BATCH = 6
TOKENS = 160
ARMS: dict[str, dict[str, str] | None] = {
    "without": None,
    "sglang": {},
    "ours": {},
    "ours, dead pool": {VARIABLE: "dead"},
    "ours, dying pool": {VARIABLE: "dead:110"},
    "ours, slow pool": {VARIABLE: "slow:0.5"},
}


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    # A time limit's SIGTERM must stop the servers, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model = make_tiny_model(directory / "model")
        pair = PdPair(model, directory=directory, prefill_config=_config(directory, True), decode_offload=False)
        nodes = {
            arm: decode_node(
                model,
                log_file=directory / f"{arm}.log",
                namespace=pair.namespace,
                storage_backend="dynamic" if faults is not None else None,
                config=_config(directory, arm != "sglang") if faults is not None else None,
                arguments=("--max-total-tokens", "8192"),
                environment=faults,
            )
            for arm, faults in ARMS.items()
            if arm != "without"
        }
        with pair:
            try:
                _all_at_once([node.start for node in nodes.values()])
                rates = _measure(pair, {"without": pair.decode, **nodes}, rounds)
            finally:
                _all_at_once([node.stop for node in nodes.values()])
        base = statistics.median(rates["without"])
        print(f"{'decode node':<18} {'tokens/s':>9} {'ratio':>7}  {'paired ratio':>12}  scheduler, counters")
        for arm, values in rates.items():
            paired = statistics.median(v / b for v, b in zip(values, rates["without"], strict=True))
            log = directory / ("decode.log" if arm == "without" else f"{arm}.log")
            print(
                f"{arm:<18} {statistics.median(values):>9.1f} {statistics.median(values) / base:>7.3f}  {paired:>12.3f}"
                f"  {_said(log, r'took the scheduler ([0-9.]+ us a step on average, [0-9.]+ us at most)')}"
                f"  {_said(log, r'decode writer: ({.*})')}"
            )


def _measure(pair: PdPair, nodes: dict[str, SglangServer], rounds: int) -> dict[str, list[float]]:
    rates: dict[str, list[float]] = {arm: [] for arm in nodes}
    # The first request of a node meets connections that are not open yet and takes ten seconds.
    _all_at_once([lambda node=node: pair.generate([1] * 32, 4, decode=node) for node in nodes.values()])
    for number, arm, counts in interleaved(list(nodes), rounds):
        rate = _decode_batch(pair, nodes[arm], f"{number}-{arm}")
        if counts:
            rates[arm].append(rate)
    return rates


def _decode_batch(pair: PdPair, node: SglangServer, salt: str) -> float:
    """Tokens per second of one batch. Another salt each time: nothing is in the pool already."""
    answers: list[PdGeneration] = []
    ends: list[float] = []

    def ask(number: int) -> None:
        prompt = [(number * 13 + 7 * place) % 250 for place in range(96)]
        answers.append(pair.generate(prompt, TOKENS, decode=node, cache_salt=salt, sampling={"ignore_eos": True}))
        ends.append(time.monotonic())

    _all_at_once([lambda number=number: ask(number) for number in range(BATCH)])
    firsts = [end - answer.total_time + answer.time_to_first_token for end, answer in zip(ends, answers, strict=True)]
    return BATCH * (TOKENS - 1) / (max(ends) - min(firsts))


def _all_at_once(calls: list[Any]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _config(directory: Path, ours: bool) -> dict[str, Any]:
    section: dict[str, Any] = {
        "tiers": {"pool": {"type": "file", "path": str(directory / "pool"), "capacity": "1GiB"}},
        "pd": {"write": {"enabled": ours, "stride": 32}},
    }
    return ExtraConfig.around(section)


def _said(log: Path, pattern: str) -> str:
    found = re.findall(pattern, log.read_text(errors="replace"))
    return found[-1] if found else "-"


if __name__ == "__main__":
    main()

"""What an agent gains on a real server: the first token after each tool call, with hints and without.

``python -m benchmarks.agent_text TRACE``, with a trace as benchmarks/agent_hints.py has it. One CPU server with the
small model and a file tier that holds ``--slots`` pages. Recorded sessions are replayed, so many at the same time: each
request has as many tokens as was recorded, of its own session's and, where several began alike, of the shared text, a
part of them (``--tokens``), and the tool runs for as long as was recorded, stretched (``--stretch``), so that a CPU can
follow. After each request the device and host memory are emptied: what is served comes from the tier. With hints
and without take turns on the one server, over prompts of their own, in ``--rounds``; the tier is cleared in between.

Printed: quartiles and mean of the first token after a tool call, and the share of prompt tokens that were cached.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.agent_hints import run_together
from hicache_ext.bench.frame import Quartiles
from hicache_ext.config import ExtraConfig
from hicache_ext.testing import small_model
from hicache_ext.testing.client import Generation
from hicache_ext.testing.server import SglangServer

_PAGE = 16
_BYTES_OF_A_TOKEN = 2 * 30 * 3 * 64 * 4
"""Of SmolLM2-135M in float32: keys and values of 30 layers with 3 heads of 64."""
_VOCABULARY = 49_000
_ANSWER = 4
_SLACK = 5.0
"""Seconds that a lease lasts longer than the tool: a request may wait for others."""


def prompt(blocks: Sequence[int], salt: str, per_block: int) -> list[int]:
    """The tokens of a chain of recorded blocks: equal beginnings where the recorded ones are."""
    tokens: list[int] = []
    for block in blocks:
        seed = hashlib.sha256(f"{salt}/{block}".encode()).digest()
        tokens += random.Random(seed).choices(range(1000, _VOCABULARY), k=per_block)
    return tokens


def hints_for(session: str, number: int, seconds: float | None) -> dict[str, Any]:
    """What the agent says with a request: how long its tool will run, or that this was the last one."""
    said = ("retain", {"ttl_seconds": seconds}) if seconds else ("demote", {})
    actions = [said, ("supersede", {"message_id": f"{session}/{number - 1}"})]
    made = [{"action_type": f"kv.{kind}", "payload": payload} for kind, payload in actions]
    return {"custom_params": {"hicache_ext": {"message_id": f"{session}/{number}", "hints": made}}}


def replay(
    server: SglangServer, sessions: Sequence[Sequence[dict[str, Any]]], salt: str, arguments: argparse.Namespace
) -> list[Generation]:
    """The answers after a tool call, of all sessions."""
    answers: list[Generation] = []
    begun, turn = time.monotonic(), threading.Lock()

    def run(lines: Sequence[dict[str, Any]]) -> None:
        for number, line in enumerate(lines):
            at = (line["timestamp"] - sessions[0][0]["timestamp"]) / 1000 * arguments.stretch
            time.sleep(max(0.0, begun + at - time.monotonic()))
            following = lines[number + 1]["timestamp"] if number + 1 < len(lines) else None
            wait = None if following is None else (following - line["timestamp"]) / 1000 * arguments.stretch + _SLACK
            hints = hints_for(f"{salt}/{line['session']}", number, wait) if salt.startswith("hints") else {}
            sampling = {"ignore_eos": True} | hints
            tokens = prompt(line["hash_ids"], salt, arguments.tokens)
            # One after the other: a server that is busy cannot be emptied.
            with turn:
                answer = server.generate(tokens, _ANSWER, sampling=sampling, timeout=900)
                server.flush_cache(timeout=300)
            if number:
                answers.append(answer)

    threads = [threading.Thread(target=run, args=(lines,)) for lines in sessions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--sessions", type=int, default=4)
    parser.add_argument("--requests", type=int, default=8, help="of each session, the first ones")
    parser.add_argument("--tokens", type=int, default=16, help="of a recorded block of 64")
    parser.add_argument("--slots", type=int, default=200)
    parser.add_argument("--stretch", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    recorded = [json.loads(line) for line in arguments.trace.read_text().splitlines() if line.strip()]
    by_session: dict[str, list[dict[str, Any]]] = {}
    for line in run_together(recorded, arguments.sessions):
        by_session.setdefault(line["session"], []).append(line)
    sessions = [lines[: arguments.requests] for lines in list(by_session.values())[: arguments.sessions]]
    found: dict[str, list[Generation]] = {"without": [], "hints": []}
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        capacity = arguments.slots * (_PAGE * _BYTES_OF_A_TOKEN + 8192)
        disk = {"type": "file", "path": str(place / "tier"), "capacity": capacity, "layout": "slab"}
        with SglangServer(
            str(small_model.make_small_model(place / small_model.NAME)),
            log_file=place / "server.log",
            page_size=_PAGE,
            storage_backend="dynamic",
            extra_config=ExtraConfig.around({"tiers": {"disk": disk}}) | {"prefetch_threshold": _PAGE},
            extra_arguments=small_model.arguments_to_serve(),
            start_timeout=1800,
        ) as server:
            server.generate(prompt([0], "warm-up", 64), _ANSWER, sampling={"ignore_eos": True}, timeout=900)
            for number in range(arguments.rounds):
                for name in list(found) if number % 2 == 0 else reversed(found):
                    found[name] += replay(server, sessions, f"{name}/{number}", arguments)
                    command = [sys.executable, "-m", "hicache_ext", "clear", str(place / "tier"), "--all", "--yes"]
                    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    for name, answers in found.items():
        times = [answer.time_to_first_token for answer in answers]
        first = Quartiles.of(times)
        share = sum(answer.cached_tokens for answer in answers) / sum(answer.prompt_tokens for answer in answers)
        seconds = f"{first.median:.3f} s [{first.lower:.3f} {first.upper:.3f}], mean {statistics.fmean(times):.3f}"
        print(f"{name:8s} {len(answers)} answers, first token {seconds}, {share:.3f} of the prompts cached")
    return 0


if __name__ == "__main__":
    sys.exit(main())

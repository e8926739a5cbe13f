#!/usr/bin/env python3
"""The first token of a restored prompt through both of SGLang's doors to storage, and without storage.

    python -m benchmarks.bench_linker --json FILE.json

Three servers of the CPU rig: one without storage, one with HiCache and one with the linker, the last two over one file
tier, from which both read what the linker wrote. While one is asked, the other two are stopped. In each round another
prompt is computed by the linker's server and written; then all devices are emptied, and each server, in turns, is asked
for the prompt with a short question behind it: once alone, and, emptied again, once while another request gets its
tokens, whose longest pause is noted. On a machine with a GPU the same servers run there.

The time line is that of the linker: when each layer's bytes were on the device, and when the forward waited for it
(tests/rigs/layer_times.py).
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from hicache_ext.bench.frame import (
    Quartiles,
    Table,
    add_json_argument,
    fresh_directory,
    interleaved,
    machine_facts,
    number,
    positive,
    report,
)
from hicache_ext.cli.main import without_traceback
from hicache_ext.cli.server_commands import read_samples
from hicache_ext.config.model import SECTION, ExtraConfig
from hicache_ext.config.render import linker_config
from hicache_ext.errors import CommandError
from hicache_ext.runtime.commands import standard_output_of
from hicache_ext.testing.client import Generation
from hicache_ext.testing.small_model import NAME, arguments_to_serve, make_small_model
from tests.rigs.layer_times import VARIABLE, LayerEvent, read_events
from tests.rigs.rig_server import RigServer
from tests.rigs.server_hooks import rig_environment

PAGE_SIZE = 64
NO_STORAGE, HICACHE, LINKER = "no storage", "HiCache", "linker"
ARMS = (NO_STORAGE, HICACHE, LINKER)
NEIGHBOUR_TOKENS = 60
"""Of the request that is answered meanwhile."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Milliseconds after the batch of loads started."""

    landed: float
    wait_began: float
    waited: float


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds to the first token, the longest pause in another request's tokens meanwhile, and the time line of the
    linker's restore, by layers."""

    seconds: Mapping[str, float]
    pauses: Mapping[str, float]
    layers: Sequence[Layer]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=positive, default=8, help="after one that does not count")
    parser.add_argument("--tokens", type=positive, default=4000, help="of the prompt that is restored")
    parser.add_argument("--question", type=positive, default=32, help="tokens behind it that are computed")
    add_json_argument(parser)
    arguments = parser.parse_args()
    with standard_output_of(arguments), fresh_directory(Path(tempfile.gettempdir())) as directory:
        rounds = _measure(directory, arguments.rounds, arguments.tokens, arguments.question)
        facts = machine_facts(directory, ("hicache-ext", "sglang", "torch"))
    typical = rounds[_typical(rounds)].layers
    figures = {
        "tokens": arguments.tokens,
        "question_tokens": arguments.question,
        "seconds": {arm: [one.seconds[arm] for one in rounds] for arm in ARMS},
        "pauses": {arm: [one.pauses[arm] for one in rounds] for arm in ARMS},
        "time_line_ms": [[layer.landed, layer.wait_began, layer.waited] for layer in typical],
    }
    report(arguments, "linker", facts, figures, _tables(rounds, arguments.tokens, arguments.question))
    waited = sum(layer.waited for layer in typical)
    print(f"\nIn the linker's median round the forward waited {number(waited)} ms for layers.")
    return 0


def _measure(directory: Path, rounds: int, tokens: int, question: int) -> list[Round]:
    events = directory / "layers"
    measured: list[Round] = []
    with ExitStack() as stack:
        servers = _start(stack, directory, events, tokens + question)
        seconds: dict[str, float] = {}
        pauses: dict[str, float] = {}
        layers: list[Layer] = []
        current = 0
        for round_number, arm, counts in interleaved(ARMS, rounds):
            draw_tokens = random.Random(round_number)
            prompt = [draw_tokens.randrange(100, 40_000) for _ in range(tokens)]
            if round_number != current:
                current, seconds, pauses = round_number, {}, {}
                with _thawed(servers[LINKER]) as writer:
                    writer.generate(prompt, 1)
                    _wait_for_the_writes(writer)
                    writer.flush_cache()
            asked = [*prompt, *(draw_tokens.randrange(100, 40_000) for _ in range(question))]
            with _thawed(servers[arm]) as server:
                before = len(read_events(events))
                answer = server.generate(asked, 4)
                _check(answer, arm, tokens)
                seconds[arm] = answer.time_to_first_token
                if arm == LINKER:
                    layers = time_line(read_events(events)[before:])
                server.flush_cache()
                pauses[arm] = _longest_pause(server, asked)
                server.flush_cache()
            if counts and len(seconds) == len(ARMS):
                measured.append(Round(seconds, pauses, layers))
    return measured


def _start(stack: ExitStack, directory: Path, events: Path, tokens: int) -> dict[str, RigServer]:
    model = make_small_model(directory / NAME)
    config = ExtraConfig.around(
        {"tiers": {"disk": {"type": "file", "path": str(directory / "pages"), "capacity": "16GiB"}}}
    )
    doors: dict[str, dict[str, Any]] = {
        NO_STORAGE: {"hierarchical_cache": False},
        HICACHE: {"storage_backend": "dynamic", "extra_config": {**config, "prefetch_threshold": PAGE_SIZE}},
        LINKER: {
            "linker_config": linker_config({SECTION: config[SECTION]}),
            "environment": rig_environment({VARIABLE: str(events)}),
        },
    }
    # The share bounds nothing: it only lets a server start whose neighbours take memory meanwhile.
    memory = (
        "--max-total-tokens",
        str(3 * tokens // PAGE_SIZE * PAGE_SIZE),
        "--mem-fraction-static",
        "0.6",
        "--enable-metrics",
    )
    servers: dict[str, RigServer] = {}
    identities: set[str] = set()
    for arm in ARMS:
        servers[arm] = stack.enter_context(
            RigServer(
                model,
                log_file=directory / f"{arm}.log",
                page_size=PAGE_SIZE,
                extra_arguments=(*arguments_to_serve(), *memory),
                **doors[arm],
            )
        )
        servers[arm].generate([1, 2, 3], 2)  # pays for what is loaded and compiled once
        if arm != NO_STORAGE:
            identities.add(_identity_of(servers[arm]))
    # Not before all run: one that is stopped cannot let another one into the directory that they share.
    for server in servers.values():
        server.freeze()
    if len(identities) > 1:
        raise CommandError(f"the servers do not share pages: {sorted(identities)}")
    return servers


def _identity_of(server: RigServer) -> str:
    """Of the server's pages, once it has read its weights: nothing is stored or served before."""
    deadline = time.monotonic() + 120
    while not (
        found := re.findall(r"pages of pool kv have identity (\w+)", server.log_file.read_text(errors="replace"))
    ):
        if time.monotonic() > deadline:
            raise CommandError(f"the weights were not identified in two minutes:\n{server.log_tail()}")
        time.sleep(0.1)
    return str(found[-1])


@contextmanager
def _thawed(server: RigServer) -> Iterator[RigServer]:
    server.thaw()
    time.sleep(0.2)
    try:
        yield server
    finally:
        server.freeze()


def _wait_for_the_writes(server: RigServer) -> None:
    deadline = time.monotonic() + 60
    time.sleep(0.5)
    while read_samples(server.get("/metrics")).total("hicache_ext_linker_waiting"):
        if time.monotonic() > deadline:
            raise CommandError("the linker's pages were not written in a minute")
        time.sleep(0.2)


def _longest_pause(server: RigServer, asked: Sequence[int]) -> float:
    """Seconds between two tokens of another request, while ``asked`` is restored or computed."""
    seen: list[float] = []

    def talk() -> None:
        server.generate(
            [7, 8, 9], NEIGHBOUR_TOKENS, sampling={"ignore_eos": True}, show=lambda _: seen.append(time.monotonic())
        )

    neighbour = threading.Thread(target=talk)
    neighbour.start()
    while len(seen) < 5 and neighbour.is_alive():
        time.sleep(0.01)
    begun = time.monotonic()
    server.generate(asked, 4)
    neighbour.join()
    if not seen or seen[-1] < begun:
        raise CommandError("the other request was over before the prompt came; give it more tokens")
    return max(later - earlier for earlier, later in pairwise(seen) if later >= begun)


def _check(answer: Generation, arm: str, tokens: int) -> None:
    expected = 0 if arm == NO_STORAGE else tokens // PAGE_SIZE * PAGE_SIZE
    if answer.cached_tokens != expected:
        raise CommandError(f"{arm}: {answer.cached_tokens} tokens were cached instead of {expected}: {answer.cached}")


def time_line(events: Sequence[LayerEvent]) -> list[Layer]:
    """Of the only batch of loads in ``events``. A layer may be waited for several times: the first time counts."""
    start = next(event.end for event in events if event.name == "starts")
    landed = {event.layer: event.end - start for event in events if event.name == "lands"}
    waits: dict[int, LayerEvent] = {}
    for event in events:
        if event.name == "waits":
            waits.setdefault(event.layer, event)
    return [
        Layer(1e3 * landed[layer], 1e3 * (waits[layer].begin - start), 1e3 * (waits[layer].end - waits[layer].begin))
        for layer in sorted(landed)
        if layer in waits
    ]


def _typical(rounds: Sequence[Round]) -> int:
    """The round whose time through the linker is the median, or the one below it."""
    order = sorted(range(len(rounds)), key=lambda number: rounds[number].seconds[LINKER])
    return order[(len(order) - 1) // 2]


def _tables(rounds: Sequence[Round], tokens: int, question: int) -> list[Table]:
    times = {arm: Quartiles.of([one.seconds[arm] for one in rounds]) for arm in ARMS}
    ratios = {arm: statistics.median(one.seconds[LINKER] / one.seconds[arm] for one in rounds) for arm in ARMS}
    pauses = {arm: Quartiles.of([one.pauses[arm] for one in rounds]) for arm in ARMS}
    rows = tuple(
        (
            arm,
            *(number(1e3 * value) for value in (one.median, one.lower, one.upper)),
            f"{ratios[arm]:.2f}",
            number(1e3 * pauses[arm].median),
        )
        for arm, one in times.items()
    )
    line = tuple(
        (str(place), *(f"{value:.1f}" for value in (layer.landed, layer.wait_began, layer.waited)))
        for place, layer in enumerate(rounds[_typical(rounds)].layers)
    )
    title = f"time to the first token of {tokens:,} tokens and {question} new ones, ms, {len(rounds)} rounds"
    headers = (
        "server",
        "median",
        "lower quartile",
        "upper quartile",
        "linker / this",
        "longest pause of another request",
    )
    layers = ("layer", "on the device", "the forward comes to it", "and waits")
    when = "the linker's layers in the round of its median, ms after the loads started"
    return [Table(title, headers, rows), Table(when, layers, line)]


if __name__ == "__main__":
    sys.exit(without_traceback(main))

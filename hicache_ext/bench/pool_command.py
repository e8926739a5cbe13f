"""``hicache-ext bench pool``: Mooncake, Redis and object tiers against their engines' own best clients."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hicache_ext.bench.harness import Clock, command_line, interleaved, machine_facts, terminated_in_order, today
from hicache_ext.bench.output_files import add_output_arguments, positive, write_outputs
from hicache_ext.bench.pool_engines import Contender, Engine, Pages, PoolClient, all_engines, serving
from hicache_ext.bench.pool_measuring import Case, measure
from hicache_ext.bench.pool_report import Point, Results, absent, entries, markdown, panels, tables
from hicache_ext.config.units import format_size, parse_size
from hicache_ext.errors import BenchmarkError, HicacheExtError

ENGINES = ("mooncake", "redis", "object")
_PAYLOADS = ("128KiB", "1MiB", "4MiB")
_THREADS = (1, 4)
_PACKAGES = ("hicache-ext", "obstore", "redis", "mooncake-transfer-engine", "xxhash", "numpy")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("--engine", action="append", choices=ENGINES, help="may be repeated (default: all)")
    parser.add_argument(
        "--payload",
        action="append",
        metavar="SIZE",
        help=f"bytes of a page; may be repeated (default: {', '.join(_PAYLOADS)})",
    )
    parser.add_argument(
        "--threads", action="append", type=positive, help="client threads; may be repeated (default: 1 and 4)"
    )
    parser.add_argument("--total", metavar="SIZE", help="bytes each mode moves in a round (default: 64MiB)")
    parser.add_argument("--batch", type=positive, help="pages per call at most (default: 128, 16 MiB of them at most)")
    parser.add_argument("--rounds", type=positive, help="measured rounds, after one warm-up round (default: 5)")
    parser.add_argument(
        "--minutes",
        type=positive,
        default=15,
        help="a longer run has fewer rounds, and says so (default: 15)",
    )
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes: shows that it works, no more")
    add_output_arguments(parser)
    parser.set_defaults(run=run)


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured: the arguments with their defaults filled in."""

    engines: tuple[str, ...]
    payloads: tuple[int, ...]
    threads: tuple[int, ...]
    total: int
    batch: int
    rounds: int
    minutes: int
    warm_ups: int = 1

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Settings:
        quick: bool = arguments.quick
        payloads = arguments.payload or (_PAYLOADS[:1] if quick else _PAYLOADS)
        return cls(
            engines=tuple(arguments.engine or ENGINES),
            payloads=tuple(parse_size(text, "--payload") for text in payloads),
            threads=tuple(arguments.threads or (_THREADS[:1] if quick else _THREADS)),
            total=parse_size(arguments.total or ("2MiB" if quick else "64MiB"), "--total"),
            batch=arguments.batch or (8 if quick else 128),
            rounds=arguments.rounds or (2 if quick else 5),
            minutes=arguments.minutes,
        )

    def case(self, payload: int, threads: int) -> Case:
        # Memory of a batch is bounded: 128 pages of 4 MiB would be half a gigabyte a thread, twice.
        batch = max(1, min(self.batch, (16 << 20) // payload))
        batches = max(1, -(-self.total // (payload * threads * batch)))
        return Case(payload, threads, batch, batches)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print, write; 0, or 1 when nothing could be measured, or a contender failed or answered wrongly (it then
    has no figures)."""
    settings = Settings.of(arguments)
    machine = machine_facts(Path.cwd(), _PACKAGES)
    started = time.monotonic()
    engines = [engine for engine in all_engines() if engine.name in settings.engines]
    contenders = [contender for engine in engines for contender in engine.contenders]
    results = Results(frozenset(c.name for c in contenders if c.ours), frozenset(c.name for c in contenders if c.floor))
    clock = Clock(60.0 * settings.minutes, len(engines) * len(settings.payloads) * len(settings.threads))
    for engine in engines:
        if engine.missing:
            results.leave_out(engine.name, "", engine.missing)
            continue
        try:
            with terminated_in_order(), serving(engine) as place:
                _measure_engine(engine, place, settings, clock, results)
        except BenchmarkError as error:
            results.leave_out(engine.name, "", f"failed: {error}")
            results.failures.append(str(error))
    for table in tables(results):
        print(f"\n{table.text()}")
    for reason in absent(results):
        print(f"not measured: {reason}")
    print(f"\n{time.monotonic() - started:.0f} s")
    _write(arguments, settings, machine, results)
    for failure in results.failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if results.failures or not results.samples else 0


def _measure_engine(engine: Engine, place: Any, settings: Settings, clock: Clock, results: Results) -> None:
    able = {contender.name: contender for contender in engine.contenders if contender.missing is None}
    for contender in engine.contenders:
        if contender.missing:
            results.leave_out(engine.name, contender.name, contender.missing)
    for payload in settings.payloads:
        for threads in settings.threads:
            case = settings.case(payload, threads)
            clock.begin_point()
            memory = [Pages(payload, case.batch, seed) for seed in range(threads)]
            with ExitStack() as stack:
                clients = _open(engine, able, place, memory, results, stack)
                _take_turns(engine, able, clients, case, memory, settings, clock, results)


def _open(
    engine: Engine,
    able: dict[str, Contender],
    place: Any,
    memory: Sequence[Pages],
    results: Results,
    stack: ExitStack,
) -> dict[str, PoolClient]:
    clients: dict[str, PoolClient] = {}
    for name, contender in list(able.items()):
        try:
            clients[name] = contender.open(place, memory)
        except (HicacheExtError, OSError, ImportError) as error:
            _drop(engine, able, name, error, results)
        else:
            stack.callback(clients[name].close)
    return clients


def _take_turns(
    engine: Engine,
    able: dict[str, Contender],
    clients: dict[str, PoolClient],
    case: Case,
    memory: Sequence[Pages],
    settings: Settings,
    clock: Clock,
    results: Results,
) -> None:
    title = f"{engine.name}, pages of {format_size(case.payload)}, {case.threads} thread(s)"
    shown = 0
    for round_number, name, counts in interleaved(list(clients), settings.rounds, settings.warm_ups):
        if round_number != shown:
            if clock.over and shown > settings.warm_ups:
                print(f"  {title}: no time for more than {shown - settings.warm_ups} rounds", flush=True)
                results.shortened.append(f"{title}: {shown - settings.warm_ups} rounds for want of time")
                break
            shown = round_number
            print(f"  {title}: round {shown} of {settings.warm_ups + settings.rounds}", flush=True)
        if name not in able:
            continue
        turn = f"{case.payload}/{case.threads}/{round_number}"
        try:
            samples = measure(able[name], clients[name], case, memory, turn)
        except (BenchmarkError, OSError) as error:
            _drop(engine, able, name, error, results)
            continue
        for mode, sample in samples.items():
            if counts:
                results.add(Point(engine.name, mode, case.payload, case.threads), name, sample)


def _drop(engine: Engine, able: dict[str, Contender], name: str, error: Exception, results: Results) -> None:
    """A contender that fails has no figures for this engine."""
    del able[name]
    results.leave_out(engine.name, name, f"failed: {error}")
    results.failures.append(f"{engine.name}, {name}: {error}")


def _write(arguments: argparse.Namespace, settings: Settings, machine: dict[str, Any], results: Results) -> None:
    document = {
        "benchmark": "pool",
        "date": today(),
        "command": command_line(),
        "machine": machine,
        "settings": asdict(settings),
        "failures": results.failures,
        "shortened": results.shortened,
        "results": list(entries(results)),
    }
    write_outputs(arguments, document, lambda command: markdown(document, results, command), lambda: panels(results))

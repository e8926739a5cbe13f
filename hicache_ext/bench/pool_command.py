"""``hicache-ext bench pool``: what the pool tiers of a configuration give on this machine."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hicache_ext.bench.comparison import Baseline, Measured, Point, Results, Throughput, Turns
from hicache_ext.bench.harness import Clock
from hicache_ext.bench.pool_measuring import MODES, Case, Contender, Engine, OurClient, Pages, measure, serving
from hicache_ext.bench.report import Report, add_output_arguments, machine_facts, positive
from hicache_ext.config import load_config
from hicache_ext.config.units import format_size, parse_size
from hicache_ext.errors import BenchmarkError, ConfigError, HicacheExtError
from hicache_ext.runtime.signals import terminated_in_order
from hicache_ext.storage.contract.registry import open_tier
from hicache_ext.storage.tiers.file.config import FileTierConfig

_PAYLOADS = ("128KiB", "1MiB", "4MiB")
_THREADS = (1, 4)
_PACKAGES = ("hicache-ext", "obstore", "redis", "mooncake-transfer-engine", "xxhash", "numpy")
_METHOD = """\
The same pages for every contender, between host memory of this process and the store. Rounds are interleaved,
{warm_ups} warm-up round thrown away; the column says how many were measured, of {rounds} that were asked for: medians,
quartiles in brackets. A batch of {batch} pages is one call; with several threads each makes its own calls at the same
time. What was read is compared byte for byte outside the timed part. CPU is this process's, not the server's. MB are
10^6 bytes of payload. Ratios above 1 are faster.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", type=Path, metavar="CONFIG", help="a configuration; its tiers are written to and cleaned again"
    )
    parser.add_argument(
        "--tier", action="append", metavar="NAME", help="may be repeated (default: all that are not of type file)"
    )
    add_measuring_arguments(parser)
    parser.set_defaults(run=run)


def add_measuring_arguments(parser: argparse.ArgumentParser) -> None:
    """What is moved, for how long, and where the figures go."""
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
        "--minutes", type=positive, default=15, help="a longer run has fewer rounds, and says so (default: 15)"
    )
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes: shows that it works, no more")
    add_output_arguments(parser)


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured: the arguments with their defaults filled in."""

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
            payloads=tuple(parse_size(text, "--payload") for text in payloads),
            threads=tuple(arguments.threads or (_THREADS[:1] if quick else _THREADS)),
            total=parse_size(arguments.total or ("2MiB" if quick else "64MiB"), "--total"),
            batch=arguments.batch or (8 if quick else 128),
            rounds=arguments.rounds or (2 if quick else 5),
            minutes=arguments.minutes,
        )

    def cases(self) -> list[Case]:
        return [self._case(payload, threads) for payload in self.payloads for threads in self.threads]

    def _case(self, payload: int, threads: int) -> Case:
        # Memory of a batch is bounded: 128 pages of 4 MiB would be half a gigabyte a thread, twice.
        batch = max(1, min(self.batch, (16 << 20) // payload))
        batches = max(1, -(-self.total // (payload * threads * batch)))
        return Case(payload, threads, batch, batches)


def run(arguments: argparse.Namespace) -> int:
    """Measure the tiers of the configuration beside each other; see ``compare``."""
    # A path: an inline configuration would stand, secrets and all, in the command line that a report holds.
    tiers = load_config(arguments.config).tiers
    for name in arguments.tier or ():
        if name not in tiers:
            raise ConfigError("--tier", f"no tier is named {name!r}", ", ".join(tiers))
    chosen = arguments.tier or [name for name, tier in tiers.items() if not isinstance(tier, FileTierConfig)]
    if not chosen:
        raise ConfigError("--tier", "every tier of the configuration is of type file", "the name of one of them")

    def opener(name: str) -> Callable[[Any, Sequence[Pages]], OurClient]:
        return lambda place, memory: OurClient(open_tier(name, tiers[name]))

    contenders = tuple(Contender(f"{name} ({tiers[name].type})", opener(name), ours=True) for name in chosen)
    engine = Engine("tiers", lambda directory: nullcontext(), contenders)
    return compare(arguments, [engine], hidden={arguments.config: "CONFIG"})


def compare(
    arguments: argparse.Namespace,
    engines: Sequence[Engine],
    method: str = "",
    hidden: Mapping[Path, str] | None = None,
) -> int:
    """Measure, print, write; 0, or 1 when nothing could be measured, or a contender failed or answered wrongly (it then
    has no figures). ``method`` is what the page says of the contenders, ``hidden`` the paths
    that it does not name."""
    settings = Settings.of(arguments)
    machine = machine_facts(Path.cwd(), _PACKAGES)
    started = time.monotonic()
    contenders = [contender for engine in engines for contender in engine.contenders]
    own = frozenset(contender.name for contender in contenders if not contender.ours and not contender.floor)
    baselines = (Baseline("own client", "ratio_to_own_client", own),) if own else ()
    results = Results(tuple(dict.fromkeys(contender.name for contender in contenders)), baselines)
    clock = Clock(60.0 * settings.minutes, len(engines) * len(settings.cases()))
    turns = Turns(settings.rounds, settings.warm_ups, clock, results)
    for engine in engines:
        if engine.missing:
            results.absent[engine.name] = engine.missing
            continue
        try:
            with terminated_in_order(), serving(engine) as place:
                _measure_engine(engine, place, settings, turns)
        except BenchmarkError as error:
            results.absent[engine.name] = f"failed: {error}"
            results.failures.append(str(error))
    report = Report(
        "pool",
        "Pool benchmark",
        machine,
        {"settings": asdict(settings), **results.figures()},
        list(results.tables()),
        results.panels(),
        _METHOD.format(**asdict(settings)) + method,
        results.remarks(),
    )
    report.show()
    report.write(arguments, hidden)
    return results.print_end(time.monotonic() - started)


def _measure_engine(engine: Engine, place: Any, settings: Settings, turns: Turns) -> None:
    absent = turns.results.absent
    absent.update({f"{engine.name}, {c.name}": c.missing for c in engine.contenders if c.missing})
    able = [contender for contender in engine.contenders if not contender.missing]
    for case in settings.cases():
        memory = [Pages(case.payload, case.batch, seed) for seed in range(case.threads)]
        with ExitStack() as stack:
            ready: dict[str, Callable[[], Measured]] = {}
            for contender in list(able):
                try:
                    client = contender.open(place, memory)
                except (HicacheExtError, OSError, ImportError) as error:
                    able.remove(contender)
                    absent[f"{engine.name}, {contender.name}"] = f"failed: {error}"
                    turns.results.failures.append(f"{engine.name}, {contender.name}: {error}")
                    continue
                stack.callback(client.close)
                ready[contender.name] = partial(measure, contender.name, client, case, memory)
            plural = "s" if case.threads > 1 else ""
            title = f"{engine.name}: pages of {format_size(case.payload)} and {case.threads} thread{plural}"
            turns.take(title, {mode: point(engine.name, mode, case.payload, case.threads) for mode in MODES}, ready)


def point(engine: str, mode: str, payload: int, threads: int) -> Point:
    """Reading or writing pages of ``payload`` bytes with some client threads."""
    size, several = format_size(payload), "s" if threads > 1 else ""
    return Point(
        mode,
        f"{engine}, {mode}: pages of {size}, {threads} thread{several}",
        (("engine", engine), ("payload", payload), ("threads", threads)),
        Throughput("MB/s", 1e6),
        f"{engine}: {mode}, {threads} thread{several}",
        size,
    )

"""Pull or recompute on real servers, over a tier that is slowed step by step: time to first token of the same prompts.

::

    python -m tests.campaigns.pull_or_recompute --minutes 7 --report build/reports/pull-or-recompute.md

Three servers of the CPU rig, asked in turns, the others stopped (SIGSTOP) meanwhile: one without a pool, which
computes every prompt; one that pulls every hit; one with ``pd.pull: adaptive``. The last two share a directory that
holds all the prompts; L1 and L2 are emptied before every request. At each step every call of the tier, look-up or read,
takes a share of the recompute time longer. The first request after a step shows what a change costs before it is
noticed; it is reported beside the others.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hicache_ext.bench.frame import Quartiles, Table, interleaved, machine_facts, today, write_json
from hicache_ext.config.model import ExtraConfig
from hicache_ext.runtime.commands import terminated_in_order
from tests.campaigns.reporting import markdown
from tests.rigs import tier_faults
from tests.rigs.rig_server import RigServer
from tests.rigs.server_hooks import rig_environment
from tests.rigs.tiny_model import make_tiny_model

PROMPT_TOKENS = 4096
PAGE_SIZE = 32
"""SGLang asks for 128 pages at once: a prompt is one look-up and one read."""
PROMPTS = 3
SHARES = (0.0, 0.1, 0.25, 0.4, 0.6, 1.0, 2.0, 0.0)
"""What each call takes longer, in units of the recompute time. A pull is a look-up and a read: dear from 0.5 on."""
FEWEST_ROUNDS = 3
RECOMPUTE, PULL, ADAPTIVE = "recompute", "always pull", "adaptive"


@dataclass
class Step:
    """Times to first token in seconds, by server, in rounds; ``first`` are those of the round after the change."""

    share: float
    delay: float
    first: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=lambda: {RECOMPUTE: [], PULL: [], ADAPTIVE: []})
    pulled: list[bool] = field(default_factory=list)
    """Which of the counted requests the adaptive server pulled."""

    def ratio(self, base: str) -> Quartiles:
        pairs = zip(self.seconds[ADAPTIVE], self.seconds[base], strict=True)
        return Quartiles.of([adaptive / other for adaptive, other in pairs])


def main() -> None:
    parser = argparse.ArgumentParser(description="Pull or recompute over a tier that is slowed step by step.")
    parser.add_argument("--minutes", type=float, default=7)
    parser.add_argument("--report", type=Path, help="a .md file to write; .json goes beside it")
    arguments = parser.parse_args()
    deadline = time.monotonic() + 60 * arguments.minutes
    with terminated_in_order(), tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        with _servers(directory) as servers:
            steps = _measure(servers, directory / "fault", deadline)
        facts = machine_facts(directory, ("sglang", "torch"))
    table = _table(steps)
    print(table.text())
    if arguments.report is not None:
        _report(arguments.report, arguments.minutes, table, steps, facts)


@contextmanager
def _servers(directory: Path) -> Iterator[dict[str, RigServer]]:
    """All three, frozen."""
    model = make_tiny_model(directory / "model", layers=8, hidden_size=256)
    fault = rig_environment(
        {tier_faults.VARIABLE: f"file:{directory / 'fault'}"}, [tier_faults.__name__, "tests.rigs.quick_pd"]
    )

    def server(name: str, pull: dict[str, Any] | None) -> RigServer:
        return RigServer(
            model,
            log_file=directory / f"{name}.log",
            page_size=PAGE_SIZE,
            storage_backend=None if pull is None else "dynamic",
            extra_config=None if pull is None else _config(directory, pull),
            environment=fault,
        )

    servers = {
        RECOMPUTE: server(RECOMPUTE, None),
        PULL: server(PULL, {"mode": "off"}),
        ADAPTIVE: server(ADAPTIVE, {"mode": "adaptive", "min_tokens": 64}),
    }
    try:
        starting = [threading.Thread(target=one.start) for one in servers.values()]
        for thread in starting:
            thread.start()
        for thread in starting:
            thread.join()
        for one in servers.values():
            one.freeze()
        yield servers
    finally:
        for one in servers.values():
            one.stop()


def _config(directory: Path, pull: dict[str, Any]) -> dict[str, Any]:
    tier = {"type": "file", "path": str(directory / "pool"), "capacity": "1GiB", "layout": "pages"}
    return ExtraConfig.around({"tiers": {"pool": tier}, "pd": {"pull": pull}})


def _measure(servers: dict[str, RigServer], fault: Path, deadline: float) -> list[Step]:
    tier_faults.direct(fault, "")
    for number in range(PROMPTS):
        for server in servers.values():
            _ask(server, number)
    computing = statistics.median(_ask(servers[RECOMPUTE], number)[0] for number in (*range(PROMPTS), 0, 1))
    print(f"computing {PROMPT_TOKENS} tokens takes {computing * 1e3:.0f} ms", flush=True)
    steps: list[Step] = []
    for place, share in enumerate(SHARES):
        step = Step(share, share * computing)
        tier_faults.direct(fault, f"slow:{step.delay}" if share else "")
        until = time.monotonic() + (deadline - time.monotonic()) / (len(SHARES) - place)
        for round_number, name, counts in interleaved(list(step.seconds), 1000):
            if name == RECOMPUTE and round_number > FEWEST_ROUNDS + 1 and time.monotonic() > until:
                break
            seconds, pulled = _ask(servers[name], round_number % PROMPTS)
            if not counts:
                step.first[name] = seconds
                continue
            step.seconds[name].append(seconds)
            if name == ADAPTIVE:
                step.pulled.append(pulled)
        whole = min(len(seconds) for seconds in step.seconds.values())
        step.seconds = {name: seconds[:whole] for name, seconds in step.seconds.items()}
        del step.pulled[whole:]
        print(_table([step]).text().splitlines()[-1], flush=True)
        steps.append(step)
    return steps


def _ask(server: RigServer, number: int) -> tuple[float, bool]:
    """Time to first token of a prompt with nothing of it in L1 and L2, and whether it came from the pool."""
    prompt = [(number * 31 + 7 * place * place + 3 * place) % 250 for place in range(PROMPT_TOKENS)]
    server.thaw()
    server.flush_cache()
    answer = server.generate(prompt, 1)
    server.flush_cache()  # waits for what is still being written
    server.freeze()
    return answer.time_to_first_token, answer.cached.storage > 0


def _table(steps: list[Step]) -> Table:
    rows = tuple(
        (
            f"{step.delay * 1e3:.0f} ms",
            *(_cell(step, name) for name in step.seconds),
            _ratio(step.ratio(RECOMPUTE)),
            _ratio(step.ratio(PULL)),
            f"{sum(step.pulled)} of {len(step.pulled)}",
        )
        for step in steps
    )
    headers = ("each call longer by", RECOMPUTE, PULL, ADAPTIVE, "adaptive / recompute", "adaptive / pull", "pulled")
    return Table("Time to first token, ms: median (first request after the change)", headers, rows)


def _cell(step: Step, name: str) -> str:
    return f"{statistics.median(step.seconds[name]) * 1e3:.0f} ({step.first[name] * 1e3:.0f})"


def _ratio(spread: Quartiles) -> str:
    return f"{spread.median:.2f} ({spread.lower:.2f} to {spread.upper:.2f})"


def _report(file: Path, minutes: float, table: Table, steps: list[Step], facts: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"""# Pull or recompute over a tier that slows

`python -m tests.campaigns.pull_or_recompute --minutes {minutes:g} --report {file}`, {today()[:10]}, \
{facts["cpus"]} cores, Linux {facts["kernel"].partition("-")[0]}, \
SGLang {facts["packages"]["sglang"]} on CPU with a tiny model, prompts \
of {PROMPT_TOKENS} tokens. How it is measured stands at the top of that file. Ratios are medians (quartiles) of ratios \
within a round; "pulled" counts requests of the adaptive server.

{markdown(table)}
""")
    document = {"date": today(), "machine": facts, "prompt_tokens": PROMPT_TOKENS, "steps": [asdict(s) for s in steps]}
    write_json(file.with_suffix(".json"), document)


if __name__ == "__main__":
    main()

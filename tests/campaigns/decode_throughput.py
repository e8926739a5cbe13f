"""Does writing slow decoding? One prefill node, decode nodes with and without the writer, the same batches in turns.

::

    python -m tests.campaigns.decode_throughput --minutes 11 --report build/reports/decode-throughput.md
    python -m tests.campaigns.decode_throughput --model qwen3_next --minutes 8 --report build/reports/decode-hybrid.md

Arms: two decode nodes without offload (what they differ by is the noise of the machine; their mean is what the others
are compared with), one with SGLang's own, one with our writer, whose pool is healthy, dead from before the batch, dies
in the middle of it, or takes half a second longer for every call. In each round every arm decodes the same batch once,
in rotated order; servers that are not measured are stopped (SIGSTOP): on two cores, six that poll leave little for the
one that works. SGLang's own offload takes no hybrid models. Rounds go on until the time is up. A figure is generated
tokens over the time between the batch's first token and its end; the scheduler thread's time is taken in the decode
nodes, step by step, and so are the seconds from an answer's last token until its last whole page can be read by others.
Needs root (network namespace).
"""

from __future__ import annotations

import argparse
import re
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hicache_ext.bench.frame import Quartiles, Table, interleaved, machine_facts, number, today, write_json
from hicache_ext.config.model import ExtraConfig
from hicache_ext.runtime.commands import terminated_in_order
from tests.campaigns.reporting import markdown
from tests.rigs import step_costs, tier_faults
from tests.rigs.pd_pair import PdGeneration, PdPair, decode_node
from tests.rigs.rig_server import RigServer
from tests.rigs.server_hooks import MODULES, rig_environment
from tests.rigs.tiny_hybrid import ARGUMENTS, DECODE_ARGUMENTS, KINDS, make_tiny_hybrid
from tests.rigs.tiny_model import make_tiny_model

BATCH = 6
PROMPT_TOKENS = dict.fromkeys(("llama", *KINDS), 96) | {"qwen3_next": 320}
"""By kind. Of a prompt with recurrent states, prefill nodes store what lies before the last state."""
TOKENS = 512
SETTLE = 2.0
"""Seconds after a batch over a faulty pool: what waits is written, the breaker closes."""
WITHOUT = "without offload"
SECOND = "without offload, second server"
BASE = (WITHOUT, SECOND)


@dataclass(frozen=True)
class Arm:
    node: str
    fault: str = ""
    dies: bool = False


ARMS = {
    WITHOUT: Arm("without"),
    SECOND: Arm("second"),
    "SGLang's own offload": Arm("sglang"),
    "writer": Arm("writer"),
    "writer, dead pool": Arm("writer", "dead"),
    "writer, dying pool": Arm("writer", dies=True),
    "writer, slow pool": Arm("writer", "slow:0.5"),
}


@dataclass
class Measured:
    """Of one arm: tokens per second by batch, and the scheduler's microseconds by step of each batch."""

    rates: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    steps: list[list[float]] = field(default_factory=list)
    readable: list[float] = field(default_factory=list)
    """Seconds, by answer that was written."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Decode throughput with and without the decode writer.")
    parser.add_argument("--model", choices=tuple(PROMPT_TOKENS), default="llama", help="kind of tiny model")
    parser.add_argument("--minutes", type=float, default=11, help="until the last round begins")
    parser.add_argument("--report", type=Path, help="a .md file to write; the figures go beside it as .json")
    arguments = parser.parse_args()
    deadline = time.monotonic() + 60 * arguments.minutes
    with terminated_in_order(), tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        with _nodes(arguments.model, directory) as (pair, nodes):
            measured = _measure(pair, nodes, directory, deadline, PROMPT_TOKENS[arguments.model])
        said = _said(directory / "writer.log", r"decode writer: (\{.*\})")
        facts = machine_facts(directory, ("sglang", "torch"))
    if not re.search("page.stored", said) or not re.search("page.(error|rejected)", said):
        raise SystemExit(f"the writer wrote nothing, or its pool never failed: {said}")
    table = _table(measured)
    print(table.text())
    print(said)
    if arguments.report is not None:
        _report(arguments, table, measured, said, facts)


@contextmanager
def _nodes(kind: str, directory: Path) -> Iterator[tuple[PdPair, dict[str, RigServer]]]:
    """The pair and its decode nodes, all warm; those that are not needed at once are frozen."""
    model = make_tiny_model(directory / "model") if kind == "llama" else make_tiny_hybrid(directory / "model", kind)
    ours = ARGUMENTS.get(kind, ())
    small = ("--max-total-tokens", "8192", *ours, *DECODE_ARGUMENTS.get(kind, ()))
    modules = [*MODULES, "tests.rigs.hybrid_on_cpu"] if kind in KINDS else MODULES
    pair = PdPair(
        model,
        directory=directory,
        prefill_config=_config(directory, "ours"),
        decode_offload=False,
        prefill_arguments=ours,
        decode_arguments=small,
        environment=rig_environment(modules=modules),
    )

    def node(name: str, config: dict[str, Any] | None, environment: dict[str, str] | None = None) -> RigServer:
        return decode_node(
            model,
            log_file=directory / f"{name}.log",
            namespace=pair.namespace,
            storage_backend=None if config is None else "dynamic",
            config=config,
            arguments=small,
            environment=rig_environment(
                {step_costs.VARIABLE: str(directory / f"{name}.steps"), **(environment or {})}, modules
            ),
        )

    fault = {tier_faults.VARIABLE: f"file:{directory / 'fault'}"}
    nodes = {
        "without": pair.decode,
        "second": node("second", None),
        **({} if kind in KINDS else {"sglang": node("sglang", _config(directory, "sglang"))}),
        "writer": node("writer", _config(directory, "ours"), fault),
    }
    with pair:
        try:
            for name, server in nodes.items():
                if server is not pair.decode:
                    server.start()
                # The first request of a node meets connections that are not open yet and takes ten seconds.
                _decode_batch(pair, server, f"first-{name}", PROMPT_TOKENS[kind])
                server.freeze()
            yield pair, nodes
        finally:
            _all_at_once([server.stop for server in nodes.values() if server is not pair.decode])


def _measure(
    pair: PdPair, nodes: dict[str, RigServer], directory: Path, deadline: float, prompt_tokens: int
) -> dict[str, Measured]:
    arms = [name for name, arm in ARMS.items() if arm.node in nodes]
    measured = {name: Measured() for name in arms}
    offsets: dict[str, int] = {}
    fault_file = directory / "fault"
    half_a_batch = 1.0
    last_round = 0
    for round_number, name, counts in interleaved(arms, 1000):
        if round_number > last_round:
            if time.monotonic() > deadline and round_number > 2:
                break
            last_round = round_number
        arm = ARMS[name]
        node = nodes[arm.node]
        node.thaw()
        tier_faults.direct(fault_file, arm.fault)
        dying = threading.Timer(half_a_batch, tier_faults.direct, (fault_file, "dead"))
        if arm.dies:
            dying.start()
        started, cpu_before = time.monotonic(), node.cpu_seconds()
        rate = _decode_batch(pair, node, f"{round_number}-{name}", prompt_tokens)
        half_a_batch = (time.monotonic() - started) / 2
        cpu_seconds = node.cpu_seconds() - cpu_before
        dying.cancel()
        tier_faults.direct(fault_file, "")
        time.sleep(SETTLE if arm.fault or arm.dies else 0.3)
        node.freeze()
        costs, offsets[arm.node] = step_costs.read_step_costs(directory / f"{arm.node}.steps", offsets.get(arm.node, 0))
        # What was left of an earlier batch over a bad pool was written now, after the node had been stopped.
        since = time.monotonic() - started
        readable = [took for took in _seconds_until_readable(directory / f"{arm.node}.steps.readable") if took < since]
        if counts:
            measured[name].rates.append(rate)
            measured[name].cpu_seconds.append(cpu_seconds)
            measured[name].steps.append(costs)
            measured[name].readable += readable
            print(f"round {round_number - 1} {name:<32} {rate:8.1f} tokens/s, {cpu_seconds:.2f} CPU s", flush=True)
    whole = min(len(arm.rates) for arm in measured.values())
    return {
        name: Measured(arm.rates[:whole], arm.cpu_seconds[:whole], arm.steps[:whole], arm.readable)
        for name, arm in measured.items()
    }


def _decode_batch(pair: PdPair, node: RigServer, salt: str, prompt_tokens: int) -> float:
    """Tokens per second of one batch. Another salt each time: nothing is in the pool already."""
    answers: list[PdGeneration] = []
    ends: list[float] = []

    def ask(request: int) -> None:
        prompt = [(request * 13 + 7 * place) % 250 for place in range(prompt_tokens)]
        answer = pair.generate(prompt, TOKENS, decode=node, cache_salt=salt, sampling={"ignore_eos": True})
        ends.append(time.monotonic())
        answers.append(answer)

    _all_at_once([lambda request=request: ask(request) for request in range(BATCH)])
    firsts = [end - answer.total_time + answer.time_to_first_token for end, answer in zip(ends, answers, strict=True)]
    return BATCH * (TOKENS - 1) / (max(ends) - min(firsts))


def _seconds_until_readable(file: Path) -> list[float]:
    """What the server has noted since the last call (step_costs.py)."""
    if not file.exists():
        return []
    seconds = [float(line) for line in file.read_text().splitlines()]
    file.unlink()
    return seconds


def _all_at_once(calls: Sequence[Callable[[], Any]]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _config(directory: Path, writer: Literal["ours", "sglang"]) -> dict[str, Any]:
    """``sglang``: its own offload writes."""
    pool = {"type": "file", "path": str(directory / "pool"), "capacity": "1GiB"}
    return ExtraConfig.around({"tiers": {"pool": pool}, "pd": {"write": {"enabled": writer == "ours"}}})


def _said(log: Path, pattern: str) -> str:
    found = re.findall(pattern, log.read_text(errors="replace"))
    return found[-1] if found else "-"


def _table(measured: dict[str, Measured]) -> Table:
    base_rates = _mean_of_rounds([measured[name].rates for name in BASE])
    base_cpu = _mean_of_rounds([measured[name].cpu_seconds for name in BASE])
    rows = []
    for name, arm in measured.items():
        rate = Quartiles.of(arm.rates)
        steps = [cost for batch in arm.steps for cost in batch]
        means = [statistics.fmean(batch) for batch in arm.steps if batch]
        rows.append(
            (
                name,
                f"{number(rate.median)} ({number(rate.lower)} to {number(rate.upper)})",
                f"{sum(arm.rates) / sum(base_rates):.3f}",
                _paired(arm.rates, base_rates),
                f"{sum(arm.cpu_seconds) / sum(base_cpu):.3f}",
                _paired(arm.cpu_seconds, base_cpu),
                number(statistics.median(means)) if means else "-",
                number(float(np.percentile(steps, 50))) if steps else "-",
                number(float(np.percentile(steps, 99))) if steps else "-",
                number(max(steps)) if steps else "-",
                f"{np.percentile(arm.readable, 50):.3f}" if arm.readable else "-",
                f"{np.percentile(arm.readable, 99):.3f}" if arm.readable else "-",
            )
        )
    headers = (
        *("decode node", "tokens/s", "ratio of sums", "of rounds", "CPU s, ratio of sums", "of rounds"),
        *("us a step, mean", "median", "99 %", "most", "s to a readable page, median", "99 %"),
    )
    return Table(f"Medians (quartiles) of {len(base_rates)} rounds", headers, tuple(rows))


def _mean_of_rounds(arms: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.fmean(values) for values in zip(*arms, strict=True)]


def _paired(values: Sequence[float], base: Sequence[float]) -> str:
    spread = Quartiles.of([value / other for value, other in zip(values, base, strict=True)])
    return f"{spread.median:.3f} ({spread.lower:.3f} to {spread.upper:.3f})"


def _report(
    arguments: argparse.Namespace, table: Table, measured: dict[str, Measured], said: str, facts: dict[str, Any]
) -> None:
    file = arguments.report
    text = f"""# Decode throughput with the decode writer

`python -m tests.campaigns.decode_throughput --model {arguments.model} --minutes {arguments.minutes:g} \
--report {file}`, {today()[:10]}, \
{facts["cpus"]} cores, Linux {facts["kernel"].partition("-")[0]}, \
SGLang {facts["packages"]["sglang"]} on CPU with a tiny {arguments.model}, batches \
of {BATCH} requests of {PROMPT_TOKENS[arguments.model]} tokens with {TOKENS} generated, pages of 16. How it is \
measured stands at the top of that file. Ratios are to the mean of the two servers without offload, whose own distance \
from 1 is the noise: of all rounds together, and of the rounds (median, quartiles). CPU time is that of all processes \
of the decode node during a batch; it says more than \
the rate where something else works on the machine. Four columns are microseconds of the scheduler thread \
that offload took, by step: all requests of the batch advance by one token in a step. The last two are the time from \
an answer's last token until its last whole page can be read by others; all answers of a batch end together.

{markdown(table)}

The writer's counters at the end, all its arms together: `{said}`
"""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    document = {
        "date": today(),
        "machine": facts,
        "model": arguments.model,
        "batch": {"requests": BATCH, "prompt_tokens": PROMPT_TOKENS[arguments.model], "generated": TOKENS},
        "arms": {
            name: {
                **asdict(ARMS[name]),
                "rates": arm.rates,
                "cpu_seconds": arm.cpu_seconds,
                "seconds_to_readable": arm.readable,
                "mean_step_us": [statistics.fmean(batch) for batch in arm.steps if batch],
            }
            for name, arm in measured.items()
        },
    }
    write_json(file.with_suffix(".json"), document)


if __name__ == "__main__":
    main()

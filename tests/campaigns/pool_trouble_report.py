"""What the time line of pool_trouble.py says: table, JSON and plot."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from hicache_ext.bench.report import Table, machine_facts, number, today, where_and_when, write_json

if TYPE_CHECKING:
    from tests.campaigns.pool_trouble import Observation, Phase, TimeLine

WANTED = 1.2
MOST_EXTRA = 1.2
"""Seconds that a first token may wait longer than on the server without a pool, at any moment."""
HEALTHY = "healthy"
_WITH_POOL, _WITHOUT = "with pool", "without"
_TINY = (
    "Healthy, a request of this tiny model may be dearer from the pool than computed: it computes a prompt in the time "
    "that SGLang takes to see a hit and fetch it. That is what the pull rule is for (docs/pd.md); it is off here. "
)


def write_report(line: TimeLine, arguments: argparse.Namespace, seconds: float) -> tuple[str, bool]:
    """The text, and whether everything wanted was seen. Files are written beside ``arguments.report``."""
    table, ratios = _table(line)
    wrong = sum(not seen.right for seen in line.observations)
    recoveries = [phase for phase in line.phases[1:] if phase.name == HEALTHY]
    unrecovered = [phase for phase in recoveries if phase.recovered is None]
    slower = {name: ratio for name, ratio in ratios.items() if ratio > WANTED}
    worst_table, extra = _worst(line)
    late = {name: seconds for name, seconds in extra.items() if seconds > MOST_EXTRA}
    well = not wrong and not unrecovered and not slower and not late
    verdict = [  # Markdown joins lines that follow each other: hence the list.
        f"Wrong answers: {wrong} of {len(line.observations)}.",
        f"Back in use without a restart: {len(recoveries) - len(unrecovered)} of {len(recoveries)} times.",
        f"Ratio above {WANTED} after the first deadline: {', '.join(slower) if slower else 'none'}.",
        f"A first token more than {MOST_EXTRA} s behind the other server's: {', '.join(late) if late else 'none'}.",
        f"All that is wanted was seen: {'yes' if well else 'NO'}.",
    ]
    command = (
        f"python -m tests.campaigns.pool_trouble --trouble {arguments.trouble:g} --healthy {arguments.healthy:g} "
        f"--period {arguments.period:g} --tokens {arguments.tokens} "
        + ("" if arguments.timeout is None else f"--timeout {arguments.timeout:g} ")
        + f"--delay {arguments.delay:g} --seed {arguments.seed}{' --real-model' if arguments.real_model else ''}"
    )
    facts = (
        f"`{command}`: {seconds:.0f} s, {os.cpu_count()} cores, Linux {platform.release().partition('-')[0]}, "
        f"{today()[:10]}."
    )
    counters = ", ".join(f"{amount:.0f} {name}" for name, amount in line.counters.items())
    sections = [
        "# A pool in trouble, under load",
        facts,
        f"Two SGLang servers (CPU, {'SmolLM2-135M' if arguments.real_model else 'tiny model'}) with a disk tier each, "
        "one of them with a Redis pool behind it "
        f"(`timeout` {line.timeout:g} s{'' if arguments.timeout else ', the default'}, guards and policies as by "
        f"default), get the same bursts of two {line.tokens}-token "
        "prompts: one that lies in the pool alone, and one that is new. Times to first token in ms, medians; *after "
        f"the deadline* counts the requests sent later than {line.timeout:g} s after the trouble began, which is when "
        f"the ratio is to be at most {WANTED}.",
        ("" if arguments.real_model else _TINY) + "While one server waits for a deadline the other is asked nothing.",
        table.markdown(),
        worst_table.markdown(),
        "*Longer than the same request* compares each request with the same prompt, asked of the other server in the "
        "same burst: the wait that the pool's trouble added to the unluckiest first token. A pool that is asked while "
        "it hangs costs what is left of one call's time, which is learnt from its earlier calls (docs/guards.md).",
        f"![Time to first token of both servers over time]({arguments.report.stem}.png)" if arguments.report else "",
        "\n".join(f"- {sentence}" for sentence in verdict),
        f"What the pool's tier counted: {counters}.",
        "What its breaker said:",
        "\n".join(f"- {at:.0f} s: {said}" for at, said in line.events),
    ]
    text = "\n\n".join(section for section in sections if section) + "\n"
    if arguments.report:
        report: Path = arguments.report
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_text(text)
        write_json(report.with_suffix(".json"), _document(line, ratios, command, report.parent))
        _plot(line, report.with_suffix(".png"))
    return text, well


def _table(line: TimeLine) -> tuple[Table, dict[str, float]]:
    """The table, and for each trouble the ratio after the first deadline."""
    rows: list[tuple[str, ...]] = []
    ratios: dict[str, float] = {}
    for phase in line.phases:
        inside = [seen for seen in line.observations if phase.begin <= seen.at < phase.end]
        later = _later(line, phase)
        pool, alone = _median(later, _WITH_POOL), _median(later, _WITHOUT)
        if phase.name != HEALTHY:
            ratios[phase.name] = pool / alone
        worst = max((seen.first_token for seen in inside if seen.server == _WITH_POOL), default=0.0)
        known = [seen for seen in inside if seen.server == _WITH_POOL and seen.known]
        rows.append(
            (
                f"{phase.begin:.0f} s: {phase.name}",
                str(len(inside)),
                number(pool * 1000),
                number(alone * 1000),
                f"{pool / alone:.2f}",
                number(_quantile(later, _WITH_POOL, 0.9) / _quantile(later, _WITHOUT, 0.9)),
                number(worst * 1000),
                f"{100 * sum(seen.stored_tokens > 0 for seen in known) / max(1, len(known)):.0f} %",
                str(sum(not seen.right for seen in inside)),
                _recovery(line.phases, phase),
            )
        )
    headers = (
        "phase",
        "requests",
        "with pool",
        "without",
        "ratio",
        "ratio of p90",
        "worst with pool",
        "from the pool",
        "wrong",
        "back after",
    )
    return Table("Time to first token, after the deadline", headers, tuple(rows)), ratios


def _worst(line: TimeLine) -> tuple[Table, dict[str, float]]:
    """The worst first token of each phase, and by how much it was later than the same request of the other server."""
    rows: list[tuple[str, ...]] = []
    extra: dict[str, float] = {}
    for phase in line.phases:
        seen = [one for one in line.observations if phase.begin <= one.at < phase.end]
        first_tokens = {
            server: {(one.burst, one.known): one.first_token for one in seen if one.server == server}
            for server in (_WITH_POOL, _WITHOUT)
        }
        pool, alone = first_tokens[_WITH_POOL], first_tokens[_WITHOUT]
        most = max((pool[request] - alone[request] for request in pool.keys() & alone.keys()), default=0.0)
        rows.append(
            (
                f"{phase.begin:.0f} s: {phase.name}",
                number(max(pool.values(), default=0.0) * 1000),
                number(max(alone.values(), default=0.0) * 1000),
                number(most * 1000),
            )
        )
        if phase.name != HEALTHY:
            extra[phase.name] = most
    headers = ("phase", "worst with pool", "worst without", "longer than the same request")
    return Table("Worst first token of each phase, ms, the first deadline included", headers, tuple(rows)), extra


def _later(line: TimeLine, phase: Phase) -> list[Observation]:
    """The requests of a phase; of a trouble those after the first deadline."""
    begin = phase.begin + (0 if phase.name == HEALTHY else line.timeout)
    return [seen for seen in line.observations if begin <= seen.at < phase.end]


def _recovery(phases: Sequence[Phase], phase: Phase) -> str:
    if phase.name != HEALTHY or phase is phases[0]:
        return ""
    return "not" if phase.recovered is None else f"{phase.recovered:.1f} s"


def _median(seen: Sequence[Observation], server: str) -> float:
    times = [one.first_token for one in seen if one.server == server]
    return statistics.median(times) if times else float("nan")


def _quantile(seen: Sequence[Observation], server: str, share: float) -> float:
    times = sorted(one.first_token for one in seen if one.server == server)
    return times[min(len(times) - 1, int(share * len(times)))] if times else float("nan")


def _document(line: TimeLine, ratios: dict[str, float], command: str, directory: Path) -> dict[str, object]:
    return {
        "command": command,
        "date": today(),
        "machine": machine_facts(directory, ("sglang", "torch", "redis")),
        "ratios_after_the_first_deadline": ratios,
        "most_seconds_longer_than_the_same_request": _worst(line)[1],
        "phases": [asdict(phase) for phase in line.phases],
        "events": line.events,
        "counters": line.counters,
        "requests": [
            {**asdict(seen), "at": round(seen.at, 4), "first_token": round(seen.first_token, 5)}
            for seen in line.observations
        ],
    }


def _plot(line: TimeLine, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(12, 5))
    for phase in line.phases:
        trouble = phase.name != HEALTHY
        if trouble:
            axis.axvspan(phase.begin, phase.end, color="C3", alpha=0.13, linewidth=0)
            axis.axvspan(phase.begin, min(phase.end, phase.begin + line.timeout), color="C3", alpha=0.13, linewidth=0)
        elif phase.recovered is not None and phase is not line.phases[0]:
            axis.axvspan(phase.begin, phase.begin + phase.recovered, color="C1", alpha=0.13, linewidth=0)
        axis.annotate(
            phase.name,
            ((phase.begin + phase.end) / 2, 1.01),
            xycoords=("data", "axes fraction"),
            ha="center",
            fontsize=8,
            color="C3" if trouble else "0.4",
        )
    for server, colour in ((_WITHOUT, "C7"), (_WITH_POOL, "C0")):
        seen = [one for one in line.observations if one.server == server]
        axis.plot(
            [one.at for one in seen], [one.first_token * 1000 for one in seen], ".", color=colour, ms=3, label=server
        )
        for phase in line.phases:
            later = _later(line, phase)
            if any(one.server == server for one in later):
                begin = min(one.at for one in later)
                axis.hlines(_median(later, server) * 1000, begin, phase.end, color=colour, linewidth=1.5)
        wrong = [one for one in seen if not one.right]
        if wrong:
            axis.plot([one.at for one in wrong], [one.first_token * 1000 for one in wrong], "x", color="red", ms=8)
    axis.set(xlabel="seconds", ylabel="time to first token, ms", yscale="log")
    axis.grid(alpha=0.3, which="both")
    axis.legend(loc="upper right")
    axis.set_xlim(0, max(phase.end for phase in line.phases))
    figure.text(
        0.01,
        0.01,
        f"A pool in trouble, under load. {where_and_when(machine_facts(file.parent))}. Red: trouble, darker until the "
        "first deadline; orange: over, until a request is served from the pool again; lines: medians.",
        fontsize=8,
        color="0.4",
    )
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(file, dpi=110, metadata={"Software": None})
    pyplot.close(figure)

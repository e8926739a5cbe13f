"""What the time line of pool_trouble.py says: tables, JSON and plot."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from hicache_ext.bench.frame import Table, machine_facts, number, today, write_json
from tests.campaigns.reporting import markdown, where_and_when
from tests.campaigns.trouble_load import (
    HEALTHY,
    NEW,
    NEXT,
    RETURNING,
    WITH_POOL,
    WITHOUT,
    Observation,
    Phase,
    TimeLine,
)

WANTED = 1.2
"""Of the medians of first tokens after the first deadline, with the pool and without."""
MOST_EXTRA = 1.2
"""Seconds that a first token may wait longer than on the server without a pool, at any moment."""
MOST_LINES = 5.0
"""A second, that the package writes into the log while a trouble lasts."""


def write_report(line: TimeLine, arguments: argparse.Namespace, seconds: float) -> tuple[str, bool]:
    """The text, and whether everything wanted was seen. Files are written beside ``arguments.report``."""
    troubles = [phase for phase in line.phases if phase.name != HEALTHY]
    recoveries = [phase for phase in line.phases[1:] if phase.name == HEALTHY]
    back = [phase for phase in recoveries if phase.recovered is not None]
    wrong = sum(not seen.right for seen in line.observations)
    slower = {phase.name: ratio for phase in troubles if (ratio := _ratio(line, phase, RETURNING, NEW)) > WANTED}
    late = {phase.name: extra for phase in troubles if (extra := _most_extra(line, phase)) > MOST_EXTRA}
    loud = [phase.name for phase in troubles if phase.log_lines > MOST_LINES * (phase.end - phase.begin)]
    well = not wrong and len(back) == len(recoveries) and not slower and not late and not loud
    verdict = [  # Markdown joins lines that follow each other: hence the list.
        f"Wrong answers: {wrong} of {len(line.observations)}.",
        f"Back in use without a restart: {len(back)} of {len(recoveries)} times.",
        f"Ratio above {WANTED} after the first deadline: {', '.join(slower) if slower else 'none'}.",
        f"A first token more than {MOST_EXTRA} s behind the other server's: {', '.join(late) if late else 'none'}.",
        f"More than {MOST_LINES:g} log lines a second: {', '.join(loud) if loud else 'none'}.",
        f"All that is wanted was seen: {'yes' if well else 'NO'}.",
    ]
    sections = [
        f"# A pool in trouble, under load: {line.engine}",
        f"`{_command(arguments)}`: {seconds:.0f} s; {where_and_when(machine_facts(Path.cwd()))}, "
        f"Linux {platform.release().partition('-')[0]}.",
        _method(line, arguments),
        *line.remarks,
        markdown(_table(line)),
        markdown(_worst(line)),
        "*Longer than the same request* compares each request with the same prompt, asked of the other server in the "
        "same burst: the wait that the pool's trouble added to the unluckiest first token. A pool that is asked while "
        "it hangs costs what is left of one call's time, which is learnt from its earlier calls (docs/guards.md). *Log "
        "lines* are those of this package on the server with the pool.",
        f"![Time to first token of both servers over time]({arguments.report.stem}.png)" if arguments.report else "",
        "\n".join(f"- {sentence}" for sentence in verdict),
        f"What the pool's tier counted: {', '.join(f'{n:.0f} {name}' for name, n in line.counters.items())}.",
        "What its breaker said:",
        "\n".join(f"- {at:.0f} s: {said}" for at, said in line.events) or "- nothing",
    ]
    text = "\n\n".join(section for section in sections if section) + "\n"
    if arguments.report:
        report: Path = arguments.report
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_text(text)
        write_json(report.with_suffix(".json"), _document(line, _command(arguments), report.parent))
        _plot(line, report.with_suffix(".png"))
    return text, well


def _command(arguments: argparse.Namespace) -> str:
    given = f"--engine {arguments.engine} --trouble {arguments.trouble:g} --healthy {arguments.healthy:g}"
    more = (
        f" --period {arguments.period:g} --tokens {arguments.tokens} --rate {arguments.rate:g} --late "
        f"{arguments.late:g} --flipped {arguments.flipped:g} --cut {arguments.cut:g} --seed {arguments.seed}"
    )
    timeout = "" if arguments.timeout is None else f" --timeout {arguments.timeout:g}"
    return f"python -m tests.campaigns.pool_trouble {given}{more}{timeout}{' --tiny' if arguments.tiny else ''}"


def _method(line: TimeLine, arguments: argparse.Namespace) -> str:
    default = ", the default" if arguments.timeout is None else ""
    return (
        f"Two SGLang servers ({'a tiny model' if arguments.tiny else 'SmolLM2-135M'}, {os.cpu_count()} cores) with a "
        f"disk tier each, one of them with a pool behind it (`timeout` {line.timeout:g} s{default}, guards and "
        "policies as by default), hold the same conversations: a user who comes back, whose "
        f"{line.tokens} tokens lie in the pool alone, and a new one who brings as many, both at once; then the next "
        f"question of both. Times to first token in ms, medians, of requests sent later than {line.timeout:g} s after "
        f"a trouble began; *ratio* is with the pool to without, to be at most {WANTED} for users who come back and new "
        "ones. While one server waits for a deadline the other is asked nothing. Histories are short, since two cores "
        "compute them; hence a `prefetch_threshold` of 64."
    )


# -- figures -----------------------------------------------------------------------------------------------------------


def _table(line: TimeLine) -> Table:
    rows = []
    for phase in line.phases:
        known = [
            seen
            for seen in line.observations
            if _in(seen, phase) and (seen.server, seen.user) == (WITH_POOL, RETURNING)
        ]
        served = f"{100 * sum(seen.stored_tokens > 0 for seen in known) / max(1, len(known)):.0f} %"
        later = _later(line, phase)
        pairs = [(_median(later, WITH_POOL, user), _median(later, WITHOUT, user)) for user in (RETURNING, NEW, NEXT)]
        rows.append(
            (
                f"{phase.begin:.0f} s: {phase.name}",
                str(len(known)),
                *(f"{_ms(pool)} / {_ms(alone)}" for pool, alone in pairs),
                f"{_ratio(line, phase, RETURNING, NEW):.2f}",
                served,
                str(sum(not seen.right for seen in line.observations if _in(seen, phase))),
                _recovery(line.phases, phase),
            )
        )
    headers = ("phase", "bursts", "comes back", "new", "next question", "ratio", "from the pool", "wrong", "back after")
    return Table("Time to first token, with the pool / without", headers, tuple(rows))


def _worst(line: TimeLine) -> Table:
    """The worst first token of each phase, and by how much it was later than the same request of the other server."""
    rows = []
    for phase in line.phases:
        seen = [one for one in line.observations if _in(one, phase)]
        worst = [max((one.first_token for one in seen if one.server == server), default=0.0) for server in _SERVERS]
        rows.append(
            (
                f"{phase.begin:.0f} s: {phase.name}",
                *(_ms(seconds) for seconds in worst),
                _ms(_most_extra(line, phase)),
                str(phase.log_lines),
            )
        )
    headers = ("phase", "worst with pool", "worst without", "longer than the same request", "log lines")
    return Table("Worst first token of each phase, ms, the first deadline included", headers, tuple(rows))


_SERVERS = (WITH_POOL, WITHOUT)


def _ratio(line: TimeLine, phase: Phase, *users: str) -> float:
    later = _later(line, phase)
    return _median(later, WITH_POOL, *users) / _median(later, WITHOUT, *users)


def _most_extra(line: TimeLine, phase: Phase) -> float:
    """The longest that a request of the phase waited longer than the same one of the other server."""
    seen = [one for one in line.observations if _in(one, phase)]
    pool, alone = (
        {(one.burst, one.place): one.first_token for one in seen if one.server == server} for server in _SERVERS
    )
    return max((pool[request] - alone[request] for request in pool.keys() & alone.keys()), default=0.0)


def _in(seen: Observation, phase: Phase) -> bool:
    return phase.begin <= seen.at < phase.end


def _later(line: TimeLine, phase: Phase) -> list[Observation]:
    """The requests of a phase; of a trouble those after the first deadline."""
    begin = phase.begin + (0 if phase.name == HEALTHY else line.timeout)
    return [seen for seen in line.observations if begin <= seen.at < phase.end]


def _recovery(phases: Sequence[Phase], phase: Phase) -> str:
    if phase.name != HEALTHY or phase is phases[0]:
        return ""
    return "not" if phase.recovered is None else f"{phase.recovered:.1f} s"


def _median(seen: Iterable[Observation], server: str, *users: str) -> float:
    times = [one.first_token for one in seen if one.server == server and one.user in users]
    return statistics.median(times) if times else float("nan")


def _ms(seconds: float) -> str:
    return number(seconds * 1000)


def _document(line: TimeLine, command: str, directory: Path) -> dict[str, object]:
    troubles = [phase for phase in line.phases if phase.name != HEALTHY]
    return {
        "command": command,
        "date": today(),
        "engine": line.engine,
        "machine": machine_facts(
            directory, ("sglang", "torch", "redis", "obstore", "mooncake-transfer-engine-non-cuda")
        ),
        "ratios_after_the_first_deadline": {phase.name: _ratio(line, phase, RETURNING, NEW) for phase in troubles},
        "most_seconds_longer_than_the_same_request": {phase.name: _most_extra(line, phase) for phase in troubles},
        "phases": [asdict(phase) for phase in line.phases],
        "events": line.events,
        "counters": line.counters,
        "requests": [
            {**asdict(seen), "at": round(seen.at, 4), "first_token": round(seen.first_token, 5)}
            for seen in line.observations
        ],
    }


# -- the picture -------------------------------------------------------------------------------------------------------

_COLOURS = {WITH_POOL: "#0072B2", WITHOUT: "#D55E00"}
_SHAPES = {RETURNING: "o", NEW: "s", NEXT: "."}


def _plot(line: TimeLine, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(14, 5.6))
    for phase in line.phases:
        trouble = phase.name != HEALTHY
        if trouble:
            axis.axvspan(phase.begin, phase.end, color="#CC79A7", alpha=0.2, linewidth=0)
            axis.axvspan(
                phase.begin, min(phase.end, phase.begin + line.timeout), color="#CC79A7", alpha=0.3, linewidth=0
            )
        elif phase.recovered is not None and phase is not line.phases[0]:
            axis.axvspan(phase.begin, phase.begin + phase.recovered, color="#E69F00", alpha=0.15, linewidth=0)
        axis.annotate(
            phase.name,
            ((phase.begin + phase.end) / 2, 1.01),
            xycoords=("data", "axes fraction"),
            ha="center",
            fontsize=8,
            color="#A0457A" if trouble else "0.4",
        )
    for server, colour in _COLOURS.items():
        for user, shape in _SHAPES.items():
            seen = [one for one in line.observations if (one.server, one.user) == (server, user)]
            axis.plot(
                [one.at for one in seen],
                [one.first_token * 1000 for one in seen],
                *(shape,),
                color=colour,
                ms=5 if shape == "." else 4,
                mfc="none" if shape == "s" else colour,
                label=f"{server}: {user}",
            )
        wrong = [one for one in line.observations if one.server == server and not one.right]
        if wrong:
            axis.plot([one.at for one in wrong], [one.first_token * 1000 for one in wrong], "x", color="red", ms=9)
    axis.set(xlabel="seconds", ylabel="time to first token, ms", yscale="log")
    axis.grid(alpha=0.3, which="both")
    axis.set_xlim(0, max(phase.end for phase in line.phases))
    figure.suptitle(f"A pool in trouble, under load: {line.engine}", y=0.985, fontsize=13)
    caption = where_and_when(machine_facts(file.parent))
    figure.text(0.5, 0.915, caption, ha="center", fontsize=8, color="0.35")
    figure.legend(loc="lower center", ncol=6, fontsize=8, bbox_to_anchor=(0.5, 0.03))
    figure.text(
        0.5,
        0.012,
        "Purple: trouble, darker until the first deadline. Orange: over, until the pool serves again.",
        ha="center",
        fontsize=8,
        color="0.4",
    )
    figure.tight_layout(rect=(0, 0.08, 1, 0.92))
    figure.savefig(file, dpi=100, metadata={"Software": None})
    pyplot.close(figure)

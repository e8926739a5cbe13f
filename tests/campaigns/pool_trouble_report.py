"""What the time line of pool_trouble.py says: tables and JSON."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from hicache_ext.bench.frame import Table, machine_facts, number, today, write_json
from tests.campaigns.reporting import command_of, markdown, where_and_when
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
        f"{command_of('pool_trouble', arguments)}: {seconds:.0f} s; {where_and_when(machine_facts(Path.cwd()))}, "
        f"Linux {platform.release().partition('-')[0]}.",
        _method(line, arguments),
        *line.remarks,
        markdown(_table(line)),
        markdown(_worst(line)),
        "*Longer than the same request* compares each request with the same prompt, asked of the other server in the "
        "same burst: the wait that the pool's trouble added to the unluckiest first token. A pool that is asked while "
        "it hangs costs what is left of one call's time, which is learnt from its earlier calls (docs/guards.md). *Log "
        "lines* are those of this package on the server with the pool.",
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
        write_json(report.with_suffix(".json"), _document(line, command_of("pool_trouble", arguments), report.parent))
    return text, well


def _method(line: TimeLine, arguments: argparse.Namespace) -> str:
    return (
        f"Two SGLang servers ({'a tiny model' if arguments.tiny else 'SmolLM2-135M'}, {os.cpu_count()} cores) with a "
        f"disk tier each, one of them with a pool behind it (`timeout` {line.timeout:g} s, guards and "
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

"""The report of the time line: what counts, and what makes it fail."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.campaigns.pool_trouble_report import write_report
from tests.campaigns.trouble_load import (
    NEW,
    NEXT,
    RETURNING,
    WITH_POOL,
    WITHOUT,
    Conversations,
    Observation,
    Phase,
    TimeLine,
)


@pytest.fixture
def arguments(tmp_path: Path) -> Any:
    return SimpleNamespace(
        engine="redis",
        tiny=False,
        trouble=20,
        healthy=10,
        period=1,
        seed=1,
        report=tmp_path / "pool-trouble.md",
    )


def a_line(
    *,
    with_pool: float = 0.05,
    recovered: float | None = 3.0,
    right: bool = True,
    deadline_costs: float = 1.0,
    log_lines: int = 4,
) -> TimeLine:
    """10 s healthy, 20 s killed whose first request waits for the deadline, 10 s healthy."""
    line = TimeLine(timeout=1, tokens=64, events=[(15.0, "is left out: it was killed")], counters={"get miss": 3})
    line.engine, line.remarks = "Redis", ["*Killed*: by the test."]
    line.phases = [
        Phase("healthy", 0, 10, 0.5),
        Phase("killed", 10, 30, None, log_lines),
        Phase("healthy", 30, 40, recovered),
    ]
    for second in range(40):
        phase = next(phase for phase in line.phases if phase.begin <= second < phase.end)
        for server in (WITH_POOL, WITHOUT):
            for place, user in enumerate((RETURNING, NEW, NEXT, NEXT)):
                deadline = server == WITH_POOL and second == 10 and user == RETURNING
                seconds = deadline_costs if deadline else with_pool if server == WITH_POOL else 0.05
                good = right or second != 20 or user != NEXT
                at = second + 0.1
                line.observations.append(
                    Observation(at, phase.name, server, user, seconds, 32, good, burst=second, place=place)
                )
    return line


def test_who_comes_back_has_a_history_of_the_pool_once_and_when_none_is_left_it_is_counted() -> None:
    conversations = Conversations(seed=1, tokens=8, question=2)
    known = [conversations.new(), conversations.new()]
    conversations.add_known(known)
    came = [conversations.returning() for _ in range(3)]
    assert [prompt[:8] for prompt in came[:2]] == known[::-1]
    assert came[2][:8] not in known
    assert {len(prompt) for prompt in came} == {10}
    assert conversations.ran_out == 1


@pytest.mark.thorough
def test_the_deadline_itself_does_not_count_and_everything_is_written(arguments: Any) -> None:
    text, well = write_report(a_line(), arguments, 40.0)
    assert well
    assert arguments.report.read_text() == text
    assert "| 10 s: killed | 20 | 50.0 / 50.0 | 50.0 / 50.0 | 50.0 / 50.0 | 1.00 | 100 % | 0 |" in text
    assert "| 10 s: killed | 1,000 | 50.0 | 950 | 4 |" in text
    assert "Wrong answers: 0 of 320." in text and "1 of 1 times" in text and "15 s: is left out" in text
    assert "*Killed*: by the test." in text and text.startswith("# A pool in trouble, under load: Redis\n")
    document = json.loads(arguments.report.with_suffix(".json").read_text())
    assert document["ratios_after_the_first_deadline"] == {"killed": pytest.approx(1.0)}
    assert len(document["requests"]) == 320


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("trouble", "sentence"),
    [
        ({"with_pool": 0.065}, "Ratio above 1.2 after the first deadline: killed."),
        ({"recovered": None}, "Back in use without a restart: 0 of 1 times."),
        ({"right": False}, "Wrong answers: 4 of 320."),
        ({"deadline_costs": 1.3}, "A first token more than 1.2 s behind the other server's: killed."),
        ({"log_lines": 101}, "More than 5 log lines a second: killed."),
    ],
)
def test_what_was_not_wanted_is_said_and_fails(arguments: Any, trouble: dict[str, Any], sentence: str) -> None:
    text, well = write_report(a_line(**trouble), arguments, 40.0)
    assert not well and sentence in text
    assert "All that is wanted was seen: NO." in text

"""The campaign of pools in trouble in its short form: every engine, one or two of its troubles, two real servers."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from tests.campaigns.pool_trouble import parser, run
from tests.campaigns.pool_trouble_report import MOST_EXTRA
from tests.campaigns.trouble_engines import BAD_LINK, FULL, REPLICA, missing
from tests.campaigns.trouble_load import HEALTHY, RETURNING, WITH_POOL, WITHOUT, TimeLine
from tests.rigs.own_network import NetworkUnavailable

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

MOST = MOST_EXTRA + 2.0
"""Seconds; other tests take the cores at the same time."""


def short(engine: str, *troubles: str) -> Namespace:
    words = ["--engine", engine, "--only", *troubles, "--trouble", "4", "--healthy", "2", "--period", "1", "--tiny"]
    return parser().parse_args(words)


@pytest.mark.parametrize(
    ("engine", "troubles"), [("redis", (REPLICA, BAD_LINK)), ("object", (FULL,)), ("mooncake", (BAD_LINK,))]
)
def test_a_pool_in_trouble_costs_no_answer_and_comes_back(
    engine: str, troubles: tuple[str, ...], tmp_path: Path
) -> None:
    if lacking := missing(engine):
        pytest.skip(f"missing: {lacking}")
    try:
        line = run(short(engine, *troubles), tmp_path)
    except NetworkUnavailable as error:
        pytest.skip(f"missing: {error}")
    assert [seen for seen in line.observations if not seen.right] == []
    assert [phase.name for phase in line.phases if phase.name != HEALTHY] == list(troubles)
    assert all(phase.recovered is not None for phase in line.phases if phase.name == HEALTHY)
    assert longest_wait(line) < MOST
    served = [seen for seen in line.observations if (seen.server, seen.user) == (WITH_POOL, RETURNING)]
    assert any(seen.stored_tokens for seen in served)


def longest_wait(line: TimeLine) -> float:
    """Of a request with the pool, behind the same one without."""
    first_tokens = {
        server: {(seen.burst, seen.place): seen.first_token for seen in line.observations if seen.server == server}
        for server in (WITH_POOL, WITHOUT)
    }
    return max(seconds - first_tokens[WITHOUT][request] for request, seconds in first_tokens[WITH_POOL].items())

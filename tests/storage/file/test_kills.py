"""Writers killed at random moments; the long form is ``python -m tests.campaigns.kill_writers``."""

from __future__ import annotations

import pytest

from tests.campaigns import kill_writers
from tests.rigs.container import namespaces_missing


@pytest.mark.slow
def test_killed_writers_leave_no_wrong_page_no_poisoned_key_and_a_right_account():
    found = kill_writers.run(kills=20, seed=7)
    assert {mode.name: findings.problems for mode, findings in found.items() if findings.problems} == {}
    assert sum(findings.kills for findings in found.values()) == 20
    assert sum(findings.killed_under_way for findings in found.values()) > 0, "no kill hit an operation"
    assert all(findings.hits > 0 for findings in found.values())


@pytest.mark.slow
@pytest.mark.skipif(namespaces_missing() is not None, reason=namespaces_missing() or "")
def test_writers_killed_in_containers_and_stopped_before_leave_the_same():
    found = kill_writers.run(kills=10, seed=8, contained=True, stops=True)
    assert {mode.name: findings.problems for mode, findings in found.items() if findings.problems} == {}
    assert sum(findings.kills for findings in found.values()) == 10
    assert sum(findings.killed_under_way for findings in found.values()) > 0, "no kill hit an operation"

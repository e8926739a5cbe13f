"""Processes killed at random moments; the long forms are ``make kills``."""

from __future__ import annotations

import pytest

from tests.campaigns import kill_slabs, kill_writers
from tests.rigs.container import namespaces_missing
from tests.rigs.workers import missing_for_namespaces


@pytest.mark.thorough
@pytest.mark.slow
def test_killed_writers_leave_no_wrong_page_no_poisoned_key_and_a_right_account():
    found = kill_writers.run(kills=20, seed=7)
    assert {mode.name: findings.problems for mode, findings in found.items() if findings.problems} == {}
    assert sum(findings.kills for findings in found.values()) == 20
    assert sum(findings.killed_under_way for findings in found.values()) > 0, "no kill hit an operation"
    assert all(findings.hits > 0 for findings in found.values())


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.skipif(namespaces_missing() is not None, reason=f"missing: {namespaces_missing()}")
def test_writers_killed_in_containers_and_stopped_before_leave_the_same():
    found = kill_writers.run(kills=10, seed=8, contained=True, stops=True)
    assert {mode.name: findings.problems for mode, findings in found.items() if findings.problems} == {}
    assert sum(findings.kills for findings in found.values()) == 10
    assert sum(findings.killed_under_way for findings in found.values()) > 0, "no kill hit an operation"


@pytest.mark.slow
def test_killed_processes_leave_sound_slabs_and_no_wrong_page():
    _assert_sound(kill_slabs.run(kills=30, seed=7))


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.skipif(missing_for_namespaces() is not None, reason=f"missing: {missing_for_namespaces()}")
def test_containers_killed_and_stopped_leave_sound_slabs_and_no_wrong_page():
    found = kill_slabs.run(kills=30, seed=8, namespaces=True, stops=True)
    _assert_sound(found)
    assert found.stops > 0


@pytest.mark.slow
@pytest.mark.thorough
def test_killed_writers_of_encoded_and_sealed_pages_leave_the_same():
    found = kill_writers.run(kills=10, seed=9, transforms=True)
    assert {mode.name: findings.problems for mode, findings in found.items() if findings.problems} == {}
    assert all(findings.hits > 0 for findings in found.values())


@pytest.mark.slow
@pytest.mark.thorough
def test_killed_processes_leave_sound_slabs_of_encoded_and_sealed_pages():
    _assert_sound(kill_slabs.run(kills=30, seed=10, transforms=True))


def _assert_sound(found: kill_slabs.Findings) -> None:
    assert found.problems == {}
    assert found.hits_beside_writers >= kill_slabs.HITS_BESIDE_WRITERS
    assert found.hits > found.hits_beside_writers

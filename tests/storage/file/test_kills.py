"""Processes killed at random moments; the long forms are ``make kills``."""

from __future__ import annotations

import pytest

from tests.campaigns import kills
from tests.rigs.workers import missing_for_namespaces

LAYOUTS = pytest.mark.parametrize("layout", ["slab", pytest.param("pages", marks=pytest.mark.thorough)])


@pytest.mark.slow
@LAYOUTS
def test_killed_processes_leave_no_wrong_page_no_poisoned_key_and_sound_files(layout: str):
    _assert_sound(kills.run(30, 7, layout), layout)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.skipif(missing_for_namespaces() is not None, reason=f"missing: {missing_for_namespaces()}")
@LAYOUTS
def test_containers_killed_and_stopped_leave_the_same(layout: str):
    found = kills.run(30, 8, layout, namespaces=True, stops=True)
    _assert_sound(found, layout)
    assert found.stops > 0


@pytest.mark.slow
@pytest.mark.thorough
@LAYOUTS
def test_killed_processes_leave_the_same_of_encoded_and_sealed_pages(layout: str):
    _assert_sound(kills.run(30, 10, layout, transforms=True), layout)


def _assert_sound(found: kills.Findings, layout: str) -> None:
    assert found.problems == {}
    assert found.hits_beside_writers >= kills.HITS_BESIDE_WRITERS
    assert found.hits > found.hits_beside_writers
    assert layout == "slab" or found.kills_under_way > 0, "no kill hit an operation"

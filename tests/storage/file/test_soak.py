"""The short form of the soak; the long one is ``make soak``."""

from __future__ import annotations

import pytest

from tests.campaigns import soak
from tests.rigs.workers import missing_for_namespaces


@pytest.mark.slow
@pytest.mark.thorough
def test_half_a_minute_of_faults_brings_no_wrong_byte_and_no_leak():
    _assert_sound(soak.run(seconds=27, seed=11, interval=0.5))


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.skipif(missing_for_namespaces() is not None, reason=f"missing: {missing_for_namespaces()}")
def test_half_a_minute_of_faults_in_containers_that_are_stopped_now_and_then_brings_no_wrong_byte_and_no_leak():
    found = soak.run(seconds=27, seed=12, interval=0.5, namespaces=True, stops=True)
    _assert_sound(found)
    assert found.stops > 0


@pytest.mark.slow
@pytest.mark.thorough
def test_half_a_minute_of_faults_on_page_files_and_packs_brings_no_wrong_byte_and_no_leak():
    found = soak.run(seconds=27, seed=13, interval=0.5, layout="pages")
    _assert_sound(found)
    assert found.packs["packs"] > 0


def _assert_sound(found: soak.Findings) -> None:
    assert dict(found.problems) == {}
    assert found.hits > 0
    assert found.stored > 0
    assert found.outages > 0, "no path went out of service"
    assert any(name.startswith("preadv:E") for name in found.faults)
    assert any(name.startswith("pwritev:E") for name in found.faults)

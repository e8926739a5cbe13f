"""Damaged files, devices that die and power cuts in short; the long forms are ``make damages``, ``make dying-devices``
and ``make power-loss``."""

from __future__ import annotations

import pytest

from tests.campaigns import damages, dying_devices, power_loss
from tests.rigs.loop_file_systems import FILE_SYSTEMS, missing_for

pytestmark = pytest.mark.slow


@pytest.fixture(params=FILE_SYSTEMS)
def file_system(request: pytest.FixtureRequest) -> str:
    if missing := missing_for(request.param):
        pytest.skip(f"missing: {missing}")
    return request.param


@pytest.mark.thorough
def test_whatever_is_damaged_every_key_can_be_stored_and_read_after_one_restart():
    found = damages.run(damages=50, seed=9)
    assert found.problems == {}, "\n\n".join(found.stories)
    assert set(found.layouts) == {"slab", "pages"}
    assert found.first_reads["HIT"] > 0


@pytest.mark.thorough
def test_a_device_that_dies_costs_its_path_while_it_is_away(file_system: str):
    found = dying_devices.run(runs=2, seed=9, file_systems=[file_system])
    assert found.problems == {}, "\n\n".join(found.stories)
    assert found.runs.total() == len(found.seconds_out) == len(found.seconds_back) > 1


@pytest.mark.thorough
@pytest.mark.parametrize("layout", power_loss.LAYOUTS)
def test_after_a_power_cut_pages_are_whole_and_what_was_synced_is_there(file_system: str, layout: str):
    found = power_loss.run(cuts=3, seed=9, file_systems=[file_system], layouts=[layout])
    assert found.problems == {}, "\n\n".join(found.stories)
    assert found.cuts.total() == 3
    assert found.on_disk.total() > 0


@pytest.mark.thorough
@pytest.mark.parametrize("layout", power_loss.LAYOUTS)
def test_after_a_power_cut_encoded_and_sealed_pages_are_whole_and_there(file_system: str, layout: str):
    found = power_loss.run(cuts=2, seed=9, file_systems=[file_system], layouts=[layout], transforms=True)
    assert found.problems == {}, "\n\n".join(found.stories)
    assert found.on_disk.total() > 0

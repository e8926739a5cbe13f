"""The short form of the soak; the long one is ``make soak``."""

from __future__ import annotations

import pytest

from tests.campaigns import soak


@pytest.mark.slow
def test_half_a_minute_of_faults_brings_no_wrong_byte_and_no_leak():
    found = soak.run(seconds=27, seed=11, interval=0.5)
    assert dict(found.problems) == {}
    assert found.hits > 0
    assert found.stored > 0
    assert found.outages > 0, "no path went out of service"
    assert any(name.startswith("preadv:E") for name in found.faults)
    assert any(name.startswith("pwritev:E") for name in found.faults)

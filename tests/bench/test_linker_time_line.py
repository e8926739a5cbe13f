"""The time line of benchmarks/bench_linker.py, from what the rig notes in a server."""

from __future__ import annotations

import pytest

from benchmarks.bench_linker import time_line
from tests.rigs.layer_times import LayerEvent

EVENTS = [
    LayerEvent("starts", 4, -1, 9.9, 10.0),
    LayerEvent("waits", 4, 0, 10.01, 10.03),
    LayerEvent("lands", 4, 0, 10.0299, 10.03),
    LayerEvent("lands", 4, 1, 10.0399, 10.04),
    LayerEvent("waits", 4, 0, 10.05, 10.05),
    LayerEvent("waits", 4, 1, 10.06, 10.06),
]


def test_a_layer_is_waited_for_from_the_first_time_that_the_forward_asks_for_it() -> None:
    first, second = time_line(EVENTS)
    assert (first.landed, first.wait_began, first.waited) == pytest.approx((30, 10, 20))
    assert (second.landed, second.wait_began, second.waited) == pytest.approx((40, 60, 0))

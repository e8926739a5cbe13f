"""Where the time of a restored turn goes: the parts of a turn add up to it, whatever was noted."""

from __future__ import annotations

import pytest

pytest.importorskip("sglang", reason="missing: sglang")

from benchmarks.restored_turn import PARTS, parts_of
from tests.rigs.turn_times import Step

RESTORED = [
    Step("arrives", 1.0, 1.1),
    Step("tier looks up", 1.2, 1.3),
    Step("is looked for", 1.15, 1.35),
    Step("tier reads", 1.4, 1.5),
    Step("tier reads", 1.5, 1.6),
    Step("prefetch is seen", 1.7, 1.7),
    Step("is loaded", 1.8, 1.9),
    Step("is computed", 2.0, 3.0),
    Step("is computed", 3.1, 3.2),
]


def test_each_part_of_a_restored_turn_is_what_was_noted_of_it() -> None:
    parts = parts_of(RESTORED, 0.5, 3.25)
    assert list(parts.values()) == pytest.approx([0.5, 0.1, 0.1, 0.2, 0.3, 0.2, 0.1, 1.0, 0.25])
    assert sum(parts.values()) == pytest.approx(3.25 - 0.5)


def test_a_turn_on_the_device_has_no_part_in_storage_and_adds_up_as_well() -> None:
    parts = parts_of([step for step in RESTORED if step.name in ("arrives", "is computed")], 0.5, 3.25)
    assert sum(parts.values()) == pytest.approx(3.25 - 0.5)
    assert {name for name, seconds in parts.items() if not seconds} == set(PARTS[1:5]) | {PARTS[6]}


def test_what_comes_after_the_prompt_was_computed_does_not_count() -> None:
    later = [*RESTORED, Step("is loaded", 3.3, 3.9), Step("prefetch is seen", 3.4, 3.4)]
    assert parts_of(later, 0.5, 3.25) == parts_of(RESTORED, 0.5, 3.25)

"""The conformance suite finds each of the planted faults by the case that is named for it.

Honest stores pass all cases: test_conformance.py runs them over the same wrapper, memory tier and page files.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.storage import planted_faults
from tests.storage.planted_faults import FAULTS

ROOT = Path(__file__).parents[2]
PLANTED = Path(planted_faults.__file__)


def run_cases(*cases: str) -> tuple[dict[str, str], str]:
    """What became of every case ("Class::case"), and all that pytest said."""
    # In CI pytest looks for the differences of all bytes, for minutes.
    environment = {name: value for name, value in os.environ.items() if name != "CI"}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rA", "--tb=line", "-p", "no:cacheprovider", "-p", "no:xdist"]
        + [f"{PLANTED}::{case}" for case in cases],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    outcomes: dict[str, str] = {}
    for outcome, case in re.findall(
        r"^(PASSED|FAILED|ERROR) \S+?\.py::(\w+::\w+(?:\[.*?\])?)", run.stdout, re.MULTILINE
    ):
        if _WORST.index(outcome) > _WORST.index(outcomes.get(case, "")):
            outcomes[case] = outcome
    return outcomes, run.stdout + run.stderr


_WORST = ("", "PASSED", "ERROR", "FAILED")
_WITHOUT = ("TestWithoutAMedium::test_the_first_writer_wins", "TestMediumWithoutWrite::test_the_first_writer_wins")


@pytest.fixture(scope="module")
def ran() -> tuple[dict[str, str], str]:
    return run_cases(*[f"Test{fault}::{case}" for fault, case in FAULTS.items()], *_WITHOUT)


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "case"), FAULTS.items())
def test_the_suite_finds_a_planted_fault(ran, fault, case):
    assert ran[0][f"Test{fault}::{case}"] == "FAILED"


@pytest.mark.slow
def test_a_store_without_a_way_past_it_fails_with_a_sentence(ran):
    outcomes, said = ran
    assert [outcomes[case] for case in _WITHOUT] == ["ERROR", "ERROR"]
    assert "TestWithoutAMedium needs a fixture `medium`" in said
    assert re.search(r"abstract class _WithoutWrite.* abstract method '?write", said)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_lie_about_the_type_fails_one_case_and_no_other():
    outcomes, said = run_cases("TestLiesAboutItsType")
    failed = {case for case, outcome in outcomes.items() if outcome in ("FAILED", "ERROR")}
    assert failed == {"TestLiesAboutItsType::test_describe_tells_name_type_and_sharing"}, said
    assert len(outcomes) > 50


def test_every_planted_fault_says_what_it_does():
    assert len(FAULTS) >= 78
    assert [fault for fault in FAULTS if not getattr(planted_faults, fault).__doc__] == []

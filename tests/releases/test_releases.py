"""Each release of SGLang that README names passes the tests of storage; the table says what they showed."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache_ext.sglang.releases import TESTED, installed_release
from tests.releases.results import README, ROWS, made_part, outcomes, read_results, summarize, table
from tests.releases.run import TESTS, run_tests


def test_the_readme_has_the_table_that_the_results_make() -> None:
    results = read_results()
    assert set(results) == set(TESTED)
    assert made_part(README.read_text()) == table(results)


def test_no_tested_release_fails_and_the_oldest_and_the_newest_ran_everything() -> None:
    results = read_results()
    for release, rows in results.items():
        assert {title for title, one in rows.items() if one["outcome"] == "fails"} == set(), release
        assert set(rows) <= {row.title for row in ROWS}, release
    for release in (TESTED[0], TESTED[-1]):
        seen = {row.title: results[release].get(row.title, {}).get("outcome") for row in ROWS}
        assert set(seen.values()) <= {"yes", "off"}, seen


def test_a_row_says_yes_only_when_all_of_its_tests_passed(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(
        """<testsuites><testsuite>
        <testcase classname="tests.backend.test_copies" name="test_a"/>
        <testcase classname="tests.backend.test_copies" name="test_b"><failure/></testcase>
        <testcase classname="tests.backend.test_contracts" name="test_c"/>
        <testcase classname="tests.pd.test_sglang_hooks" name="test_d"/>
        <testcase classname="tests.pd.test_sglang_hooks" name="test_e">
          <skipped type="pytest.skip" message="off in SGLang 0.5.21, which lacks x"/></testcase>
        <testcase classname="tests.backend.test_conformance.TestHiCacheExtBackend" name="test_f"/>
        </testsuite></testsuites>"""
    )
    found = {title: one["outcome"] for title, one in summarize(outcomes(tmp_path / "report.xml")).items()}
    assert found["copy engines"] == "fails"
    assert found["decode writer"] == "off"
    assert found[ROWS[0].title] == found[ROWS[1].title] == "yes"
    assert found["tp_lcm_size with page_head"] == "not run"


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("release", [release for release in TESTED if release != installed_release()])
def test_the_unit_and_pool_tests_pass_with_another_release(release: str) -> None:
    """With the installed one they run in this run itself."""
    code, found = run_tests(release, *TESTS["storage"])
    assert code == 0
    assert {one["outcome"] for title, one in summarize(found).items() if one["outcome"] != "not run"} <= {"yes", "off"}

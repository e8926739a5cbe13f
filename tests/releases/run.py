"""Run the tests of storage against releases of SGLang, and make README's table of what came out.

``python -m tests.releases.run 0.5.22 0.5.23`` (none: all tested ones) fetches wheels as needed. ``--tests storage``
runs the tests of the table that need no server, ``servers`` those that start some, ``pairs`` a prefill and a decode
node, ``everything`` all tests that are not slow. ``--write`` puts the outcomes into docs/reports/sglang-releases.json
and README.md; they are printed always.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from hicache_ext.sglang.releases import TESTED
from tests.releases.results import ROWS, outcomes, summarize, table, write_readme, write_results
from tests.releases.wheels import ROOT, environment_of, fetch

TESTS: dict[str, tuple[str, ...]] = {
    "storage": (
        *("tests/backend", "tests/pd", "tests/storage/test_host_pool.py", "tests/test_page_hashes.py"),
        *("-m", "not slow"),
        # These look into the sources of all releases, whichever is in use.
        *("-k", "not (every_tested_release or a_name_that_goes or names_that_came_later)"),
    ),
    "servers": (
        "tests/e2e/test_file_tier.py::test_a_prompt_is_restored_after_a_flush_a_restart_and_damage[slab]",
        "tests/e2e/test_releases.py::test_storage_works_without_sglangs_plug_ins_and_says_what_is_off",
    ),
    "pairs": ("tests/e2e/test_pd_pair.py::test_the_second_turn_restores_what_the_decode_node_wrote",),
    "everything": ("tests", "-m", "not slow"),
}


def run_tests(release: str, *arguments: str) -> tuple[int, dict[str, str]]:
    """pytest's exit code and the outcome of every test, under a release."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "--sglang-release", release, f"--junitxml={report}"]
        code = subprocess.run([*command, *arguments], cwd=ROOT, env=environment_of(release), check=False).returncode
        return code, outcomes(report)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("releases", nargs="*", metavar="RELEASE")
    parser.add_argument("--tests", nargs="+", choices=TESTS, default=["storage"], help="see above")
    parser.add_argument("--write", action="store_true")
    chosen = parser.parse_args()
    worst, results = 0, {}
    for release in chosen.releases or TESTED:
        fetch(release)
        found: dict[str, str] = {}
        for name in chosen.tests:
            code, of_these = run_tests(release, *TESTS[name])
            worst, found = max(worst, code), {**found, **of_these}
        results[release] = summarize(found)
        if chosen.write:
            write_results(release, results[release], [row.title for row in ROWS if row.tests_of in chosen.tests])
            write_readme()
    print(table(results))
    return worst


if __name__ == "__main__":
    sys.exit(main())

"""For the whole suite: nothing that is missing may go unnoticed.

A test that cannot run for want of something (a program, a privilege) calls ``pytest.skip("missing: ...")``. The end of
the run counts those; in continuous integration (CI=true) they fail it.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from hicache_ext import native
from tests.native.sanitized import use_the_core_that_is_to_be_tested
from tests.thorough import is_patient, mark_what_is_left_out

# Workers and servers share the machine's cores: threads of torch would wait for each other, for a third of the time.
# Before anything imports torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples in every run, however long one takes; the campaigns (Makefile) look for new ones.
settings.register_profile(
    "suite", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("suite")

use_the_core_that_is_to_be_tested()

MISSING = "missing: "

_missing: Counter[str] = Counter()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sglang-release", help="run with this SGLang instead of the installed one (tests/releases)")
    # Now, and not when all options are read: the next conftest may ask for the release, or import SGLang.
    words = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    words.add_argument("--sglang-release")
    if release := words.parse_known_args()[0].sglang_release:
        from tests.releases.wheels import use_in_this_process

        use_in_this_process(release)


# What is imported and collected stays: to look for garbage in it takes a fourth of the collection's time.
gc.disable()


@pytest.hookimpl
def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files that ``-m`` leaves out as a whole are not imported: half of all, and the slower half."""
    return is_patient(collection_path) if "not patient" in config.option.markexpr else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before ``-m`` is looked at."""
    mark_what_is_left_out(items)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Tests that ask the garbage collector look through what came later."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.hookimpl
def pytest_unconfigure() -> None:
    gc.unfreeze()  # or some libraries complain at the end that their objects are still there


@pytest.fixture(params=["native", "plain"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the native core, and without."""
    if request.param == "plain":
        monkeypatch.setattr(native, "LIBRARY", Path("/nowhere"))
    elif native.core() is None:
        pytest.skip("missing: the native core")
    return str(request.param)


@pytest.hookimpl
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if reason.startswith(MISSING):
            _missing[reason] += 1


@pytest.hookimpl
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _missing:
        terminalreporter.section("tests not run because something is missing")
        for reason, count in sorted(_missing.items()):
            terminalreporter.line(f"{count} x {reason}")


@pytest.hookimpl
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if _missing and os.environ.get("CI") == "true" and exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED

"""The tests of the native core once more, on a library that watches every access and every race."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.native.sanitized import DIFFERENTIAL, THREADS, build, run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("sanitizer", "tests"), [("address", DIFFERENTIAL), ("thread", THREADS)])
def test_no_access_is_out_of_bounds_and_nothing_races(sanitizer: str, tests: tuple[str, ...], tmp_path: Path) -> None:
    library = build(sanitizer, tmp_path)
    found = run(
        sanitizer,
        library,
        ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow and not thorough", *tests],
    )
    assert not found.returncode, (found.stdout + found.stderr)[-8000:]
    assert " passed" in found.stdout and "Sanitizer" not in found.stdout + found.stderr

"""The tests of the native core once more, on a library that watches every access and every race."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.native.sanitized import build, run

pytestmark = pytest.mark.slow

DIFFERENTIAL = (
    "tests/storage/file/test_index_code.py",
    "tests/storage/file/test_native_moves.py",
    "tests/storage/remote/redis/test_native_talk.py",
    "tests/page/test_planes.py",
    "tests/page/test_rows.py",
    "tests/plan/test_caches.py",
)
"""Tests that drive the core and the plain way over the same states, or hand it bytes from outside."""
THREADS = (
    "tests/storage/file/test_index_code.py::test_look_ups_beside_changes_find_every_page_that_is_there",
    "tests/storage/file/test_native_moves.py::test_threads_share_the_pages_of_a_call_and_leave_none",
)
"""Tests in which several threads are in the core."""


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

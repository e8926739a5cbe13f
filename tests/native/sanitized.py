"""The core built with a sanitizer, and tests that are run on it in a process of their own.

``python -m tests.native.sanitized`` runs all of them, and the fuzzer of Redis' replies.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hicache_ext import native

ROOT = Path(__file__).parents[2]
CORE_VARIABLE = "HICACHE_EXT_TEST_CORE"
"""Names the library that ``use_the_core_that_is_to_be_tested`` puts in place of the package's own."""
DIFFERENTIAL = (
    "tests/storage/file/test_index_code.py",
    "tests/storage/file/test_native_moves.py",
    "tests/storage/remote/redis/test_native_talk.py",
    "tests/page/test_planes.py",
    "tests/page/test_rows.py",
)
"""Tests that drive the core and another way over the same states, or hand it bytes from outside."""
THREADS = (
    "tests/storage/file/test_index_code.py::test_look_ups_beside_changes_find_every_page_that_is_there",
    "tests/storage/file/test_native_moves.py::test_threads_share_the_pages_of_a_call_and_leave_none",
)
"""Tests in which several threads are in the core."""
_OPTIONS = {
    # The interpreter frees little at its end, and keeps its own small blocks.
    "address": {
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    },
    "thread": {"TSAN_OPTIONS": "halt_on_error=1:report_signal_unsafe=0"},
}
_FLAGS = {"address": "-fsanitize=address,undefined -fno-sanitize-recover=all", "thread": "-fsanitize=thread"}


def use_the_core_that_is_to_be_tested() -> None:
    if CORE_VARIABLE in os.environ:
        native.LIBRARY = Path(os.environ[CORE_VARIABLE])


def build(sanitizer: str, place: Path) -> Path:
    """The library with this sanitizer ("address", with UBSan, or "thread")."""
    flags = f"{_FLAGS[sanitizer]} -g -O1 -fno-omit-frame-pointer"
    command = [sys.executable, "setup.py", "-q", "build_ext", "--force", "--build-lib", str(place / "lib")]
    subprocess.run(
        [*command, "--build-temp", str(place / "temp")],
        cwd=ROOT,
        env={**os.environ, "CFLAGS": flags, "LDFLAGS": _FLAGS[sanitizer]},
        check=True,
        capture_output=True,
    )
    return place / "lib" / "hicache_ext" / "native" / "core.so"


def run(sanitizer: str, library: Path, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command of Python (without its name) on that library."""
    runtime = {"address": "libasan.so", "thread": "libtsan.so"}[sanitizer]
    found = subprocess.run(["gcc", f"-print-file-name={runtime}"], capture_output=True, text=True, check=True).stdout
    variables = {**_OPTIONS[sanitizer], "LD_PRELOAD": found.strip(), CORE_VARIABLE: str(library)}
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        # What is missing has been told, or failed, where these tests are run without a sanitizer.
        env={**os.environ, "CI": "", "PYTHONMALLOC": "malloc", **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def main() -> int:
    """Run the tests with each sanitizer, then the fuzzer; the exit code of the first that failed."""
    pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", ""]
    fuzzer = ["-m", "tests.campaigns.fuzz_resp", "--inputs", "100000"]
    campaigns = (("address", [*pytest, *DIFFERENTIAL]), ("thread", [*pytest, *THREADS]), ("address", fuzzer))
    with tempfile.TemporaryDirectory() as place:
        for sanitizer, command in campaigns:
            done = run(sanitizer, build(sanitizer, Path(place)), command)
            print(done.stdout[-4000:], done.stderr[-4000:], sep="\n")
            if done.returncode:
                return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())

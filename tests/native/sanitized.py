"""The core built with a sanitizer, and tests that are run on it in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
CORE_VARIABLE = "HICACHE_EXT_TEST_CORE"
"""Names the library that tests/conftest.py puts in place of the package's own."""
_OPTIONS = {
    # The interpreter frees little at its end, and keeps its own small blocks.
    "address": {
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    },
    "thread": {"TSAN_OPTIONS": "halt_on_error=1:report_signal_unsafe=0"},
}
_FLAGS = {"address": "-fsanitize=address,undefined -fno-sanitize-recover=all", "thread": "-fsanitize=thread"}


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
        env={**os.environ, "PYTHONMALLOC": "malloc", **variables},
        capture_output=True,
        text=True,
        check=False,
    )

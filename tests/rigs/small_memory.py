"""Code in a process of its own whose memory has a limit: what a server or a file claims costs that process, not the
tests."""

from __future__ import annotations

import subprocess
import sys

_LIMIT = """
import resource
def limit(mebibytes):
    # What the imports took does not count; nor does what threads reserve for their stacks.
    pages = int(open("/proc/self/statm").read().split()[0])
    most = pages * resource.getpagesize() + (mebibytes << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
"""


def run_in_small_memory(code: str, *arguments: object) -> str:
    """What ``code`` prints. It imports what it needs, calls ``limit(mebibytes)`` and goes on; ``arguments`` are its
    ``sys.argv[1:]``. An assertion fails where it ends in any other way than well."""
    done = subprocess.run(
        [sys.executable, "-c", _LIMIT + code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env={"MALLOC_ARENA_MAX": "2", "PATH": "", "HOME": "/nonexistent"},
    )
    assert done.returncode == 0, (done.returncode, done.stdout[-1000:], done.stderr[-3000:])
    return done.stdout

"""Threads are made in runtime/: a pool or a background loop, with their ends and their pauses. Others have a reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import hicache_ext

PACKAGE = Path(hicache_ext.__file__).parent

REASONS = {
    "runtime/": "the pool and the loop themselves",
    "testing/": "plays the part of several users at once",
    "bench/": "plays the part of several users at once",
}


MAKERS = {"Thread", "Timer", "ThreadPoolExecutor", "start_new_thread"}


def calls_in(source: str) -> Iterator[int]:
    """The lines in which a thread or a pool of threads is made."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in MAKERS:
            yield node.lineno


def test_a_bare_thread_is_found() -> None:
    assert list(calls_in("import threading\nthreading.Thread(target=print).start()")) == [2]
    assert not list(calls_in("import threading\nmade: list[threading.Thread] = []\nthreading.Lock()"))


def test_no_threads_are_made_outside_runtime() -> None:
    bare = {
        f"{name}:{line}"
        for path in PACKAGE.rglob("*.py")
        if not (name := path.relative_to(PACKAGE).as_posix()).startswith(tuple(REASONS))
        for line in calls_in(path.read_text())
    }
    assert not bare, "use runtime/background.py or runtime/threads.py"

"""Another process over the same medium: what it sees, and what it leaves behind when it is killed."""

from __future__ import annotations

import contextlib
import multiprocessing
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest

from hicache_ext.storage.contract.store import PageStore
from hicache_ext.testing.conformance.medium import Medium

Work = Callable[[PageStore, Connection], Any]
"""What the other process does: a function of a module, with its store and the way to talk to the test."""


def in_another_process(medium: Medium, work: Work, *, patience: float) -> Any:
    """What ``work`` returns over a store that another process opens. Fails with its traceback when it raises."""
    with another_process(medium, work, patience=patience) as (_, connection):
        assert connection.poll(patience), f"the other process has not answered after {patience:g} s"
        try:
            done, answer = connection.recv()
        except EOFError:
            pytest.fail(f"the other process died; {type(medium).__name__} has to be one that can be pickled")
    assert done, f"in the other process:\n{answer}"
    return answer


@contextmanager
def another_process(medium: Medium, work: Work, *, patience: float) -> Iterator[tuple[Any, Connection]]:
    """The process that does ``work`` and the connection to it; killed at the end if it still runs."""
    context: Any = multiprocessing.get_context(medium.start_method)
    if medium.start_method == "forkserver":
        # Imported once, not by every process. The server itself opens nothing and has one thread.
        context.set_forkserver_preload([__name__, type(medium).__module__])
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(medium, work, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        process.join(1.0)
        if process.is_alive():
            process.kill()
        process.join(patience)
        ours.close()


def _run(medium: Medium, work: Work, connection: Connection) -> None:
    try:
        store = medium.open()
        try:
            answer = work(store, connection)
        finally:
            store.close()
        connection.send((True, answer))
    except BaseException:  # noqa: BLE001 - reported by the test
        with contextlib.suppress(OSError):
            connection.send((False, traceback.format_exc()))

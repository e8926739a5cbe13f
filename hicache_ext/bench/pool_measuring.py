"""What the pool benchmark times: batches of several client threads. What was read is compared outside of it."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hicache_ext.bench.harness import Sample
from hicache_ext.bench.pool_engines import Contender, Pages, PoolClient
from hicache_ext.errors import BenchmarkError

MODES = ("write", "read")


@dataclass(frozen=True, slots=True)
class Case:
    """Pages of one size, moved by some threads: each its own batches, one call a batch."""

    payload: int
    threads: int
    batch: int
    batches: int
    """Of each thread."""

    @property
    def total(self) -> int:
        """Bytes each mode moves."""
        return self.payload * self.threads * self.batch * self.batches


def measure(
    contender: Contender, client: PoolClient, case: Case, memory: Sequence[Pages], turn: str
) -> dict[str, Sample]:
    """Write and read everything once; removes it again. ``turn`` makes the keys of this turn new.

    Raises BenchmarkError for an answer that is wrong or not complete.
    """
    keys = [
        [_keys(f"{contender.name}/{turn}/{thread}/{number}", case.batch) for number in range(case.batches)]
        for thread in range(case.threads)
    ]
    try:
        written = _run(case, lambda thread, number: client.write(keys[thread][number], memory[thread]), memory, None)
        read = _run(
            case, lambda thread, number: client.read(keys[thread][number], memory[thread]), memory, contender.name
        )
    finally:
        for of_thread in keys:
            for batch in of_thread:
                client.remove(batch)
    return {"write": written, "read": read}


def _run(case: Case, move: Callable[[int, int], int], memory: Sequence[Pages], check_as: str | None) -> Sample:
    """All threads at once through their batches. Stamping and comparing stop the clock: threads meet before each batch.

    The time of a batch number is that from the moment all threads begin it to the moment the last has ended.
    """
    calls: list[float] = []
    failures: list[BaseException] = []
    seconds = cpu = 0.0
    for number in range(case.batches):
        for pages in memory[: case.threads]:
            pages.received = None
            if check_as is None:
                pages.stamp(number)
            else:
                pages.targets[:] = 0
        barrier = threading.Barrier(case.threads + 1)

        def work(thread: int, number: int = number, barrier: threading.Barrier = barrier) -> None:
            try:
                barrier.wait()
                began = time.perf_counter()
                moved = move(thread, number)
                calls.append(time.perf_counter() - began)
                if moved != case.batch:
                    raise BenchmarkError(f"{moved} pages of {case.batch} were moved")
            except BaseException as error:  # noqa: BLE001 - raised again by the measuring thread
                failures.append(error)

        threads = [threading.Thread(target=work, args=(thread,)) for thread in range(case.threads)]
        for thread in threads:
            thread.start()
        cpu_began = time.process_time()
        barrier.wait()
        began = time.perf_counter()
        for thread in threads:
            thread.join()
        seconds += time.perf_counter() - began
        cpu += time.process_time() - cpu_began
        if failures:
            raise BenchmarkError(f"{type(failures[0]).__name__}: {failures[0]}") from failures[0]
        if check_as is not None:
            for pages in memory[: case.threads]:
                pages.check(number, check_as)
    return Sample(case.total, seconds, cpu, tuple(calls))


def _keys(name: str, count: int) -> list[bytes]:
    """Page keys as stores take them: identity digest and page hash."""
    identity = hashlib.sha256(b"hicache_ext/bench").digest()[:16]
    return [identity + hashlib.sha256(f"{name}/{number}".encode()).digest() for number in range(count)]

"""Several processes share one directory and one capacity."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from collections import Counter
from pathlib import Path

import pytest

from hicache_ext.storage.contract.store import PageBatch
from hicache_ext.storage.tiers.file.pages.store import PageFileStore
from hicache_ext.testing.conformance.pages import HostPages, page_key, read_pages
from tests.storage.raw_access import account_and_walk

CAPACITY = 64 << 20
PAGE_SIZE = 128 << 10
LARGEST_BATCH = 128
PAGES_PER_PROCESS = 2048
PROCESSES = 4

_SPAWN = multiprocessing.get_context("spawn")


def _content(key: bytes) -> bytes:
    return (key * (PAGE_SIZE // len(key) + 1))[:PAGE_SIZE]


def _write(place: str, number: int, start, results) -> None:
    chance = random.Random(number)
    store = PageFileStore("disk", Path(place), capacity=CAPACITY)
    memory = HostPages([[PAGE_SIZE]] * LARGEST_BATCH)
    outcome: Counter[str] = Counter()
    written = 0
    start.wait()
    while written < PAGES_PER_PROCESS:
        count = min(chance.randint(16, LARGEST_BATCH), PAGES_PER_PROCESS - written)
        keys = [page_key(f"{number}-{written + position}") for position in range(count)]
        for position, key in enumerate(keys):
            memory.write(position, _content(key))
        outcome.update(result.value for result in store.set(PageBatch(keys, memory.buffers[:count])))
        written += count
    store.close()
    results.put(outcome)


def disk_usage(place: Path) -> int:
    """``du`` of everything; files that vanish meanwhile are left out."""
    total = 0
    for folder, _, files in os.walk(place):
        for name in [".", *files]:
            try:
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


@pytest.mark.thorough
@pytest.mark.slow
def test_four_processes_that_write_1_gib_stay_within_64_mib_together(place):
    start, results = _SPAWN.Barrier(PROCESSES + 1), _SPAWN.Queue()
    processes = [
        _SPAWN.Process(target=_write, args=(str(place), number, start, results)) for number in range(PROCESSES)
    ]
    for process in processes:
        process.start()
    start.wait()
    samples: list[int] = []
    while any(process.is_alive() for process in processes):
        samples.append(disk_usage(place))
        time.sleep(0.02)
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * PROCESSES
    outcome = sum((results.get(timeout=60) for _ in processes), Counter())

    # A walk is no snapshot: it may count a page twice removed and replaced while it runs.
    assert max(samples) <= CAPACITY + LARGEST_BATCH * (PAGE_SIZE + 4096)
    assert len(samples) > 10
    # At most an eighth of the capacity is under way in each process: eviction finds room, however slow the others are.
    assert outcome == {"stored": PROCESSES * PAGES_PER_PROCESS}

    store = PageFileStore("disk", place, capacity=CAPACITY)
    used, walked = account_and_walk(store)
    assert used == walked <= CAPACITY
    assert disk_usage(place) <= CAPACITY + (1 << 20)
    keys = [page_key(f"{number}-{page}") for number in range(PROCESSES) for page in range(PAGES_PER_PROCESS)]
    present = [key for key, known in zip(keys, store.contains(keys), strict=True) if known]
    assert len(present) > 0.8 * CAPACITY / PAGE_SIZE
    for key in present:
        _, payloads = read_pages(store, [key], [PAGE_SIZE])
        assert payloads == [_content(key)]
    store.close()

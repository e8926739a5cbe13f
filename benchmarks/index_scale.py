#!/usr/bin/env python3
"""What calls of the slab index cost at 1, 10 and 100 million slots, and how fast it is rebuilt from headers.

    python benchmarks/index_scale.py --markdown build/index-scale.md

Slabs are sparse files (a slot of 4 KiB each), headers are real. The index is filled by its own rebuild; then each call
is made a few hundred times, pages chosen at random. Writes are at capacity: each takes the slots of evicted pages.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import xxhash

from hicache_ext import native
from hicache_ext.page import envelope
from hicache_ext.storage.contract.store import PageKeys
from hicache_ext.storage.tiers.file.slab.directory import SlabDirectory
from hicache_ext.storage.tiers.file.slab.shapes import HEADER, Slab, SlabFile, SlotReferences
from tests.rigs.bare_index import counts

IDENTITY = bytes(range(16))
SLOT = 4096
SLAB_SLOTS = 1 << 20
BATCH = 128
CHAIN = 10_000
SEED = 7


def page_hashes(first: int, count: int) -> bytes:
    """Page hashes as even as SGLang's, and known by their number."""
    words = np.arange(4 * first, 4 * (first + count), dtype=np.uint64)
    words = (words ^ (words >> np.uint64(31))) * np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return (words ^ (words >> np.uint64(32))).tobytes()


def write_headers(path: Path, first: int, count: int) -> None:
    """The headers of ``count`` pages of 4,096 bytes, valid to the last bit."""
    headers = np.zeros((count, HEADER // 8), np.uint64)
    headers[:, :2] = np.frombuffer(envelope.PAGE_START, np.uint64)
    headers[:, 2:4] = np.frombuffer(IDENTITY, np.uint64)
    headers[:, 4:8] = np.frombuffer(page_hashes(first, count), np.uint64).reshape(-1, 4)
    headers[:, 8] = SLOT
    headers[:, 11] = int(time.time() * 1000) - 1000
    content = bytearray(headers.tobytes())
    view, digest = memoryview(content), xxhash.xxh3_128_digest
    for at in range(0, len(content), HEADER):
        content[at + 112 : at + 128] = digest(view[at : at + 112])
    path.write_bytes(content)


def make_slabs(path: Path, slots: int) -> None:
    with closing(SlabDirectory(path, "scale", 1 << 20)) as directory:
        home = directory.home / "slabs"
    for number in range(-(-slots // SLAB_SLOTS)):
        count = min(SLAB_SLOTS, slots - number * SLAB_SLOTS)
        name = home / f"{number:08x}-{SLOT}.slab"
        name.touch()
        os.truncate(name, count * SLOT)
        write_headers(name.with_suffix(".headers"), number * SLAB_SLOTS, count)


def sparse(self: SlabDirectory, slab: Slab, file: SlabFile, length: int) -> None:
    """In place of ``SlabDirectory.allocate``: this disk is smaller than the tier."""


def microseconds(call: Callable[[], object], times: int) -> float:
    taken = []
    for _ in range(times):
        begun = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begun)
    return 1e6 * statistics.median(taken)


def measure(place: Path, slots: int) -> dict[str, float]:
    make_slabs(place, slots)
    figures: dict[str, float] = {}
    chance = np.random.default_rng(SEED)
    begun = time.perf_counter()
    with (
        mock.patch.object(SlabDirectory, "allocate", sparse),
        closing(SlabDirectory(place, "scale", slots * SLOT)) as directory,
    ):
        index = directory.index
        figures["opening, s"] = time.perf_counter() - begun
        if not directory.rebuild.wait(3600):
            raise TimeoutError("the rebuild takes longer than an hour")
        seconds = time.perf_counter() - begun
        figures["rebuild, million pages a minute"] = slots / seconds * 60 / 1e6
        figures["pages found, share"] = counts(index)["pages"] / slots
        memory = sum(part.nbytes for part in (index.memory.rows[:slots], index.memory.sets[: index.memory.header[3]]))
        figures["bytes of memory a slot"] = memory / slots
        written = slots

        def some(count: int) -> PageKeys:
            first = int(chance.integers(0, slots - count))
            return PageKeys.of_joined(IDENTITY, page_hashes(first, count))

        def write() -> None:
            nonlocal written
            keys, ticket = PageKeys.of_joined(IDENTITY, page_hashes(written, BATCH)), index.next_ticket()
            rows, *_ = index.take(SLOT, BATCH, ticket, 0, np.empty(0, np.int64), evicting=True)
            at = np.arange(len(rows))
            taken = SlotReferences(*index.places_of(rows), np.full(len(rows), SLOT), at, rows)
            published = index.publish(ticket, keys, taken, taken, 0, 1)
            assert published == [1] * BATCH, (len(rows), published)
            written += BATCH

        figures[f"look up {BATCH} pages, us"] = microseconds(lambda: index.locate(some(BATCH)), 400)
        figures[f"exists of {CHAIN:,}, us"] = microseconds(lambda: index.count_leading(some(CHAIN)), 50)
        figures[f"take, evict, publish {BATCH} pages, us"] = microseconds(write, 400)
        slowest: list[float] = []
        for _ in range(400):
            begun = time.perf_counter()
            write()
            slowest.append(1e6 * (time.perf_counter() - begun))
        figures["the slowest of 400 of them, us"] = max(slowest)
        found = [index.locate(some(BATCH)) for _ in range(200)]
        figures[f"note hits of {BATCH} pages, us"] = microseconds(
            lambda: index.note_hits(found[int(chance.integers(200))], [IDENTITY + bytes(32)], BATCH), 400
        )
        pinned = [page_hashes(n, 1) for n in range(0, slots, slots // 1000)][:1000]
        figures["count 1,000 pinned pages, us"] = microseconds(lambda: index.occupied_by(pinned), 20)
        figures["clear an identity, us"] = microseconds(lambda: index.clear([IDENTITY]), 1)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description="The slab index at several sizes.")
    parser.add_argument("--slots", type=int, nargs="+", default=[1_000_000, 10_000_000, 100_000_000])
    parser.add_argument("--directory", type=Path, default=None, help="on a file system with 128 bytes a slot to spare")
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    if native.core() is None:
        raise SystemExit("the native core is needed")
    table: dict[int, dict[str, float]] = {}
    for slots in arguments.slots:
        place = Path(tempfile.mkdtemp(prefix="index-scale-", dir=arguments.directory))
        try:
            table[slots] = measure(place, slots)
        finally:
            shutil.rmtree(place)
        print(slots, table[slots], flush=True)
    lines = ["| | " + " | ".join(f"{slots:,} slots" for slots in table) + " |", "|---" * (len(table) + 1) + "|"]
    names = next(iter(table.values()))
    lines += [f"| {name} | " + " | ".join(f"{of[name]:,.4g}" for of in table.values()) + " |" for name in names]
    text = "\n".join(lines)
    print(text)
    if arguments.markdown:
        machine = f"{platform.platform()}, {os.cpu_count()} processors, {time.strftime('%Y-%m-%d')}"
        command = "python benchmarks/index_scale.py --slots " + " ".join(map(str, arguments.slots))
        arguments.markdown.write_text(f"# The slab index at several sizes\n\n{machine}; `{command}`\n\n{text}\n")


if __name__ == "__main__":
    main()

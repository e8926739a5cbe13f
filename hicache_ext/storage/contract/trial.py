"""A round trip for diagnoses: pages of an identity of its own are written, read back, compared and removed.

For a store in a directory the trial has a directory of its own beside it, so that it touches neither the pages (a full
tier would evict some) nor the index nor the records. Reasons: docs/decisions/tools-that-look.md.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from hicache_ext.page.envelope import IDENTITY_LENGTH
from hicache_ext.storage.contract.diagnosis import Finding, Level
from hicache_ext.storage.contract.store import GetResult, PageBatch, PageStore, SetResult

_PAGES = 16
_PAGE_BYTES = 1 << 20
_LOOK_UPS = 10
_TRIAL = ".hicache-ext-trial-"
_LONGEST_TRIAL = 600.0
"""Seconds."""


def nearest_directory(path: Path) -> Path:
    """``path``, or the nearest existing directory above it. Raises OSError."""
    while not path.is_dir():
        if path.exists():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
        path = path.parent
    return path


@contextmanager
def trial_directory(path: Path) -> Iterator[Path]:
    """A new directory in ``path``, or above it where that does not exist; removed afterwards.

    Left-overs of trials that were killed are removed, too, once no trial can still be at them. Raises OSError.
    """
    place = nearest_directory(path)
    for left in place.glob(f"{_TRIAL}*"):
        with suppress(OSError):
            if time.time() - left.lstat().st_ctime > _LONGEST_TRIAL:
                shutil.rmtree(left)
    made = Path(tempfile.mkdtemp(prefix=_TRIAL, dir=place))
    try:
        yield made
    finally:
        shutil.rmtree(made)


def try_store(store: PageStore, page_bytes: int = _PAGE_BYTES) -> list[Finding]:
    """Round trip, latency and bandwidth of ``store``; leaves nothing behind. Errors of the store become findings."""
    digest = secrets.token_bytes(IDENTITY_LENGTH)
    keys = [digest + hashlib.sha256(bytes([number])).digest() for number in range(_PAGES)]
    content = [hashlib.shake_128(key).digest(page_bytes) for key in keys]
    targets = [bytearray(page_bytes) for _ in keys]
    try:
        began = time.perf_counter()
        written = store.set(PageBatch(keys, [[memoryview(page)] for page in content]))
        wrote = time.perf_counter() - began
        began = time.perf_counter()
        read = store.get(PageBatch(keys, [[memoryview(page)] for page in targets]))
        took = time.perf_counter() - began
        look_ups = []
        for _ in range(_LOOK_UPS):
            began = time.perf_counter()
            store.contains(keys[:1])
            look_ups.append(time.perf_counter() - began)
    finally:
        store.remove(keys)
    found = _judge(written, read, [bytes(page) for page in targets] == content)
    if found.level is not Level.OK:
        return [found]
    total = _PAGES * page_bytes
    return [
        found,
        Finding("latency", Level.OK, f"a look-up takes {statistics.median(look_ups) * 1e3:.2f} ms (median)"),
        Finding(
            "bandwidth",
            Level.OK,
            f"{total / wrote / 1e6:.0f} MB/s written, {total / took / 1e6:.0f} MB/s read"
            f" ({_PAGES} pages of {page_bytes >> 10} KiB)",
        ),
    ]


def _judge(written: Sequence[SetResult], read: Sequence[GetResult], same: bool) -> Finding:
    complete = all(result is SetResult.STORED for result in written) and all(result is GetResult.HIT for result in read)
    if complete and same:
        return Finding("round trip", Level.OK, f"{_PAGES} pages written, read back and removed")
    if all(result is GetResult.HIT for result in read) and not same:
        return Finding(
            "round trip", Level.ERROR, "pages came back with other bytes", "do not use this store; report it"
        )
    stored = sum(result is SetResult.STORED for result in written)
    hits = sum(result is GetResult.HIT for result in read)
    reasons = sorted({r.value for r in written if not r.durable} | {r.value for r in read if r is not GetResult.HIT})
    return Finding(
        "round trip",
        Level.ERROR,
        f"of {_PAGES} pages {stored} were written and {hits} read back ({', '.join(reasons)})",
        "look at the other findings of this tier, and at its timeout",
    )

"""A round trip for diagnoses: pages of a separate identity are written, read back, compared and removed.

For a store in a directory the trial uses a separate directory next to it, so that it touches neither the pages (a full
tier would evict some) nor the index nor the records. Reasons: docs/decisions/tests-and-tools.md.
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
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hicache_ext.page.envelope import IDENTITY_LENGTH
from hicache_ext.storage.contract.diagnosis import Finding, Level
from hicache_ext.storage.contract.store import GetResult, PageBatch, PageStore, SetResult

_PAGES = 16
_PAGE_BYTES = 1 << 20
_LOOK_UPS = 10
_TRIAL = ".hicache-ext-trial-"
_LONGEST_TRIAL = 24 * 3600.0
"""Upper bound, in seconds, on the duration of any trial, however slow its store is."""


def nearest_directory(path: Path) -> Path:
    """Return ``path``, or the nearest existing directory above it. Raises OSError."""
    while not path.is_dir():
        if path.exists():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
        path = path.parent
    return path


@contextmanager
def trial_directory(path: Path) -> Iterator[Path]:
    """Make a directory in ``path``, or above it if that does not exist, and remove it afterwards.

    Also removes leftovers of killed trials once no trial can still be using them. Raises OSError.
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


def try_store(store: PageStore, page_bytes: int = _PAGE_BYTES, again: PageStore | None = None) -> list[Finding]:
    """Measure the round trip, latency and bandwidth of ``store``, leaving nothing behind. Its errors become findings.

    ``again``: another store on the same medium, which remembers nothing of what the first one wrote: what it finds,
    other servers find, too."""
    again = again or store
    digest = secrets.token_bytes(IDENTITY_LENGTH)
    keys = [digest + hashlib.sha256(bytes([number])).digest() for number in range(_PAGES)]
    content = [hashlib.shake_128(key).digest(page_bytes) for key in keys]
    targets = [bytearray(page_bytes) for _ in keys]
    errors = _errors_of(store, again)
    try:
        began = time.perf_counter()
        written = store.set(PageBatch(keys, [[memoryview(page)] for page in content]))
        wrote = time.perf_counter() - began
        found = again.count_leading(keys), sum(again.contains(keys))
        began = time.perf_counter()
        read = again.get(PageBatch(keys, [[memoryview(page)] for page in targets]))
        took = time.perf_counter() - began
        look_ups = []
        for _ in range(_LOOK_UPS):
            began = time.perf_counter()
            again.contains(keys[:1])
            look_ups.append(time.perf_counter() - began)
    finally:
        removed = again.remove(keys)
    steps = {
        "were written": written.count(SetResult.STORED),
        "found": min(found),
        "read back": read.count(GetResult.HIT),
        "removed": removed,
    }
    done = all(count == _PAGES for count in steps.values())
    if done and [bytes(page) for page in targets] != content:
        seen = "pages came back with other bytes"
        return [Finding("round trip", Level.ERROR, seen, "do not use this store; report it")]
    if not done:
        reasons = {r.value for r in written if not r.durable} | {r.value for r in read if r is not GetResult.HIT}
        reasons |= {reason for reason, count in _errors_of(store, again).items() if count > errors.get(reason, 0)}
        seen = f"of {_PAGES} pages {', '.join(f'{count} {step}' for step, count in steps.items())}"
        remedy = "look at the other findings of this tier, and at its timeout"
        return [Finding("round trip", Level.ERROR, f"{seen} ({', '.join(sorted(reasons))})", remedy)]
    total = _PAGES * page_bytes
    return [
        Finding("round trip", Level.OK, f"{_PAGES} pages written, read back and removed"),
        Finding("latency", Level.OK, f"a look-up takes {statistics.median(look_ups) * 1e3:.2f} ms (median)"),
        Finding(
            "bandwidth",
            Level.OK,
            f"{total / wrote / 1e6:.0f} MB/s written, {total / took / 1e6:.0f} MB/s read"
            f" ({_PAGES} pages of {page_bytes >> 10} KiB)",
        ),
    ]


def _errors_of(*stores: PageStore) -> Counter[str]:
    """Return how often each error was counted."""
    errors: Counter[str] = Counter()
    for store in stores:
        errors.update({why: count for (event, why), count in store.metrics.snapshot().items() if event == "error"})
    return errors

"""Records which pages requests asked storage for and where they were found, if ``record`` is configured (docs/plan.md).

A request is put into a bounded queue and written by a thread; requests that don't fit or cannot be written are dropped
and counted. Nothing here raises into a call, and no call waits for a disk. Started in observers.py; the format:
page/recording.py.

Several processes may share the directory: each has its own files, and every writer removes the oldest files of all.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hicache_ext.config.model import RecordConfig
from hicache_ext.errors import ConfigError
from hicache_ext.page.recording import SALT_BYTES, SUFFIX, Asked, Encoder, block
from hicache_ext.runtime.background import BackgroundLoop
from hicache_ext.runtime.log_limit import LimitedLog
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.runtime.threads import call_within
from hicache_ext.runtime.whole_file import create_whole, read_small

logger = logging.getLogger(__name__)

SALT_FILE = "salt"
_PAUSE = 1.0
"""Seconds between two blocks."""
_MOST_REQUESTS = 4096
_MOST_PAGES = 1 << 18
"""Pages that may wait to be written: some 30 MB of page hashes, which SGLang holds anyway for most of that time."""
_SHARE_OF_A_FILE = 8
"""A file is closed at 1/8 of ``size``, so that removing the oldest one loses little."""
_LONGEST_FILE = 16 << 20
_CLOSE_WAIT = 1.0
_REPEATS = 4096
"""Number of requests remembered, because SGLang may ask repeatedly for one that waits."""


class Recorder:
    """The recording of one process. Threads: any; files belong to the thread of the loop."""

    def __init__(self, settings: RecordConfig, facts: Callable[[], Mapping[str, Any]]) -> None:
        """``facts`` about the model and the process, for the header of each file: no secrets, no host names.
        Raises ConfigError if the directory cannot be created or is not writable."""
        self.metrics = TierMetrics("record", prefix="record_")
        self.metrics.declare({"request": ["written", "repeated", "dropped_queue", "dropped_disk"]})
        self._settings = settings
        self._directory = Path(settings.path)
        self._salt = _salt_in(self._directory)
        self._facts = facts
        # Wall time is read once, so that a clock that is set back does not reorder requests.
        self._wall, self._began = time.time(), time.monotonic()
        self._queue: deque[tuple[str, Asked]] = deque()
        self._waiting_pages = 0
        self._lock = threading.Lock()
        self._seen: OrderedDict[tuple[str, str, int], None] = OrderedDict()
        self._name = secrets.token_hex(4)
        self._files = 0
        self._path = self._directory
        """The file being written; the directory before the first one."""
        self._size = 0
        self._encoder: Encoder | None = None
        """Encoder of that file; None if the next block begins a new file."""
        self._log = LimitedLog(logger, 60.0)
        self._here = threading.local()
        self._loop = BackgroundLoop("hicache-record", self._step)

    # -- on SGLang's prefetch threads ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def looking_up(self) -> Iterator[dict[str, int]]:
        """Wrap this thread's look-ups for one request; yield what ``note_found`` reports inside, by tier."""
        found = self._here.found = {}
        try:
            yield found
        finally:
            self._here.found = None

    def note_found(self, found: Mapping[str, int]) -> None:
        """Note how many pages of a leading run each tier has, for the request that this thread is looking up."""
        mine: dict[str, int] | None = getattr(self._here, "found", None)
        if mine is not None:
            for tier, pages in found.items():
                mine[tier] = mine.get(tier, 0) + pages

    def ask(
        self,
        rid: str,
        pages: Sequence[str],
        *,
        before: str | None,
        answered: int,
        found: Mapping[str, int],
        prompt: int | None = None,
        matched: int | None = None,
    ) -> None:
        """Record that a request asked for ``pages`` (page hashes). ``before``: hash of the page before them; ``rid`` is
        not written. Does not wait."""
        if not pages:
            return
        chain = [*([] if before is None else [before]), *pages]
        seconds = time.monotonic() - self._began
        asked = Asked(seconds, chain, len(pages), answered, _of_run(found, answered), prompt, matched)
        with self._lock:
            fits = len(self._queue) < _MOST_REQUESTS and self._waiting_pages + len(chain) <= _MOST_PAGES
            if fits:
                self._queue.append((rid, asked))
                self._waiting_pages += len(chain)
        if fits:
            self._loop.wake(_PAUSE)
        else:
            self.metrics.add("request", "dropped_queue")

    def close(self) -> None:
        """Write what is queued, within ``_CLOSE_WAIT`` because a disk may hang."""
        with contextlib.suppress(RuntimeError, TimeoutError):
            call_within(_CLOSE_WAIT, "hicache-record-end", self._finish)

    def _finish(self) -> None:
        self._loop.stop()
        self._step()

    # -- on the thread of the loop -------------------------------------------------------------------------------------

    def _step(self) -> float:
        """Write what is queued as one block."""
        with self._lock:
            waiting, self._waiting_pages = list(self._queue), 0
            self._queue.clear()
        fresh = [asked for rid, asked in waiting if self._is_first(rid, asked)]
        if len(fresh) < len(waiting):
            self.metrics.add("request", "repeated", len(waiting) - len(fresh))
        if not fresh:
            return math.inf
        try:
            self._write(fresh)
        except Exception as error:  # noqa: BLE001 - what is lost is counted, whatever it was
            self.metrics.add("request", "dropped_disk", len(fresh))
            reason = getattr(error, "strerror", None) or type(error).__name__
            self._log.log(logging.WARNING, "disk", "hicache_ext: nothing is recorded at present: %s", reason)
            self._encoder = None
        else:
            self.metrics.add("request", "written", len(fresh))
        return math.inf

    def _is_first(self, rid: str, asked: Asked) -> bool:
        key = (rid, asked.pages[-1], len(asked.pages))
        if key in self._seen:
            return False
        self._seen[key] = None
        if len(self._seen) > _REPEATS:
            self._seen.popitem(last=False)
        return True

    def _write(self, fresh: Sequence[Asked]) -> None:
        """Write requests. Raises OSError; then none of them counts as written."""
        tiers = tuple(dict.fromkeys(tier for asked in fresh for tier in asked.found))
        encoder, most, header = self._encoder, min(_LONGEST_FILE, self._settings.size // _SHARE_OF_A_FILE), b""
        # Somebody else may have removed the file.
        if encoder is None or self._size >= most or set(tiers) - set(encoder.tiers) or not self._path.exists():
            if encoder is not None:
                tiers = tuple(dict.fromkeys((*encoder.tiers, *tiers)))
            encoder = self._encoder = Encoder(self._salt, tiers)
            header = encoder.header(self._wall, self._facts())
            moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(self._wall + time.monotonic() - self._began))
            self._files += 1
            self._path, self._size = self._directory / f"{moment}-{self._name}-{self._files:06d}{SUFFIX}", 0
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        content = header + block(b"".join(encoder.entry(asked) for asked in fresh))
        self._make_room(len(content))
        self._append(content)

    def _append(self, content: bytes) -> None:
        """Append to the file. Raises OSError; then the file ends where it did, or must not be written to any more."""
        begin = 0 if self._size else os.O_CREAT | os.O_EXCL
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | begin, 0o600)
        try:
            os.fchmod(fd, 0o600)
            rest = memoryview(content)
            while rest:
                rest = rest[os.write(fd, rest) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, self._size)
                if not self._size:
                    self._path.unlink()
            raise
        finally:
            with contextlib.suppress(OSError):
                os.close(fd)
        self._size += len(content)

    def _make_room(self, wanted: int) -> None:
        """Remove the oldest files until ``wanted`` bytes fit."""
        sizes = {path: size for path in sorted(self._directory.glob(f"*{SUFFIX}")) if (size := _size_of(path))}
        total = sum(sizes.values())
        for path, size in sizes.items():
            if total + wanted <= self._settings.size:
                return
            if path != self._path:
                path.unlink(missing_ok=True)
                total -= size


def _salt_in(directory: Path) -> bytes:
    """Return the key of this directory's page hashes; the first process creates it."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        create_whole(directory / SALT_FILE, secrets.token_hex(SALT_BYTES))
        text = read_small(directory / SALT_FILE).decode("ascii", "replace").strip()
    except OSError as error:
        problem = f"{directory} cannot be used: {error.strerror or error}"
        raise ConfigError("hicache_ext.record.path", problem, "a directory that this account may write to") from None
    try:
        salt = bytes.fromhex(text)
    except ValueError:
        salt = b""
    if len(salt) != SALT_BYTES:
        problem = f"{directory / SALT_FILE} holds no salt"
        raise ConfigError("hicache_ext.record.path", problem, "that file removed: another one is made")
    return salt


def _of_run(found: Mapping[str, int], answered: int) -> dict[str, int]:
    """Scale ``found`` to the pages that were answered, since each part of a page counts as found."""
    whole = sum(found.values())
    if whole <= answered or not whole:
        return dict(found)
    shares, left = {}, answered
    for tier, pages in found.items():
        shares[tier] = min(left, -(-pages * answered // whole))
        left -= shares[tier]
    return shares


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0

"""A digest of every byte of a model's weight files, computed on separate threads while the model loads.

It covers every byte because models that differ in a few rows of one tensor must not share KV. That takes a while, so:

- It runs in the background. Until it has finished, the backend stores and serves nothing.
- A file's digest is remembered until the next boot, in a record keyed by file system, device, inode, size, mtime and
  ctime. The kernel updates the ctime at every change of a file. On file systems where something else may set it (FUSE,
  images, tmpfs) nothing is remembered.
- The ranks of a node share the work: each locks the record of the file it reads; the others take another file.

The digest must cover the bytes that SGLang loads. So the files' facts are recorded before the load (``__init__``) and
compared after it (``loaded``) and whenever a file is read. If one changed, the model stays unidentified.

Why SHA-256, rates, and what was tried: docs/decisions/weights-identity.md.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hicache_ext.errors import WeightsError
from hicache_ext.runtime.access import make_directory, open_file
from hicache_ext.runtime.background import BackgroundLoop
from hicache_ext.runtime.file_lock import try_lock_byte
from hicache_ext.runtime.file_systems import file_system_of
from hicache_ext.runtime.members import boot_id
from hicache_ext.runtime.threads import ThreadPool
from hicache_ext.runtime.vectored import read_into

logger = logging.getLogger(__name__)

PIECE = 8 * 1024 * 1024
"""Bytes hashed at a time; part of the definition of the digest."""

_DOMAIN = b"hicache_ext/weights/2\0"
_THREADS = 8
_NICENESS = 10
"""Niceness of the reading threads, because loading the model has priority."""
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")
_SHAPING_FILES = ("config.json", "params.json", "hf_quant_config.json", "quantize_config.json", "quant_config.json")
_SHAPING_SUFFIXES = (".index.json", ".py")
"""Suffixes of files besides the weights that decide which weights are loaded and how they become KV."""
_SETTLED = 10.0
"""Seconds a file must be unchanged before its digest is remembered: two versions within the granularity of a clock may
have equal times."""
_TICK = 0.1
"""Seconds a file must be unchanged before it is read: more than that granularity on a local file system."""
_KEEPS_CTIME = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "overlay", "nfs", "nfs4", "lustre", "ceph"}
)
_PART = re.compile(r"(.+)-\d{5}-of-(\d{5}\.gguf)")
_BUSY_PAUSE = 0.2
_LONGEST_TURN = 60.0
"""Seconds without progress after which a file is read even though another process holds its record."""


def facts_of(status: os.stat_result) -> tuple[int, ...]:
    """Return facts that change whenever the bytes of a file change; the last one is the time of the change."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def is_settled(file: _File, seconds: float) -> bool:
    """Return whether the last change is at least ``seconds`` ago. False if the file system keeps no ctime."""
    return 0 < file.facts[-1] < (time.time() - seconds) * 1e9


@dataclass(frozen=True, slots=True)
class _File:
    """A file to digest. ``name``: the part of its path that counts, so that equal models match in any directory."""

    name: str
    path: Path
    facts: tuple[int, ...]

    @property
    def size(self) -> int:
        return self.facts[2]


class ModelFingerprint:
    """The digest of the files of one model. Thread-safe.

    ``digest`` is 32 hexadecimal digits; None until ``done``, or if there is a ``problem``.
    """

    def __init__(self, model_path: str, revision: str | None = None, *, weights: bool = True) -> None:
        """Record the files. ``model_path``: a directory, a GGUF file, or a name in the local hub cache.

        Without ``weights``, weight files do not count and may be absent (``--load-format dummy``).
        """
        self.model_path = model_path
        self.revision = revision
        self._weights = weights
        self.digest: str | None = None
        self.problem: str | None = None
        self.done = threading.Event()
        self._lock = threading.Lock()
        self._started = False
        self._callbacks: list[Callable[[], None]] = []
        self._records: Path | None = None
        self._bytes_read = 0
        self._files: list[_File] = []
        try:
            self._files = _files_of(model_path, revision, weights)
        except (OSError, WeightsError) as error:
            self.problem = str(error)

    @property
    def found(self) -> bool:
        """Return whether there are files to read."""
        return bool(self._files)

    def start(self, remember_in: Path | None = None) -> None:
        """Begin reading, once. Does not wait."""
        with self._lock:
            if self._started:
                return
            self._started, self._records = True, remember_in
        if self.problem is None and not BackgroundLoop("hicache-weights", self._run).wake():
            self._fail("there is no thread to read it with")
        if self.problem is not None:
            self._end()

    def loaded(self) -> bool:
        """Check, after the model was loaded, that the files are as recorded before it, now and when they were read.

        Returns False if they are but files were added: this digest is then incomplete, and a new one must be made.
        """
        try:
            now = {file.path: file.facts for file in _files_of(self.model_path, self.revision, self._weights)}
        except (OSError, WeightsError):
            now = {}
        changed = [file.path.name for file in self._files if now.get(file.path) != file.facts]
        if changed:
            self._fail(f"{changed[0]} changed while the model was loaded")
        elif len(now) > len(self._files):
            self._fail("files were added while the model was loaded")
        if self.problem is not None and self.done.is_set():
            self._end()
        return bool(changed) or self.problem is None

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when the result is known: now, or later on the reading thread. It must not raise.

        It is called again if ``loaded`` finds later that other bytes were loaded than digested.
        """
        with self._lock:
            self._callbacks.append(callback)
            done = self.done.is_set()
        if done:
            callback()

    def _run(self) -> None:
        started = time.monotonic()
        try:
            digests = self._digests()
            digest = hashlib.sha256(_DOMAIN)
            for name, of_file in sorted(digests.items()):
                digest.update(len(name).to_bytes(8, "little") + name.encode("utf-8", "surrogateescape") + of_file)
            self.digest = digest.hexdigest()[:32]
            logger.info(
                "hicache_ext: the weights in %s are identified: %.1f GB, of which %.1f were read in %.1f s",
                self.model_path,
                sum(file.size for file in self._files) / 1e9,
                self._bytes_read / 1e9,
                time.monotonic() - started,
            )
        except Exception as error:  # noqa: BLE001 - whatever it is, the model is unidentified and the server goes on
            self._fail(str(error) or type(error).__name__)
        self._end()

    def _fail(self, problem: str) -> None:
        self.problem = f"{problem} ({self.model_path})"
        self.digest = None

    def _end(self) -> None:
        with self._lock:
            if self.problem is not None:
                self.digest = None
            self.done.set()
            callbacks = list(self._callbacks)
        for callback in callbacks:
            try:
                callback()
            except Exception:
                # A failing callback is no reason to read the files again or to keep the result from others.
                logger.exception("hicache_ext: telling that the weights in %s are known", self.model_path)

    def _digests(self) -> dict[str, bytes]:
        """Return the digest of every file by its name."""
        digests: dict[str, bytes] = {}
        waiting = self._files
        last_progress = time.monotonic()
        while waiting:
            busy: list[_File] = []
            for file in waiting:
                digest = self._digest_of(file, patient=time.monotonic() - last_progress < _LONGEST_TURN)
                if digest is None:
                    busy.append(file)
                else:
                    digests[file.name] = digest
                    last_progress = time.monotonic()
            if len(busy) == len(waiting):
                time.sleep(_BUSY_PAUSE)
            waiting = busy
        return digests

    def _digest_of(self, file: _File, *, patient: bool) -> bytes | None:
        """Return the file's digest, or None if ``patient`` and another process is reading the file."""
        name = None if self._records is None else _record_name(file)
        if self._records is None or name is None:
            return self._read_whole(file)
        with claimed(self._records, name) as record:
            if record is None:
                return None if patient else self._read_whole(file)
            digest = _recorded(record, name)
            if digest is None:
                settled = is_settled(file, _SETTLED)
                digest = self._read_whole(file)
                if settled:
                    _record(record, name, digest)
            else:
                with _opened(file):
                    pass
            return digest

    def _read_whole(self, file: _File) -> bytes:
        with _opened(file) as fd:
            digest = digest_of_file(fd, file.size)
            if facts_of(os.fstat(fd)) != file.facts:
                raise WeightsError(f"{file.path.name} changed while it was read")
        self._bytes_read += file.size
        return digest


@contextmanager
def _opened(file: _File) -> Iterator[int]:
    """Open the recorded file and sync its dirty pages. Raises WeightsError and OSError."""
    if not is_settled(file, _TICK):
        time.sleep(_TICK)
    fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            # After the sync, any further write through a mapping changes the ctime again.
            os.fsync(fd)
        except OSError as error:
            logger.debug("%s cannot be synced: %s", file.path.name, error)
        if facts_of(os.fstat(fd)) != file.facts:
            raise WeightsError(f"{file.path.name} changed while the model was loaded")
        yield fd
    finally:
        os.close(fd)


def _record_name(file: _File) -> str | None:
    """Return a name that is unique on this machine during this boot; None for a file that must not be remembered."""
    if file.size <= PIECE or file_system_of(file.path.resolve()).type not in _KEEPS_CTIME:
        return None
    try:
        file_system = os.statvfs(file.path).f_fsid
    except OSError:
        return None
    boot = boot_id()
    if boot is None:
        return None
    return hashlib.sha256(repr((file.facts, (file_system, boot))).encode()).hexdigest()[:32]


# The record of a file's digest is a small file: ``<digest, 64 hex digits> <check, 16 hex digits>``; the check covers
# the record's name, too. A torn or damaged record counts as empty. On errors of the medium nothing is remembered.


@contextmanager
def claimed(directory: Path, name: str) -> Iterator[int | None]:
    """Open and lock the record of a file's digest and yield its descriptor; -1 if there can be no record, None while
    another process has it.

    The process that reads the weights file locks it. The kernel releases the lock when that process dies.
    """
    try:
        make_directory(directory)
        fd = open_file(directory / name, os.O_RDWR)
    except OSError as error:
        logger.debug("digests of weight files are not remembered in %s: %s", directory, error)
        yield -1
        return
    try:
        ours = True
        with suppress(OSError):  # a file system without locks: two ranks may read the same file
            ours = try_lock_byte(fd, 0)
        yield fd if ours else None
    finally:
        os.close(fd)


def _recorded(fd: int, name: str) -> bytes | None:
    try:
        text = os.pread(fd, 64 + 1 + 16 + 1, 0)
        digest = bytes.fromhex(text[:64].decode("ascii"))
    except (OSError, ValueError):
        return None
    return digest if text == _text_of_record(name, digest) else None


def _record(fd: int, name: str, digest: bytes) -> None:
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, _text_of_record(name, digest), 0)
    except OSError as error:
        logger.debug("the digest of a weights file is not remembered: %s", error)


def _text_of_record(name: str, digest: bytes) -> bytes:
    check = hashlib.sha256(name.encode() + digest).hexdigest()[:16]
    return f"{digest.hex()} {check}".encode()


def digest_of_file(fd: int, size: int) -> bytes:
    """Return SHA-256 over the size and the SHA-256 of each piece of ``PIECE`` bytes; threads hash pieces in parallel.

    Raises OSError, and WeightsError for a file that is shorter than ``size``.
    """
    pieces = -(-size // PIECE)
    digests: list[bytes] = [b""] * pieces
    numbers = itertools.count()
    problems: list[Exception] = []

    def read_pieces() -> None:
        buffer = memoryview(bytearray(min(PIECE, max(size, 1))))
        while not problems and (number := next(numbers)) < pieces:
            try:
                piece = buffer[: min(PIECE, size - number * PIECE)]
                if read_into(fd, [piece], number * PIECE) < len(piece):
                    raise WeightsError("a file of weights became shorter while it was read")
                digests[number] = hashlib.sha256(piece).digest()
            except Exception as error:  # noqa: BLE001 - the waiting thread re-raises it
                problems.append(error)

    readers = ThreadPool("hicache-weights", niceness=_NICENESS)
    calls = [readers.start(read_pieces) for _ in range(min(pieces, _THREADS, len(os.sched_getaffinity(0))))]
    readers.close()
    for call in calls:
        call.result()
    if problems:
        raise problems[0]
    return hashlib.sha256(_DOMAIN + size.to_bytes(8, "little") + b"".join(digests)).digest()


def _files_of(model_path: str, revision: str | None, weights: bool) -> list[_File]:
    """Return the files that shape a model's KV. Raises WeightsError if there are no weights among them, and OSError."""
    path = Path(model_path)
    if not path.exists():
        path = _snapshot_of(model_path, revision)
    if path.is_file():
        named = _parts_of(path)
    else:
        named = {
            file.name: file
            for file in path.iterdir()
            if file.name in _SHAPING_FILES or file.name.endswith(_SHAPING_SUFFIXES)
        }
        found = {file.name: file for file in path.iterdir() if file.suffix in _WEIGHT_SUFFIXES}
        if weights and not found:
            raise WeightsError(f"there are no weight files ({', '.join(_WEIGHT_SUFFIXES)}) in {path}")
        named |= found if weights else {}
    return [_File(name, file, facts_of(file.stat())) for name, file in sorted(named.items())]


def _parts_of(path: Path) -> dict[str, Path]:
    """Return the parts of a GGUF model, under names that do not depend on the model's file name."""
    part = _PART.fullmatch(path.name)
    if part is None:
        return {path.suffix: path}
    beside = ((file, _PART.fullmatch(file.name)) for file in path.parent.iterdir())
    return {file.name: file for file, other in beside if other is not None and other.groups() == part.groups()}


def _snapshot_of(model_path: str, revision: str | None) -> Path:
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model_path, revision=revision, local_files_only=True))
    except Exception as error:  # a missing package, a missing snapshot and a bad name all mean "unknown"
        raise WeightsError(f"there are no files of {model_path!r} on this node") from error

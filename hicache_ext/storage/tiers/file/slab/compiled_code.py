"""Loads the code that numba compiles: the moves of pages (compiled_runs.py), the index (slot_code.py), and the work on
a batch before the tier (page/batch_code.py).

Compiling takes 10 to 15 seconds, once per version and machine; numba's cache keeps the result. The thread that opens a
tier may be SGLang's scheduler, so a process of its own compiles, and Python does the work meanwhile. A cached result
loads in half a second.

Loaded code is tried on samples and compared with Python first. Reasons: docs/decisions/compiled-code.md.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hicache_ext.page import batch_code
from hicache_ext.page.envelope import (
    IDENTITY_LENGTH,
    KEY_LENGTH,
    PAGE_HASH_LENGTH,
    PAGE_START,
    SEAL_LENGTH,
    encode_page,
    page_seal,
)
from hicache_ext.page.memory import addresses_of
from hicache_ext.runtime.background import once_in_background
from hicache_ext.runtime.jit import Function, compiled_kernels, sources_digest, use
from hicache_ext.runtime.vectored import IOV_MAX
from hicache_ext.storage.contract.store import key_words
from hicache_ext.storage.tiers.file.device_probe import Mode
from hicache_ext.storage.tiers.file.pages.tree import BLOCK
from hicache_ext.storage.tiers.file.slab import slot_code
from hicache_ext.storage.tiers.file.slab.shapes import HEADER, slot_size_of
from hicache_ext.storage.tiers.file.slab.slot_code import GROUP_WORDS, RECORD_WORDS, WAYS

logger = logging.getLogger(__name__)

AT_ONCE = 512 << 10
"""Bytes moved by one system call through the page cache: they must stay in the processor's cache until checked."""
AT_ONCE_DIRECT = 1 << 20
"""The same past the page cache: large enough for the disk; other threads keep it busy while these are checked."""
_HEADERS = 128
"""Headers in a thread's memory: at most so many pages are written by one system call."""
LEFT = 1
"""The result of a page that was not moved."""
_LONGEST_COMPILATION = 600.0
"""Seconds."""
_BEING_COMPILED = "it is being compiled, once per version and machine"


class OfCall(NamedTuple):
    into_memory: bool
    mode: Mode
    flags: int
    filler: int


def facts_of(payload: int, of_call: OfCall, direct: bool) -> tuple[npt.NDArray[np.int64], int]:
    """``facts`` of compiled_runs.py, for a call that begins now; not to be changed. And how many pages a thread takes
    at a time."""
    at_once = AT_ONCE_DIRECT if direct else AT_ONCE
    if of_call.into_memory:
        return _facts_of_reading(payload, of_call, direct, at_once)
    return _facts(payload, of_call, direct, at_once, int(time.time() * 1000)), _pages_at_once(payload, at_once)


@functools.lru_cache(maxsize=1024)
def _facts_of_reading(payload: int, of_call: OfCall, direct: bool, at_once: int) -> tuple[npt.NDArray[np.int64], int]:
    return _facts(payload, of_call, direct, at_once, 0), _pages_at_once(payload, at_once)


def _pages_at_once(payload: int, at_once: int) -> int:
    return max(1, at_once // slot_size_of(payload))


def _facts(payload: int, of_call: OfCall, direct: bool, at_once: int, created_ms: int) -> npt.NDArray[np.int64]:
    start = np.frombuffer(PAGE_START, np.int64)
    # The flags are for the page cache.
    flags = 0 if direct else of_call.flags
    return np.array([payload, slot_size_of(payload), *start, created_ms, flags, at_once, of_call.filler], np.int64)


class CompiledCode:
    """compiled_runs.py with what it needs, and the kernels of slot_code.py and batch_code.py."""

    def __init__(self) -> None:
        """Raises ImportError with what is missing."""
        from hicache_ext.runtime import native_calls
        from hicache_ext.storage.tiers.file.slab import compiled_runs

        self.functions = native_calls.find_functions()
        self.read = compiled_runs.read_pages
        self.write = compiled_runs.write_pages
        self._at_once = compiled_runs.AT_ONCE
        self.zeros = np.zeros(BLOCK, np.uint8)
        self.nowhere = np.zeros(BLOCK, np.uint8)
        self.zeros_at, self.nowhere_at = self.zeros.ctypes.data, self.nowhere.ctypes.data
        self.scratch = _Scratch(native_calls.HashState)
        self._check()
        self.plain_kernels: Mapping[str, Function] = {}
        """The Python functions that the kernels replaced."""
        self.kernels = compiled_kernels(slot_code)
        _check_kernels(self.kernels)
        self.batch_kernels = compiled_kernels(batch_code)
        _check_batch_kernels(self.batch_kernels)

    def _check(self) -> None:
        """Raises ImportError if the compiled code writes or accepts other pages than envelope.py: numba's cache does
        not notice every change, and other processes read the pages."""
        key, now = os.urandom(KEY_LENGTH), int(time.time() * 1000)
        memory = bytearray(os.urandom(5000))
        content, parts = bytes(memory), [memoryview(memory)[:2000], memoryview(memory)[2000:]]
        located = addresses_of([parts], writable=True)
        assert located is not None
        scratch = self.scratch
        header = encode_page(key, parts, len(content), now)
        facts = _facts(len(content), OfCall(False, "buffered", 0, self.zeros_at), False, AT_ONCE, now)
        slots, headers = os.memfd_create("hicache"), os.memfd_create("hicache")
        zero, seals = np.zeros(1, np.int64), np.zeros((3, SEAL_LENGTH // 8), np.uint64)
        at = zero, zero, zero, np.array([[0, slots, headers, 1]], np.int64), *located[:2]

        def succeeds(move: Callable[..., None], of_key: bytes, at_once: int) -> bool:
            facts[self._at_once], results, taken = at_once, np.full(1, LEFT, np.int64), np.zeros(2, np.int64)
            arrays = *at, key_words([of_key]).view(np.uint64), seals, scratch.headers, scratch.vectors
            move(self.functions, facts, *arrays, scratch.state.address, results, taken)
            if taken[1] != (results == 0).sum():
                raise ImportError("it does not count its pages: remove the files of numba's cache")
            return not results.any()

        try:
            sound = succeeds(self.write, key, AT_ONCE) and os.pread(slots, 2 * len(content), 0) == content
            sound = sound and os.pread(headers, 2 * HEADER, 0) == header
            nothing = bytes(SEAL_LENGTH)
            sound = sound and seals.tobytes() == nothing + page_seal(key, len(content), parts) + nothing
            for at_once in (AT_ONCE, len(content) // 2):
                memory[:] = bytes(len(content))
                sound = sound and succeeds(self.read, key, at_once) and memory == content
                sound = sound and not succeeds(self.read, key[::-1], at_once)
            os.pwrite(slots, bytes([content[-1] ^ 1]), len(content) - 1)
            if not sound or succeeds(self.read, key, AT_ONCE):
                raise ImportError("its pages are not those of this version: remove the files of numba's cache")
        finally:
            os.close(slots)
            os.close(headers)


class _Scratch(threading.local):
    """Memory of one thread."""

    def __init__(self, new_state: Callable[[], Any]) -> None:
        self.state = new_state()
        self.vectors = np.zeros(2 * IOV_MAX, np.int64)
        self.headers = np.zeros(_HEADERS * HEADER // 8, np.uint64)


def _check_kernels(kernels: Mapping[str, Function]) -> None:
    """Raises ImportError when these kernels change a small index differently from slot_code.py."""
    plain = {name: getattr(slot_code, name) for name in kernels}
    if _after_some_changes(kernels) != _after_some_changes(plain):
        raise ImportError("its index is not that of this version: remove the files of numba's cache")


def _check_batch_kernels(kernels: Mapping[str, Function]) -> None:
    """Raises ImportError when these kernels answer differently from batch_code.py."""
    hashes, identity = [os.urandom(PAGE_HASH_LENGTH), os.urandom(PAGE_HASH_LENGTH)], os.urandom(IDENTITY_LENGTH)
    keys, numbers = np.zeros((2, KEY_LENGTH // 8), np.int64), np.zeros(2, np.int64)

    def are_hashes(text: str) -> bool:
        encoded, of_identity = (np.frombuffer(bytearray(some), np.int64) for some in (text.encode(), identity))
        return bool(kernels["decode_hashes"](encoded, of_identity, keys))

    text = batch_code.SEPARATOR.join([page_hash.hex() for page_hash in hashes])
    sound = are_hashes(text) and keys.tobytes() == b"".join([identity + page_hash for page_hash in hashes])
    sound = sound and not any(are_hashes(text[:at] + "G" + text[at + 1 :]) for at in range(len(text)))
    indices = np.arange(64, 80)
    sound = sound and kernels["number_pages"](indices, 8, 10, numbers) == 2 and numbers.tolist() == [8, 9]
    kernels["address_pages"](numbers, np.array([100, 7]), np.array([10, 1]), addresses := np.zeros((2, 2), np.int64))
    sound = sound and addresses.tolist() == [[180, 15], [190, 16]]
    if (
        not sound
        or kernels["number_pages"](indices + 1, 8, 100, numbers)
        or kernels["number_pages"](indices, 8, 8, numbers)
    ):
        raise ImportError("its keys are not those of this version: remove the files of numba's cache")


def _after_some_changes(kernels: Mapping[str, Function]) -> bytes:
    """All words of an index after pages were written, used, evicted, written again and removed."""
    slots, size = 40, 1 << 20
    records, groups = (np.zeros((slots + 1, width), np.int64) for width in (RECORD_WORDS, GROUP_WORDS))
    slabs = np.array([[3, size, slots, 16, 0]], np.int64)
    table = (records, groups, np.zeros(128, np.int64), slabs)
    clocks, ghosts, remembered = np.array([[size, 0, 0, 0]]), np.zeros((3, 8, WAYS), np.int64), np.zeros(1, np.int64)
    keys = np.arange(6 * 60).reshape(60, 6) * 0x123456789ABCDE7
    generation, writer, none = np.zeros(1, np.int64), np.arange(6), np.empty(0, np.int64)
    fresh, located, found, answers = np.full(1, 20), np.zeros((4, 60), np.int64), np.zeros(4, np.int64), []
    looked_up = np.zeros(60, np.int64)
    kernels["settle_all"](*table)
    for first, count in ((0, 25), (20, 30), (5, 20)):
        answers.append(kernels["evict_pages"](*table, size, count - 15, 2, slots, none, ghosts, remembered))
        taken = np.zeros((2, count), np.int64)
        done = kernels["take_free"](*table, size, writer, taken)
        rows, published = np.zeros((2, done), np.int64)
        answers.append(kernels["rows_pending"](records, slabs, writer, taken[:, :done].copy(), rows))
        at, created = np.arange(first, first + done), np.full(1, 1000 + first)
        of_clock = clocks[0], slots, ghosts, remembered, 100
        kernels["describe_pages"](records, table[2], keys, generation, at, rows, at + 4096, created, 1, *of_clock)
        answers.append(kernels["publish_pages"](*table, rows, published))
        answers.append(kernels["touch_chain"](*table, keys[first:].copy(), generation, clocks, np.full(1, slots)))
        look_up = records, table[2], keys, generation, 1005
        answers.append(kernels["locate"](*look_up, slabs, fresh, located, found))
        answers.append(kernels["find"](*look_up, looked_up, 0))
        kernels["forget_pages"](*table, rows[::7].copy())
    parts = [*table, clocks, ghosts, remembered, located, found, looked_up, np.array(answers, np.int64)]
    return b"".join(part.tobytes() for part in parts)


# -- loading -----------------------------------------------------------------------------------------------------------


def compiled_code() -> CompiledCode | None:
    """The compiled code; None where it is not available, and while it is compiled for the first time."""
    if not _loading.begun:
        _loading.begin()
    return _loading.code


def wait_for_compiled_code() -> CompiledCode | None:
    """Waits for the compiled code; None where it is not available."""
    compiled_code()
    _loading.ended.wait()
    return _loading.code


def why_not_compiled() -> str | None:
    """Why Python moves the pages; None where compiled code does."""
    compiled_code()
    return _loading.reason


class _Loading:
    """The state of loading in this process."""

    def __init__(self) -> None:
        self.begun = False
        self.code: CompiledCode | None = None
        self.reason: str | None = _BEING_COMPILED
        self.ended = threading.Event()
        self._lock = threading.Lock()

    def begin(self) -> None:
        with self._lock:
            if self.begun:
                return
            try:
                stamp = _stamp()
            except Exception:  # noqa: BLE001 - what is wrong is said when it is loaded
                self._load(None)
            else:
                if stamp is not None and stamp.exists():
                    self._load(stamp)
                else:
                    logger.info("the file tier compiles its code, once per version and machine; in Python until then")
                    if not once_in_background("hicache-compile", lambda: self._compile(stamp)):
                        self._give_up("there is no thread to compile it on")
            self.begun = True

    def _compile(self, stamp: Path | None) -> None:
        """Compile in another process, which fills numba's cache, then load; in this one where there is no cache."""
        if stamp is None:
            self._load(None)
            return
        command = [sys.executable, "-c", f"from {__name__} import compile_for_others; compile_for_others()"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with suppress(OSError, subprocess.SubprocessError):
            subprocess.run(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=_LONGEST_COMPILATION,
                check=False,
            )
        if stamp.exists():
            self._load(stamp)
        else:
            self._give_up("it could not be compiled; hicache-ext doctor tries again")

    def _load(self, stamp: Path | None) -> None:
        try:
            code = CompiledCode()
        except ImportError as error:
            self._give_up(str(error))
            return
        except Exception as error:  # noqa: BLE001 - a compiler may fail in many ways, and pages move without it
            self._give_up(f"{type(error).__name__}: {error}")
            return
        code.plain_kernels = use(slot_code, code.kernels)
        use(batch_code, code.batch_kernels)
        if stamp is not None:
            with suppress(OSError):
                stamp.touch()
        self.code, self.reason = code, None
        self.ended.set()

    def _give_up(self, reason: str) -> None:
        self.reason = reason
        self.ended.set()
        logger.info(
            "the file tier moves its pages in Python, which is slower and holds the GIL (%s): "
            "pip install 'hicache-ext[compiled]'",
            reason,
        )


_loading = _Loading()


def compile_for_others() -> None:
    """The main function of the compiling process."""
    os.nice(10)
    _loading.begun = True
    _loading._load(_stamp())


def _stamp() -> Path | None:
    """The file in numba's cache that marks this version as compiled for this processor; None where numba has no cache.
    Raises whatever numba does, ImportError without numba."""
    import numba
    from llvmlite import binding

    if numba.config.DISABLE_JIT:
        raise ImportError("NUMBA_DISABLE_JIT is set")
    try:
        cache = Path(numba.njit(cache=True)(slot_code.settle_all).stats.cache_path)
    except RuntimeError:
        return None
    processor = f"{binding.get_host_cpu_name()} {binding.get_host_cpu_features().flatten()}"
    facts = "-".join([numba.__version__, sys.version, processor, sources_digest()])
    return cache / f"hicache-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.compiled"

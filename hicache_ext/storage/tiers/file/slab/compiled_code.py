"""The code that numba compiles: the moves of pages (compiled_runs.py), and the work on a batch before the tier
(page/batch_code.py). loading.py gives it.

It is tried on samples and compared with Python first. Reasons: docs/decisions/compiled-code.md.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
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
from hicache_ext.runtime.jit import Function, compiled_kernels
from hicache_ext.runtime.vectored import IOV_MAX
from hicache_ext.storage.contract.store import identities_of, key_words
from hicache_ext.storage.tiers.file.devices import Mode
from hicache_ext.storage.tiers.file.pages.scanning import BLOCK
from hicache_ext.storage.tiers.file.pages.tree import PageTree
from hicache_ext.storage.tiers.file.slab.shapes import HEADER, slot_size_of
from hicache_ext.storage.tiers.file.slab.slot_code import ROW_WORDS, SEAL

AT_ONCE = 512 << 10
"""Bytes moved by one system call through the page cache: they must stay in the processor's cache until checked."""
AT_ONCE_DIRECT = 1 << 20
"""The same past the page cache: large enough for the disk; other threads keep it busy while these are checked."""
_HEADERS = 128
"""Headers in a thread's memory: at most so many pages are written by one system call."""
LEFT = 1
"""The result of a page that was not moved."""


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
    """compiled_runs.py with what it needs, and the kernels of batch_code.py."""

    def __init__(self) -> None:
        """Raises ImportError with what is missing."""
        from hicache_ext.runtime import native_calls
        from hicache_ext.storage.tiers.file.slab import compiled_runs

        self.functions = native_calls.find_functions()
        self.read = compiled_runs.read_pages
        self.write = compiled_runs.write_pages
        self.check_headers = compiled_runs.check_headers
        self._find_page_files, self._page_path = compiled_runs.find_page_files, compiled_runs.PAGE_PATH
        self._at_once = compiled_runs.AT_ONCE
        self.zeros = np.zeros(BLOCK, np.uint8)
        self.nowhere = np.zeros(BLOCK, np.uint8)
        self.zeros_at, self.nowhere_at = self.zeros.ctypes.data, self.nowhere.ctypes.data
        self.scratch = _Scratch(native_calls.HashState)
        self._check()
        self._check_page_files()
        self.batch_kernels = compiled_kernels(batch_code)
        _check_batch_kernels(self.batch_kernels)

    def has_page_files(self, pages: str, keys: Sequence[bytes], least: int, oldest: int) -> npt.NDArray[np.uint8]:
        """For each key whether ``pages`` has a page file of at least ``least`` bytes, used at ``oldest`` (seconds) or
        later. Raises OSError where the directory of an identity cannot be looked into."""
        present = np.zeros(len(keys), np.uint8)
        of_pages = key_words(keys).view(np.uint8)
        identities = identities_of(keys)
        for identity in identities:
            of_identity = slice(None)
            if len(identities) > 1:
                of_identity = (of_pages[:, :IDENTITY_LENGTH] == np.frombuffer(identity, np.uint8)).all(axis=1)
            try:
                directory = os.open(f"{pages}/{identity.hex()}", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            except (FileNotFoundError, NotADirectoryError):
                continue
            try:
                present[of_identity] = self._page_files_in(directory, of_pages[of_identity], least, oldest)
            finally:
                os.close(directory)
        return present

    def _page_files_in(
        self, directory: int, keys: npt.NDArray[np.uint8], least: int, oldest: int
    ) -> npt.NDArray[np.uint8]:
        path, status = np.frombuffer(bytearray(self._page_path), np.uint8), np.zeros(32, np.int64)
        present = np.zeros(len(keys), np.uint8)
        self._find_page_files(self.functions, keys, directory, least, oldest, path, status, present)
        return present

    def _check_page_files(self) -> None:
        """Raises ImportError if page files are found elsewhere than PageTree has them."""
        keys = [os.urandom(KEY_LENGTH) for _ in range(3)]
        try:
            with TemporaryDirectory(prefix="hicache-") as place:
                tree = PageTree(Path(place))
                for key in keys[:2]:
                    path = Path(tree.page_path(key))
                    path.parent.mkdir(parents=True)
                    path.write_bytes(bytes(100))
                os.utime(path, (5, 5))
                found = [
                    self.has_page_files(str(tree.pages), keys, least, oldest).tolist()
                    for least, oldest in ((100, 0), (101, 0), (100, 6))
                ]
        except OSError:
            # No place to try it: it is left out.
            found = []
        if found != [[1, 1, 0], [0, 0, 0], [1, 0, 0]]:
            raise ImportError("it finds other page files: remove the files hicache_ext-*.compiled")

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
        zero, rows = np.zeros(1, np.int64), np.zeros((3, ROW_WORDS), np.uint64)
        at = zero, zero, zero, np.array([[0, slots, headers, 1]], np.int64), *located[:2]

        def succeeds(move: Callable[..., None], of_key: bytes, at_once: int) -> bool:
            facts[self._at_once], results, taken = at_once, np.full(1, LEFT, np.int64), np.zeros(2, np.int64)
            arrays = *at, key_words([of_key]).view(np.uint64), rows, scratch.headers, scratch.vectors
            move(self.functions, facts, *arrays, scratch.state.address, results, taken)
            if taken[1] != (results == 0).sum():
                raise ImportError("it does not count its pages: remove the files hicache_ext-*.compiled")
            return not results.any()

        try:
            sound = succeeds(self.write, key, AT_ONCE) and os.pread(slots, 2 * len(content), 0) == content
            sound = sound and os.pread(headers, 2 * HEADER, 0) == header
            expected = np.zeros_like(rows)
            expected[1, SEAL : SEAL + SEAL_LENGTH // 8] = np.frombuffer(page_seal(key, len(content), parts), np.uint64)
            sound = sound and bool((rows == expected).all())
            sound = sound and self._checks_headers(header, expected[1, SEAL : SEAL + SEAL_LENGTH // 8])
            for at_once in (AT_ONCE, len(content) // 2):
                memory[:] = bytes(len(content))
                sound = sound and succeeds(self.read, key, at_once) and memory == content
                sound = sound and not succeeds(self.read, key[::-1], at_once)
            os.pwrite(slots, bytes([content[-1] ^ 1]), len(content) - 1)
            if not sound or succeeds(self.read, key, AT_ONCE):
                raise ImportError("its pages are not those of this version: remove the files hicache_ext-*.compiled")
        finally:
            os.close(slots)
            os.close(headers)

    def _checks_headers(self, header: bytes, seal: npt.NDArray[np.uint64]) -> bool:
        """Whether the check of headers accepts this one, and no other."""
        headers = np.frombuffer(bytearray(header * 3), np.uint64).reshape(3, -1)
        headers[1, 9] ^= np.uint64(1)
        headers[2, 0] ^= np.uint64(1)
        seals, valid = np.zeros((3, SEAL_LENGTH // 8), np.uint64), np.empty(3, np.int64)
        start = np.frombuffer(PAGE_START, np.int64).tolist()
        self.check_headers(self.functions, headers, *start, seals, valid)
        return valid.tolist() == [1, 0, 0] and bool((seals[0] == seal).all())


class _Scratch(threading.local):
    """Memory of one thread."""

    def __init__(self, new_state: Callable[[], Any]) -> None:
        self.state = new_state()
        self.vectors = np.zeros(2 * IOV_MAX, np.int64)
        self.headers = np.zeros(_HEADERS * HEADER // 8, np.uint64)


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
        raise ImportError("its keys are not those of this version: remove the files hicache_ext-*.compiled")

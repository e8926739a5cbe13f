"""C functions called by address from code that numba compiles, so that the compiled code can be cached on disk.

``find_functions()`` gives the addresses: system calls of the C library, and XXH3, which the extension module of the
``xxhash`` package exports. Importing this module imports numba.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import platform
import sys
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import xxhash
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from hicache_ext.runtime.jit import compiled

_WORD = ir.IntType(64)

(
    PREADV2,
    PWRITEV2,
    ERRNO,
    HASH,
    RESET,
    UPDATE,
    DIGEST,
    STATX,
    RECVMSG,
    SENDMSG,
    SETSOCKOPT,
    CLOCK_GETTIME,
    MEMCPY,
) = range(13)
"""Positions in the array of ``find_functions``."""


def find_functions() -> npt.NDArray[np.int64]:
    """Addresses of the C functions. Raises ImportError with the reason."""
    # Two words are returned in two registers, and fields of a header are little-endian.
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64") or sys.byteorder != "little":
        raise ImportError(f"{sys.platform} on {platform.machine()} is not supported")
    if numba.config.DISABLE_JIT:
        raise ImportError("NUMBA_DISABLE_JIT is set")
    try:
        library = _xxhash_library()
        system = ctypes.CDLL(None)
        found = [
            _address(system, "preadv2"),
            _address(system, "pwritev2"),
            _address(system, "__errno_location"),
            _address(library, "XXH3_128bits_dispatch", "XXH3_128bits"),
            _address(library, "XXH3_128bits_reset"),
            _address(library, "XXH3_128bits_update_dispatch", "XXH3_128bits_update"),
            _address(library, "XXH3_128bits_digest"),
            _address(system, "statx"),
            _address(system, "recvmsg"),
            _address(system, "sendmsg"),
            _address(system, "setsockopt"),
            _address(system, "clock_gettime"),
            _address(system, "memcpy"),
        ]
    except (OSError, AttributeError) as error:
        raise ImportError(str(error)) from error
    functions = np.array(found, np.int64)
    _check_hash(functions)
    return functions


class HashState:
    """Memory for a checksum over several pieces. One thread at a time."""

    def __init__(self) -> None:
        self._library = _xxhash_library()
        self.address = int(self._library.XXH3_createState() or 0)
        if not self.address:
            raise MemoryError

    def __del__(self) -> None:
        if getattr(self, "address", 0):
            self._library.XXH3_freeState(self.address)


@functools.cache
def _xxhash_library() -> ctypes.CDLL:
    """Raises ImportError, OSError or AttributeError."""
    library = ctypes.CDLL(str(importlib.import_module("xxhash._xxhash").__file__))
    library.XXH3_createState.restype = ctypes.c_void_p
    library.XXH3_freeState.argtypes = [ctypes.c_void_p]
    return library


def _address(library: ctypes.CDLL, *names: str) -> int:
    """The address of the first of these names that exists. Raises AttributeError."""
    for name in names:
        if hasattr(library, name):
            return int(ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0)
    raise AttributeError(f"no function {names[-1]}")


@intrinsic  # type: ignore[untyped-decorator]
def call(_: Any, function: Any, a: Any, b: Any, c: Any, d: Any, e: Any) -> Any:
    """Call the C function at this address with up to five words; returns a word."""

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        pointer = ir.FunctionType(_WORD, [_WORD] * 5).as_pointer()
        return builder.call(builder.inttoptr(values[0], pointer), values[1:])

    return types.int64(*[types.int64] * 6), generate


@intrinsic  # type: ignore[untyped-decorator]
def call_for_two(_: Any, function: Any, a: Any, b: Any) -> Any:
    """Call the C function at this address, which returns a struct of two words."""
    answer = types.UniTuple(types.uint64, 2)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointer = ir.FunctionType(ir.LiteralStructType([_WORD, _WORD]), [_WORD] * 2).as_pointer()
        both = builder.call(builder.inttoptr(values[0], pointer), values[1:])
        parts = [builder.extract_value(both, 0), builder.extract_value(both, 1)]
        return context.make_tuple(builder, signature.return_type, parts)

    return answer(*[types.int64] * 3), generate


@intrinsic  # type: ignore[untyped-decorator]
def int_at(_: Any, address: Any) -> Any:
    """The C ``int`` at an address."""

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return builder.sext(builder.load(builder.inttoptr(values[0], ir.IntType(32).as_pointer())), _WORD)

    return types.int64(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def fetch_add(_: Any, address: Any, amount: Any) -> Any:
    """Add atomically to the word at an address; returns the value before."""

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(values[0], _WORD.as_pointer()), values[1], "monotonic")

    return types.int64(types.int64, types.int64), generate


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def swapped(word: Any) -> Any:
    """A word with its bytes reversed: the canonical form of a checksum is big-endian."""
    word = ((word & np.uint64(0x00FF00FF00FF00FF)) << np.uint64(8)) | (
        (word >> np.uint64(8)) & np.uint64(0x00FF00FF00FF00FF)
    )
    word = ((word & np.uint64(0x0000FFFF0000FFFF)) << np.uint64(16)) | (
        (word >> np.uint64(16)) & np.uint64(0x0000FFFF0000FFFF)
    )
    return (word << np.uint64(32)) | (word >> np.uint64(32))


def _hash_into(functions: Any, state: Any, address: Any, length: Any, into: Any) -> Any:
    low, high = call_for_two(functions[HASH], address, length)
    into[0], into[1] = swapped(high), swapped(low)
    call(functions[RESET], state, 0, 0, 0, 0)
    call(functions[UPDATE], state, address, length // 2, 0, 0)
    call(functions[UPDATE], state, address + length // 2, length - length // 2, 0, 0)
    low, high = call_for_two(functions[DIGEST], state, 0)
    into[2], into[3] = swapped(high), swapped(low)


def _check_hash(functions: npt.NDArray[np.int64]) -> None:
    """Raises ImportError when the checksums differ from those of the page format."""
    hash_into = compiled("void(int64[::1], int64, int64, int64, uint64[::1])", _hash_into)
    data = np.frombuffer(os.urandom(5000), np.uint8)
    state = HashState()
    for length in (112, 1000, data.size):
        found = np.zeros(4, np.uint64)
        hash_into(functions, state.address, data.ctypes.data, length, found)
        if found.tobytes() != 2 * xxhash.xxh3_128_digest(data[:length].data):
            raise ImportError("its xxhash computes another checksum")

"""The native core (core.h), called through ctypes without the GIL; None where it was not built.

Each of its functions takes one struct of words, a ``Struct`` here, and returns a word::

    _CHECK_HEADERS = Struct("check_headers", "headers[] start seals valid")

    core = native.core()
    core(_CHECK_HEADERS, headers, start, seals, valid)

Array arguments live until the call has returned. Without the core there are no slabs; everything else works in Python
and numpy, more slowly and holding the GIL. Why C, and why this way: docs/decisions/native-core.md.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import hashlib
import importlib
import logging
import os
import platform
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from hicache_ext.errors import HicacheExtError

logger = logging.getLogger(__name__)

_HERE = Path(__file__).parent
LIBRARY = _HERE / "core.so"
"""Path of the library; tests replace it."""
_XXHASH_FUNCTIONS = (
    ("XXH3_128bits_dispatch", "XXH3_128bits"),
    ("XXH3_createState",),
    ("XXH3_freeState",),
    ("XXH3_128bits_reset",),
    ("XXH3_128bits_update_dispatch", "XXH3_128bits_update"),
    ("XXH3_128bits_digest",),
)
"""Names of each xxhash function in ``struct functions``: the first one that the xxhash package itself has is used."""
_ELF_HEADER = struct.Struct("<40xQ10xHH2x")
"""The fields of an ELF header: start of the table of sections, which is last; bytes of an entry; number of entries."""
_SYSTEM_FUNCTIONS = (("preadv2",), ("pwritev2",))


class Struct:
    """A struct of the core, made of words only, and the function ``hicache_NAME`` that takes it, if there is one."""

    def __init__(self, name: str, fields: str) -> None:
        """``fields`` are the field names; one with ``[]`` has two words, the address of an array and its length."""
        self.name = name
        self.fields = tuple(fields.split())
        self._have_lengths = [field.endswith("[]") for field in self.fields]
        self._pack = struct.Struct(f"{len(self.fields) + fields.count('[]')}q").pack

    def packed(self, *arguments: Any) -> bytes:
        """Pack the struct: an array as its address, and its length if the field has one; None as no array."""
        words: list[int] = []
        for has_length, argument in zip(self._have_lengths, arguments, strict=True):
            if argument is None:
                words += (0, 0) if has_length else (0,)
            elif has_length:
                words += address(argument), len(argument)
            else:
                words.append(address(argument) if isinstance(argument, np.ndarray) else argument)
        return self._pack(*words)


class Core:
    """The loaded library. Threads: any."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._functions: dict[Struct, Callable[[bytes], int]] = {}
        addresses = _external_functions()
        self.functions = (ctypes.c_void_p * len(addresses))(*addresses)
        """The ``struct functions``; tests replace some, and call ``bind``."""
        self.bind()

    def bind(self) -> None:
        """Make the core call ``functions``. Raises ImportError if their checksums differ from those in Python."""
        sample, digests = bytes(range(256)) * 20, ctypes.create_string_buffer(32)
        status = self._library.hicache_bind(self.functions, sample, ctypes.c_size_t(len(sample)), digests)
        if status or digests.raw != 2 * xxhash.xxh3_128_digest(sample):
            raise ImportError(f"the package xxhash {xxhash.VERSION} makes other checksums in C than in Python")

    def __call__(self, call: Struct, *arguments: Any) -> int:
        """Call the function that takes this struct with these arguments, and return its result."""
        return (self._functions.get(call) or self._function(call))(call.packed(*arguments))

    def call(self, call: Struct, packed: bytes, used: object) -> int:
        """Call like ``self()``, with a struct packed before. ``used`` owns the memory it points to: the frame of this
        call keeps it alive, even in a thread that the interpreter leaves behind at its end."""
        return (self._functions.get(call) or self._function(call))(packed)

    def _function(self, call: Struct) -> Callable[[bytes], int]:
        function = getattr(self._library, f"hicache_{call.name}")
        function.restype = ctypes.c_int64
        self._functions[call] = function
        return self._functions[call]


_address_of_buffer, _no_bytes_in = ctypes.addressof, (ctypes.c_char * 0).from_buffer


def address(array: npt.NDArray[Any]) -> int:
    """Return the address of an array. Raises ValueError if the array is not contiguous."""
    try:
        # This takes a third of the time that numpy needs.
        return _address_of_buffer(_no_bytes_in(array))  # type: ignore[arg-type]
    except TypeError:
        if not array.flags.c_contiguous:
            raise ValueError("an array in pieces has no address") from None
        # The array is read-only.
        return int(array.ctypes.data)


def sources_version(place: Path = _HERE) -> int:
    """Return the version that a library must have: 63 bits of the digest of all sources. Raises OSError."""
    sources = [path.read_bytes() for path in sorted([*place.glob("*.h"), *place.glob("*.c")])]
    return int.from_bytes(hashlib.sha256(b"-".join(sources)).digest()[:8], "little") >> 1


_VERSION: int | None = None
with contextlib.suppress(OSError):
    _VERSION = sources_version()
"""Version of the sources when this module was imported: an upgrade under a running process changes them."""


def _is_supported() -> bool:
    # A checksum is returned in two registers, and fields of a header are little-endian.
    return sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64") and sys.byteorder == "little"


_cores: dict[Path, Core] = {}
"""Loaded cores, kept whatever becomes of their files."""


def _loaded(path: Path) -> Core | str:
    """Return the core, or why there is none. Raises OSError for trouble that may pass."""
    if path not in _cores:
        if not _is_supported():
            return f"{sys.platform} on {platform.machine()} is not supported"
        try:
            status = path.stat()
        except FileNotFoundError:
            return f"{path.name} was not built with this package"
        found = _load(path, status.st_ino, status.st_mtime_ns)
        if isinstance(found, str):
            return found
        _cores[path] = found
    return _cores[path]


@functools.cache
def _load(path: Path, inode: int, modified: int) -> Core | str:
    """Load one version of the file; the result is cached, since only another file can help. Raises as ``_loaded``."""
    try:
        with path.open("rb") as file:
            begin, of_entry, entries = _ELF_HEADER.unpack(file.read(_ELF_HEADER.size).ljust(_ELF_HEADER.size, b"\xff"))
            if os.fstat(file.fileno()).st_size < begin + of_entry * entries:
                # Loading a file that pip has not finished writing would be a SIGBUS.
                raise OSError(f"{path}: file too short")
        library = ctypes.CDLL(str(path))
        if ctypes.c_uint64.in_dll(library, "hicache_version").value != _VERSION:
            return f"{path} was built of other sources"
        return Core(library)
    except OSError as error:
        # An OSError of ctypes has no errno, and its message names the library.
        raise OSError(errno.EAGAIN, f"{path}: {error.strerror}" if error.errno else str(error)) from error
    except (ValueError, AttributeError, ImportError) as error:
        return str(error)


def core() -> Core | None:
    """Return the native core; None if it is not available, which is logged once."""
    if (found := _cores.get(LIBRARY)) is None and (why := why_not()) is not None:
        _say_once(why)
    return found or _cores.get(LIBRARY)


def needed() -> Core:
    """Return the native core, for callers that cannot work without it. Raises HicacheExtError if there is none."""
    if (found := core()) is None:
        raise HicacheExtError(f"the native core is not there: {why_not()}; {REMEDY}")
    return found


def why_not() -> str | None:
    """Return why there is no core; None if there is one."""
    try:
        return lacking()
    except OSError as error:
        return error.strerror or str(error)


def lacking() -> str | None:
    """Return the same as ``why_not``, but raise OSError if the trouble may have passed by the next call."""
    found = _loaded(LIBRARY)
    return found if isinstance(found, str) else None


def is_absent() -> bool:
    """Return whether there is no core for good: no library at all, or an unsupported machine. Any other trouble may
    pass, or can be repaired."""
    return LIBRARY not in _cores and not (_is_supported() and os.path.exists(LIBRARY))


REMEDY = (
    "install a C compiler (gcc), then hicache_ext again with pip install --force-reinstall --no-cache-dir --no-deps"
)


@functools.cache
def _say_once(reason: str) -> None:
    logger.warning("pages move in Python, which is slower and holds the GIL: %s; %s", reason, REMEDY)


def _external_functions() -> list[int]:
    """Return the addresses of ``struct functions``. Raises ImportError, OSError or AttributeError if one is missing."""
    xxhash_library = ctypes.CDLL(str(importlib.import_module("xxhash._xxhash").__file__))
    addresses = [_address_of(xxhash_library, *names) for names in _XXHASH_FUNCTIONS]
    return addresses + [_address_of(ctypes.CDLL(None), *names) for names in _SYSTEM_FUNCTIONS]


def _address_of(library: ctypes.CDLL, *names: str) -> int:
    for name in names:
        if hasattr(library, name):
            return int(ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0)
    raise AttributeError(f"no function {names[-1]}")

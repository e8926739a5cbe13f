"""The native core (core.h), called through ctypes without the GIL; None where it was not built.

A function of it takes one struct of words, a ``Struct`` here, and returns a word::

    _CHECK_HEADERS = Struct("check_headers", "headers[] start seals valid")

    core = native.core()
    core(_CHECK_HEADERS, headers, start, seals, valid)

Arrays that are arguments live until the call has returned. Without the core there are no slabs; everything else
works in Python and numpy: slower, and with the GIL. Why C, and why so: docs/decisions/native-core.md.
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
"""Tests put another one here."""
_OF_XXHASH = (
    ("XXH3_128bits_dispatch", "XXH3_128bits"),
    ("XXH3_createState",),
    ("XXH3_freeState",),
    ("XXH3_128bits_reset",),
    ("XXH3_128bits_update_dispatch", "XXH3_128bits_update"),
    ("XXH3_128bits_digest",),
)
"""Of ``struct functions``: the first name that the xxhash package's extension module has, and no other library's."""
_ELF_HEADER = struct.Struct("<40xQ10xHH2x")
"""Of it where the table of sections begins, which is last; the bytes of an entry, and how many there are."""
_OF_SYSTEM = (("preadv2",), ("pwritev2",))


class Struct:
    """A struct of the core, all of words, and the function ``hicache_NAME`` that takes it, where there is one."""

    def __init__(self, name: str, fields: str) -> None:
        """``fields``: their names. One with ``[]`` has two words, the address of an array and its length."""
        self.name = name
        self.fields = tuple(fields.split())
        self._have_lengths = [field.endswith("[]") for field in self.fields]
        self._pack = struct.Struct(f"{len(self.fields) + fields.count('[]')}q").pack

    def packed(self, *arguments: Any) -> bytes:
        """The struct: of an array the address, and its length where the field has one; None is no array."""
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
        of_others = _functions_of_others()
        self.functions = (ctypes.c_void_p * len(of_others))(*of_others)
        """``struct functions``; tests replace some, and call ``bind``."""
        self.bind()

    def bind(self) -> None:
        """Have the core call ``functions``. Raises ImportError where they make other checksums than Python's."""
        sample, digests = bytes(range(256)) * 20, ctypes.create_string_buffer(32)
        status = self._library.hicache_bind(self.functions, sample, ctypes.c_size_t(len(sample)), digests)
        if status or digests.raw != 2 * xxhash.xxh3_128_digest(sample):
            raise ImportError(f"the package xxhash {xxhash.VERSION} makes other checksums in C than in Python")

    def __call__(self, call: Struct, *arguments: Any) -> int:
        """Call the function that takes this struct, with these arguments; its result."""
        return (self._functions.get(call) or self._function(call))(call.packed(*arguments))

    def call(self, call: Struct, packed: bytes, used: object) -> int:
        """``self()`` with what was packed before. ``used``: whose memory it points to; the frame of this call keeps it,
        also in a thread that the interpreter leaves behind at its end."""
        return (self._functions.get(call) or self._function(call))(packed)

    def _function(self, call: Struct) -> Callable[[bytes], int]:
        function = getattr(self._library, f"hicache_{call.name}")
        function.restype = ctypes.c_int64
        self._functions[call] = function
        return self._functions[call]


_address_of_buffer, _no_bytes_in = ctypes.addressof, (ctypes.c_char * 0).from_buffer


def address(array: npt.NDArray[Any]) -> int:
    """Where it begins. Raises ValueError for an array that is not in one piece."""
    try:
        # A third of what numpy takes for it.
        return _address_of_buffer(_no_bytes_in(array))  # type: ignore[arg-type]
    except TypeError:
        if not array.flags.c_contiguous:
            raise ValueError("an array in pieces has no address") from None
        # It is read-only.
        return int(array.ctypes.data)


def sources_version(place: Path = _HERE) -> int:
    """What a library must have been built of: 63 bits of the digest of all sources. Raises OSError."""
    sources = [path.read_bytes() for path in sorted([*place.glob("*.h"), *place.glob("*.c")])]
    return int.from_bytes(hashlib.sha256(b"-".join(sources)).digest()[:8], "little") >> 1


_VERSION: int | None = None
with contextlib.suppress(OSError):
    _VERSION = sources_version()
"""Of the sources beside this module when it was imported: an upgrade under a running process changes them."""


def _is_supported() -> bool:
    # A checksum is returned in two registers, and fields of a header are little-endian.
    return sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64") and sys.byteorder == "little"


_cores: dict[Path, Core] = {}
"""Each is kept, whatever becomes of its file."""


def _loaded(path: Path) -> Core | str:
    """The core, or why there is none. Raises OSError for what may pass."""
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
    """What is wrong with one file stays so; another one may come in its place. Raises OSError as ``_loaded``."""
    try:
        with path.open("rb") as file:
            begin, of_entry, entries = _ELF_HEADER.unpack(file.read(_ELF_HEADER.size).ljust(_ELF_HEADER.size, b"\xff"))
            if os.fstat(file.fileno()).st_size < begin + of_entry * entries:
                # To load what pip has not written to its end would be a SIGBUS.
                raise OSError(f"{path}: file too short")
        library = ctypes.CDLL(str(path))
        if ctypes.c_uint64.in_dll(library, "hicache_version").value != _VERSION:
            return f"{path} was built of other sources"
        return Core(library)
    except OSError as error:
        # That of ctypes has no number, and names the library.
        raise OSError(errno.EAGAIN, f"{path}: {error.strerror}" if error.errno else str(error)) from error
    except (ValueError, AttributeError, ImportError) as error:
        return str(error)


def core() -> Core | None:
    """The native core; None where it is not available, which is logged once."""
    if (found := _cores.get(LIBRARY)) is None and (why := why_not()) is not None:
        _say_once(why)
    return found or _cores.get(LIBRARY)


def needed() -> Core:
    """The native core, for what does not go without it. Raises HicacheExtError."""
    if (found := core()) is None:
        raise HicacheExtError(f"the native core is not there: {why_not()}; {REMEDY}")
    return found


def why_not() -> str | None:
    """Why there is no core; None where there is one."""
    try:
        return lacking()
    except OSError as error:
        return error.strerror or str(error)


def lacking() -> str | None:
    """``why_not``. Raises OSError where there may be one the next time."""
    found = _loaded(LIBRARY)
    return found if isinstance(found, str) else None


def is_absent() -> bool:
    """Whether there is no core for good: no library at all, or one for other machines. Any other trouble may pass, or
    is to be repaired."""
    return LIBRARY not in _cores and not (_is_supported() and os.path.exists(LIBRARY))


REMEDY = (
    "install a C compiler (gcc), then hicache_ext again with pip install --force-reinstall --no-cache-dir --no-deps"
)


@functools.cache
def _say_once(reason: str) -> None:
    logger.warning("pages move in Python, which is slower and holds the GIL: %s; %s", reason, REMEDY)


def _functions_of_others() -> list[int]:
    """Addresses. Raises ImportError, OSError or AttributeError where one is missing."""
    of_xxhash = ctypes.CDLL(str(importlib.import_module("xxhash._xxhash").__file__))
    addresses = [_address_of(of_xxhash, *names) for names in _OF_XXHASH]
    return addresses + [_address_of(ctypes.CDLL(None), *names) for names in _OF_SYSTEM]


def _address_of(library: ctypes.CDLL, *names: str) -> int:
    for name in names:
        if hasattr(library, name):
            return int(ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0)
    raise AttributeError(f"no function {names[-1]}")

"""The native core (core.h), called through ctypes without the GIL; None where it was not built.

A function of it takes one struct of words, a subclass of ``Arguments`` here, and returns a word::

    class CheckHeaders(Arguments):
        function = "hicache_check_headers"
        _fields_ = words("headers header_count start seals valid")

    core = native.core()
    core(CheckHeaders(address(headers), len(headers), address(start), address(seals), address(valid)))

Whoever calls keeps the arrays alive until the call has returned. Without the core there are no slabs; everything else
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
from typing import TYPE_CHECKING, Any, ClassVar, cast

import xxhash

from hicache_ext.errors import HicacheExtError

if TYPE_CHECKING:
    import numpy.typing as npt


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


class Words(ctypes.Structure):
    """``struct words`` of core.h."""

    _fields_ = (("at", ctypes.c_int64), ("count", ctypes.c_int64))


def words(names: str) -> list[tuple[str, Any]]:
    """``_fields_`` of a struct of words; those with ``[]`` behind their names are ``struct words``."""
    return [(name.removesuffix("[]"), Words if name.endswith("[]") else ctypes.c_int64) for name in names.split()]


class Arguments(ctypes.Structure):
    """What one function of the core takes. Subclasses have its fields."""

    function: ClassVar[str]


class Core:
    """The loaded library. Threads: any."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._functions: dict[type[Arguments], tuple[Any, Callable[..., bytes]]] = {}
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

    def __call__(self, arguments: Arguments) -> int:
        """Call the function that takes these arguments; its result."""
        function, _ = self._functions.get(type(arguments)) or self._function(type(arguments))
        return int(function(ctypes.byref(arguments)))

    def quick(self, call: type[Arguments], *arguments: int) -> int:
        """``self(call(*arguments))``, with no struct made: a call then takes half of the time."""
        function, pack = self._functions.get(call) or self._function(call)
        result: int = function(pack(*arguments))
        return result

    def _function(self, call: type[Arguments]) -> tuple[Any, Callable[..., bytes]]:
        function = getattr(self._library, call.function)
        function.restype = ctypes.c_int64
        self._functions[call] = found = function, struct.Struct(f"{ctypes.sizeof(call) // 8}q").pack
        return found


_NO_BYTES = ctypes.c_char * 0


def address(memory: npt.NDArray[Any] | bytearray) -> int:
    """Where it begins. Raises ValueError for an array that is not in one piece."""
    try:
        # A third of what numpy takes for it.
        return ctypes.addressof(_NO_BYTES.from_buffer(memory))  # type: ignore[arg-type]
    except TypeError:
        array = cast("npt.NDArray[Any]", memory)
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

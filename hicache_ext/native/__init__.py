"""The native core (core.h), called through ctypes without the GIL; None where it was not built.

A function of it takes one struct of words, a subclass of ``Arguments`` here, and returns a word::

    class NumberPages(Arguments):
        function = "hicache_number_pages"
        _fields_ = words("indices page_size page_count numbers number_count")

    core = native.core()
    sound = core(NumberPages(address(indices), page_size, page_count, address(numbers), len(numbers)))

Whoever calls keeps the arrays alive until the call has returned. Everything works without the core, in Python and
numpy: slower, and with the GIL. Why C, and why so: docs/decisions/native-core.md.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import logging
import platform
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

if TYPE_CHECKING:
    import numpy.typing as npt


logger = logging.getLogger(__name__)

_HERE = Path(__file__).parent
LIBRARY = _HERE / "core.so"
"""Tests put another one here."""
_of_buffer, _address_of_object = (ctypes.c_char * 0).from_buffer, ctypes.addressof
_FUNCTIONS = (
    ("XXH3_128bits_dispatch", "XXH3_128bits"),
    ("XXH3_createState",),
    ("XXH3_freeState",),
    ("XXH3_128bits_reset",),
    ("XXH3_128bits_update_dispatch", "XXH3_128bits_update"),
    ("XXH3_128bits_digest",),
    ("preadv2",),
    ("pwritev2",),
)
"""Of ``struct functions``: the first name that exists, in the xxhash package's extension module or the C library."""


def words(names: str) -> list[tuple[str, Any]]:
    """``_fields_`` of a struct of words."""
    return [(name, ctypes.c_int64) for name in names.split()]


class Arguments(ctypes.Structure):
    """What one function of the core takes. Subclasses have its fields."""

    function: ClassVar[str]


class Core:
    """The loaded library. Threads: any."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._functions: dict[type[Arguments], tuple[Any, Callable[..., bytes]]] = {}
        self.functions = (ctypes.c_void_p * len(_FUNCTIONS))(*_functions_of_others())
        """``struct functions``; tests replace some, and call ``bind``."""
        self.bind()

    def bind(self) -> None:
        """Have the core call ``functions``."""
        self._library.hicache_bind(self.functions)

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
        self._functions[call] = found = function, struct.Struct(f"{len(call._fields_)}q").pack
        return found


_NO_BYTES = ctypes.c_char * 0


def address(memory: npt.NDArray[Any] | bytearray) -> int:
    """Where it begins."""
    try:
        # A third of what numpy takes for it.
        return ctypes.addressof(_NO_BYTES.from_buffer(memory))  # type: ignore[arg-type]
    except TypeError:
        # It is read-only.
        return int(cast("npt.NDArray[Any]", memory).ctypes.data)


def sources_version(place: Path = _HERE) -> int:
    """What a library must have been built of: 63 bits of the digest of all sources. Raises OSError."""
    sources = [path.read_bytes() for path in sorted([*place.glob("*.h"), *place.glob("*.c")])]
    return int.from_bytes(hashlib.sha256(b"-".join(sources)).digest()[:8], "little") >> 1


@functools.cache
def _loaded(path: Path) -> Core | str:
    """The core, or why there is none."""
    # A checksum is returned in two registers, and fields of a header are little-endian.
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64") or sys.byteorder != "little":
        return f"{sys.platform} on {platform.machine()} is not supported"
    try:
        library = ctypes.CDLL(str(path))
        if ctypes.c_uint64.in_dll(library, "hicache_version").value != sources_version():
            return f"{path} was built of other sources"
        return Core(library)
    except (OSError, ValueError, AttributeError, ImportError) as error:
        return f"{path.name} was not built with this package" if not path.exists() else str(error)


_found: tuple[Path | None, Core | None] = (None, None)
"""The library that was asked for last, and what ``core`` said of it: every call of a tier asks."""


def core() -> Core | None:
    """The native core; None where it is not available, which is logged once."""
    global _found
    if _found[0] is not LIBRARY:
        loaded = _loaded(LIBRARY)
        _found = LIBRARY, loaded if isinstance(loaded, Core) else None
        if isinstance(loaded, str):
            _say_once(loaded)
    return _found[1]


def why_not() -> str | None:
    """Why there is no core; None where there is one."""
    found = _loaded(LIBRARY)
    return found if isinstance(found, str) else None


REMEDY = "install a C compiler (gcc) and install hicache_ext again"


@functools.cache
def _say_once(reason: str) -> None:
    logger.warning("pages move in Python, which is slower and holds the GIL: %s; %s", reason, REMEDY)


def _functions_of_others() -> list[int]:
    """Addresses. Raises ImportError, OSError or AttributeError where one is missing."""
    libraries = ctypes.CDLL(str(importlib.import_module("xxhash._xxhash").__file__)), ctypes.CDLL(None)
    return [_address_of(libraries, names) for names in _FUNCTIONS]


def _address_of(libraries: tuple[ctypes.CDLL, ...], names: tuple[str, ...]) -> int:
    for name in names:
        for library in libraries:
            if hasattr(library, name):
                return int(ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0)
    raise AttributeError(f"no function {names[-1]}")


__all__ = [
    "LIBRARY",
    "REMEDY",
    "Arguments",
    "Core",
    "address",
    "core",
    "sources_version",
    "why_not",
    "words",
]

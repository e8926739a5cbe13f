"""The same functions in Python and compiled by numba (extra ``compiled``).

Functions are marked with ``helper`` and ``kernel``; importing their module leaves them in Python. ``compiled_kernels``
executes the module once more and compiles what is marked; ``use`` puts those kernels in place of the Python ones.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

_OPTIONS = {"nogil": True, "error_model": "numpy", "boundscheck": False}
Function = Callable[..., Any]
_Marked = TypeVar("_Marked", bound=Function)

_PACKAGE = Path(__file__).parent.parent

_SOURCES = (
    "runtime/jit.py",
    "runtime/vectored.py",
    "runtime/native_calls.py",
    "page/batch_code.py",
    "storage/tiers/file/eviction.py",
    "storage/tiers/file/slab/slot_code.py",
    "storage/tiers/file/slab/compiled_runs.py",
)
"""Files of the package that what is compiled depends on."""

_compiling: dict[str, Function] | None = None
"""The kernels of the module that is being compiled."""


@functools.cache
def sources_digest() -> str:
    """A digest of all sources of compiled code. Raises OSError."""
    sources = [(_PACKAGE / name).read_bytes() for name in _SOURCES]
    return hashlib.sha256(b"-".join(sources)).hexdigest()[:16]


def compiled(signature: str, function: Function) -> Function:
    """``function`` compiled now, to run without the GIL; taken from numba's cache where it has it.

    Raises whatever numba does."""
    import numba

    compiled_function: Function
    try:
        # The name in numba's cache, which by itself notices changes in the function's own file only.
        function.__qualname__ = f"{function.__name__}_{sources_digest()}"
        compiled_function = numba.njit(signature, cache=True, **_OPTIONS)(function)
    except Exception:  # noqa: BLE001 - what the function itself is at fault for is raised once more
        # No directory for the cache, a full disk, damaged cache files, or no sources: compile without the cache.
        compiled_function = numba.njit(signature, **_OPTIONS)(function)
    return compiled_function


def helper(function: _Marked) -> _Marked:
    """Marks a function that kernels call."""
    if _compiling is None:
        return function
    import numba

    # Inlined: a call counts references of every array, which costs more than most helpers.
    made: _Marked = numba.njit(forceinline=True, **_OPTIONS)(function)
    return made


def kernel(signature: str) -> Callable[[_Marked], _Marked]:
    """Marks a function that Python calls."""

    def decorate(function: _Marked) -> _Marked:
        if _compiling is None:
            return function
        made = _compiling[function.__name__] = compiled(signature, function)
        return cast("_Marked", made)

    return decorate


def compiled_kernels(module: ModuleType) -> Mapping[str, Function]:
    """The kernels of a module, by name. One thread at a time. Raises whatever numba does."""
    global _compiling
    assert module.__spec__ is not None
    assert module.__spec__.loader is not None
    copy = importlib.util.module_from_spec(module.__spec__)
    kernels: dict[str, Function] = {}
    _compiling = kernels
    try:
        module.__spec__.loader.exec_module(copy)
    finally:
        _compiling = None
    return kernels


def use(module: ModuleType, kernels: Mapping[str, Function]) -> Mapping[str, Function]:
    """Put kernels into a module; returns those that were there."""
    before = {name: getattr(module, name) for name in kernels}
    for name, function in kernels.items():
        setattr(module, name, function)
    return before


def is_compiled(function: Function) -> bool:
    return hasattr(function, "py_func")

"""The same functions in Python and compiled by numba (extra ``compiled``).

Functions are marked with ``helper`` and ``kernel``; importing their module leaves them in Python. ``compiled_kernels``
executes the module once more and compiles what is marked; ``use`` puts those kernels in place of the Python ones.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
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
    "page/envelope_code.py",
    "page/transforms/plane_code.py",
    "page/transforms/row_code.py",
    "storage/tiers/file/eviction.py",
    "storage/tiers/file/slab/miniature_code.py",
    "storage/tiers/file/slab/slot_code.py",
    "storage/tiers/file/slab/compiled_runs.py",
)
"""Files of the package that what is compiled depends on."""

_compiling: dict[str, Function] | None = None
"""The kernels of the module that is being compiled."""
_overloads: _Overloads | None = None
"""What ``compiled`` takes its functions from, or adds them to."""
_one_at_a_time = threading.Lock()


@functools.cache
def sources_digest() -> str:
    """A digest of all sources of compiled code. Raises OSError."""
    sources = [(_PACKAGE / name).read_bytes() for name in _SOURCES]
    return hashlib.sha256(b"-".join(sources)).hexdigest()[:16]


@contextmanager
def compiling_into(functions: dict[str, bytes]) -> Iterator[None]:
    """Inside, ``compiled`` compiles, and adds what it made to ``functions``. One thread at a time."""
    with _overloads_are(_Overloads(functions, complete=False)):
        yield


@contextmanager
def loading_from(functions: Mapping[str, bytes]) -> Iterator[None]:
    """Inside, ``compiled`` takes what was made with ``compiling_into``, and never compiles. One thread at a time."""
    with _overloads_are(_Overloads(dict(functions), complete=True)):
        yield


def compiled(signature: str, function: Function) -> Function:
    """``function`` as machine code that runs without the GIL. Only inside one of the two above: to compile takes
    seconds, and no server may do it by the way. Raises whatever numba does."""
    import numba

    if _overloads is None:
        raise ImportError(f"{function.__name__} is to be loaded, see loading_from")
    made = numba.njit(**_OPTIONS)(function)
    # In place of numba's cache of files: code_cache.py says why.
    made._cache = _cache_of(f"{function.__module__}.{function.__name__}", _overloads)
    made.compile(signature)
    made.disable_compile()
    return cast("Function", made)


@dataclass(frozen=True, slots=True)
class _Overloads:
    """Compiled functions, by module and name, as bytes. ``complete``: what is missing is an error."""

    functions: dict[str, bytes]
    complete: bool


@contextmanager
def _overloads_are(overloads: _Overloads) -> Iterator[None]:
    global _overloads
    with _one_at_a_time:
        _overloads = overloads
        try:
            yield
        finally:
            _overloads = None


def _cache_of(name: str, overloads: _Overloads) -> Any:
    """The cache of one function with one signature, as numba's dispatcher asks it."""
    from numba.core.caching import NullCache
    from numba.core.compiler import CompileResult
    from numba.core.serialize import dumps

    class Cache(NullCache):  # type: ignore[misc]
        def load_overload(self, _signature: Any, target_context: Any) -> Any:
            if name not in overloads.functions and not overloads.complete:
                return None
            target_context.refresh()
            return CompileResult._rebuild(target_context, *pickle.loads(overloads.functions[name]))

        def save_overload(self, _signature: Any, made: Any) -> None:
            if made.lifted or made.library.has_dynamic_globals:
                raise ImportError(f"{name} holds addresses of the process that compiled it")
            overloads.functions[name] = dumps(made._reduce())

    return Cache()


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

"""Functions compiled by numba where it is there (extra ``compiled``), and otherwise as they are."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

_OPTIONS = {"nogil": True, "error_model": "numpy", "boundscheck": False}

try:
    import numba
except Exception:  # noqa: BLE001 - numba raises many things where it does not get along with numpy
    numba = None


def compiled(signature: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` compiled now, to run without the GIL; from the cache of an earlier process where there is one.

    Raises whatever numba does."""
    compiled_function: Callable[..., Any]
    try:
        compiled_function = numba.njit(signature, cache=True, **_OPTIONS)(function)
    except Exception:  # noqa: BLE001 - what the function itself is at fault for is raised once more
        # No directory that a cache could be kept in, a full disk, files that a power loss has left of one.
        compiled_function = numba.njit(signature, **_OPTIONS)(function)
    return compiled_function


def helper(function: Callable[..., Any]) -> Callable[..., Any]:
    """For a function that kernels call."""
    return function if numba is None else numba.njit(**_OPTIONS)(function)


def kernel(signature: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """For a function that is called from Python; uncompiled where it cannot be compiled."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        if numba is None:
            return function
        try:
            return compiled(signature, function)
        except Exception as error:  # noqa: BLE001 - a compiler may fail in many ways
            logger.warning("%s runs uncompiled: %s", function.__name__, error)
            return function

    return decorate


def is_compiled(function: Callable[..., Any]) -> bool:
    return numba is not None and hasattr(function, "py_func")

"""Calls of SGLang never raise: it would lose the operation at best and a thread at worst. Trouble is a miss."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

_Method = TypeVar("_Method", bound=Callable[..., Any])


def answering(otherwise: Callable[..., Any]) -> Callable[[_Method], _Method]:
    """Make a method that SGLang calls never raise: ``otherwise(*arguments)`` is its answer to any trouble, and
    ``otherwise()`` where nothing can be told from the arguments. Its object's ``report_failure`` is told.

    Arguments that the method does not have are ignored: a later SGLang may hand over more (used_names.py warns of it).
    """

    def decorate(method: _Method) -> _Method:
        names = tuple(inspect.signature(method).parameters)[1:]
        known = frozenset(names)

        @functools.wraps(method)
        def guarded(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            if len(args) > len(names) or not kwargs.keys() <= known:
                args, kwargs = args[: len(names)], {name: kwargs[name] for name in names if name in kwargs}
            try:
                return method(self, *args, **kwargs)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - SystemExit would end SGLang's I/O thread
                self.report_failure(method.__name__, error)
                try:
                    return otherwise(*args, **kwargs)
                except Exception:  # noqa: BLE001 - the arguments were the trouble, which is reported
                    return otherwise()

        guarded.reports_failures = True  # type: ignore[attr-defined]
        return cast("_Method", guarded)

    return decorate


def guarded_calls(backend: type) -> list[str]:
    """The calls of a class whose trouble is reported, by name."""
    return [name for name in dir(backend) if hasattr(getattr(backend, name), "reports_failures")]


def length(keys: Any) -> int:
    try:
        return len(keys)
    except Exception:  # noqa: BLE001 - of what is no list of keys, whatever it raises
        return 0


def all_false(keys: Any = (), *_: Any, **__: Any) -> list[bool]:
    return [False] * length(keys)


def transfer_false(transfer: Any = None, *_: Any, **__: Any) -> list[bool]:
    return all_false(getattr(transfer, "keys", None))


def answered_name(transfer: Any) -> str | None:
    """The name under which SGLang looks for the answer to a transfer; None for what is no transfer."""
    name = getattr(transfer, "name", None)
    return name if isinstance(name, str) else None


def transfers_false(transfers: Any = (), *_: Any, **__: Any) -> dict[Any, list[bool]]:
    named = [(answered_name(transfer), transfer) for transfer in transfers or ()]
    return {name: transfer_false(transfer) for name, transfer in named if name is not None}

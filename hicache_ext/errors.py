"""The error tree of hicache_ext.

::

    HicacheExtError
    |-- ConfigError            the user's configuration is wrong; raised at start only
    |-- UnsupportedError       a pool, layout or SGLang version that cannot be served; raised at start only
    |-- FormatError            bytes that are not a page of ours (envelope.py)
    |-- MissingPackageError    a command needs a package that is not installed (packages.py)
    `-- StoreError             a tier could not be opened or used
        |-- StoreClosedError   a call after close()
        |-- TierTypeError      a type of tier that is not known, or that another package brings and that cannot be used
        `-- StoreSetupError    a tier cannot start (directory, server, credentials)

Only constructors and the command line raise these. Calls that SGLang makes at run time never raise: they answer with
the enums of ``storage/contract/store.py``.
"""

from __future__ import annotations

from collections.abc import Sequence


class HicacheExtError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(HicacheExtError):
    """One wrong place in the configuration.

    The message is one sentence built from the named facts: the full key path, what was wrong, and what is allowed.
    Values of secrets never appear in it.
    """

    def __init__(self, key: str, problem: str, allowed: str | None = None) -> None:
        self.key = key
        self.problem = problem
        self.allowed = allowed
        sentence = f"{key}: {problem}" if key else problem
        if allowed:
            sentence += f"; allowed: {allowed}"
        super().__init__(sentence)


class UnsupportedError(HicacheExtError):
    """Something SGLang asked for that this package refuses to serve, said in one sentence at start."""

    def __init__(self, subject: str, reason: str, remedy: str | None = None) -> None:
        self.subject = subject
        self.reason = reason
        self.remedy = remedy
        super().__init__(f"{subject} cannot be served: {reason}" + (f"; {remedy}" if remedy else ""))


class FormatError(HicacheExtError):
    """Bytes that do not decode as a stored page; ``reason`` is a short word used as a metric label."""

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason = reason
        super().__init__(f"not a stored page ({reason})" + (f": {detail}" if detail else ""))


class StoreError(HicacheExtError):
    """A tier could not be used."""


class StoreClosedError(StoreError):
    """A call on a store after ``close()``."""

    def __init__(self, store: str) -> None:
        super().__init__(f"store {store!r} is closed")


class TierTypeError(StoreError):
    """A type of tier that cannot be used. ``problem`` follows its name in the sentence."""

    def __init__(self, name: str, problem: str) -> None:
        self.name = name
        self.problem = problem
        super().__init__(f"the tier type {name!r} {problem}")


class StoreSetupError(StoreError):
    """A tier that cannot start, with the place and the reason."""

    def __init__(self, store: str, reason: str, remedies: Sequence[str] = ()) -> None:
        self.store = store
        self.reason = reason
        sentence = f"tier {store!r} cannot start: {reason}"
        if remedies:
            sentence += "; " + "; ".join(remedies)
        super().__init__(sentence)

"""Every exception class of hicache_ext, and nothing else.

Only constructors and the command line let these out. Calls that SGLang makes at run time never raise: they answer with
the enums of ``storage/contract/store.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class HicacheExtError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(HicacheExtError, ValueError):
    """One wrong place in the configuration; a ValueError, so that pydantic collects it.

    The message is one sentence built from the named facts: the full key path, what was wrong, and what is allowed.
    Values of secrets never appear in it. Of several ``errors`` (``config_error``) the facts are those of the first, and
    the message has one sentence per line.
    """

    def __init__(self, key: str, problem: str, allowed: str | None = None, errors: Sequence[ConfigError] = ()) -> None:
        self.key = key
        self.problem = problem
        self.allowed = allowed
        self.errors: Sequence[ConfigError] = errors or (self,)
        """Each wrong place, in the order in which they were found."""
        sentence = f"{key}: {problem}" if key else problem
        if allowed:
            sentence += f"; allowed: {allowed}"
        super().__init__("\n".join(map(str, errors)) or sentence)


class UnsupportedError(HicacheExtError):
    """Something SGLang asked for that this package refuses to serve, said in one sentence at start."""

    def __init__(self, subject: str, reason: str, remedy: str | None = None) -> None:
        self.subject = subject
        self.reason = reason
        self.remedy = remedy
        super().__init__(f"{subject} cannot be served: {reason}" + (f"; {remedy}" if remedy else ""))


class MissingPackageError(HicacheExtError):
    """A package that a command needs; ``remedy`` is what to do, as far as that is known."""

    def __init__(self, package: str, remedy: str, problem: str = "which is not installed") -> None:
        super().__init__(f"this needs the package {package}, {problem}" + (f": {remedy}" if remedy else ""))


class WeightsError(HicacheExtError):
    """The files of a model cannot be identified; the message says why."""


class FormatError(HicacheExtError):
    """Bytes that do not decode as a stored page; ``reason`` is a short word used as a metric label."""

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason = reason
        super().__init__(f"not a stored page ({reason})" + (f": {detail}" if detail else ""))


class RecordingError(HicacheExtError):
    """A file is no recording, or no trace, that can be read; one sentence."""

    def __init__(self, path: object, problem: str) -> None:
        super().__init__(f"{path} {problem}")


class StoreError(HicacheExtError):
    """A tier could not be used."""


class StoreClosedError(StoreError):
    """A call on a store after ``close()``."""

    def __init__(self, store: str) -> None:
        super().__init__(f"store {store!r} is closed")


class TierTypeError(StoreError):
    """A type of tier that cannot be used. ``problem`` follows its name in the sentence."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"the tier type {name!r} {problem}")


class StoreSetupError(StoreError):
    """A tier that cannot start, with the place and the reason."""

    def __init__(self, store: str, reason: str, remedies: Sequence[str] = ()) -> None:
        self.reason = reason
        sentence = f"tier {store!r} cannot start: {reason}"
        if remedies:
            sentence += "; " + "; ".join(remedies)
        super().__init__(sentence)


class NotReadError(StoreError):
    """The object could not be read again; says nothing about it. The message is a word for the log."""


class UnansweredError(StoreError):
    """Of so many pages of a look-up some could not be asked for. ``answer`` is what is known; ``reasons`` says why,
    where that is not counted yet."""

    def __init__(self, answer: Any, pages: int, of: int, reasons: Mapping[str, int] | None = None) -> None:
        super().__init__(f"{pages} of {of} pages could not be looked up")
        self.answer = answer
        self.pages = pages
        self.of = of
        self.reasons = reasons or {}


class ClearLaterError(StoreError):
    """Cleared pages could not be removed now, and it was counted why (contract/clearing.py). The message is for the
    log."""


class IndexBusyError(StoreError):
    """Another process holds the change lock of an index of slabs; it is stopped, perhaps."""


class NotBegunError(StoreError):
    """The call was not started."""


class TooLateError(StoreError):
    """The call did not end in time; it was left behind if it had started."""


class LoginError(StoreError, ConnectionError):
    """The server is there and refuses; ``code`` is the error's first word, the only one that repeats no argument."""

    def __init__(self, step: str, code: str) -> None:
        super().__init__(f"{step} was answered with {code}")
        self.code = code


class RefusedError(StoreError):
    """An error reply to the command ``word`` that says nothing about one page; the connection is given up. ``code`` is
    its first word."""

    def __init__(self, code: str, word: bytes) -> None:
        super().__init__(f"{word.decode()} is answered with {code}")
        self.code = code
        self.word = word


class ServerClosedError(StoreError, ConnectionError):
    """The server ended the connection."""

    def __init__(self) -> None:
        super().__init__("the server closed the connection")


class NodeDownError(StoreError, ConnectionError):
    """The node is known to be down; nothing was tried."""


class LaneBusyError(StoreError, TimeoutError):
    """No connection became free in time; says nothing about the node."""


class ProtocolError(StoreError):
    """Not RESP, or not the reply that was asked for."""


class OversizedValueError(ProtocolError):
    """A value too long to be read and thrown away."""

    def __init__(self, length: int) -> None:
        super().__init__(f"a value of {length} bytes")
        self.length = length


class ControlError(HicacheExtError):
    """The directory of control sockets cannot be used, or a server does not answer; one sentence."""


class CommandError(HicacheExtError):
    """What a command was asked for cannot be done: nothing can be warmed, there are no metrics to show, a benchmark
    cannot go on or its contender answered wrongly. One sentence."""


class CopyError(HicacheExtError):
    """A copy that an engine could not submit. Bytes of that layer may have moved or not; submit it again elsewhere."""


class CalibrationError(HicacheExtError):
    """A calibration that cannot be read."""


class ServerError(HicacheExtError):
    """The server did not start, died, or refused a request; the message ends with the tail of its log."""

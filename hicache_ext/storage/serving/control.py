"""Commands reach running servers on this machine over one UNIX socket per backend, in a directory of the user.

A request is one line of JSON, the answer another. No signals: SGLang owns those. Nothing secret goes over it, and only
the same user can connect (directory mode 0700).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hicache_ext.errors import ControlError
from hicache_ext.runtime.background import RETRY, BackgroundLoop, Backoff, Retry
from hicache_ext.runtime.threads import ThreadPool
from hicache_ext.runtime.whole_file import json_in

logger = logging.getLogger(__name__)

Request = dict[str, Any]
Answer = dict[str, Any]

DIRECTORY_VARIABLE = "HICACHE_EXT_RUNTIME_DIR"

_LONGEST_LINE = 1 << 20
_REQUEST_SECONDS = 10.0
_MOST_AWAITED = 16
_FIRST_PAUSE = 0.01
_numbers = itertools.count()


def runtime_directory() -> Path:
    """The directory of this user's sockets, made if missing. Raises ControlError if others can use it."""
    directory = _place_of_sockets()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.lstat()
    except OSError as error:
        raise ControlError(f"{directory}: {error.strerror or error}") from error
    if not _is_of_this_user_alone(status):
        raise ControlError(f"{directory} is not a directory of this user alone (mode 0700)")
    return directory


class ControlSocket:
    """Answers requests with ``handle(request)``, one at a time. Each client is waited for on a thread of its own."""

    def __init__(self, handle: Callable[[Request], Answer]) -> None:
        """Raises ControlError."""
        self._handle = handle
        self._one_at_a_time = threading.Lock()
        self._lock = threading.Lock()
        self._awaited: dict[socket.socket, None] = {}
        """Connections whose clients have to send or to read something; who came first stands first."""
        self._threads = ThreadPool("hicache-control-client")
        self.path = runtime_directory() / f"{os.getpid()}-{next(_numbers)}.sock"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.path.unlink(missing_ok=True)  # left by an earlier process with this number
            self._listener.bind(os.fspath(self.path))
            # With a full backlog a UNIX socket refuses commands at once.
            self._listener.listen(64)
        except OSError as error:
            self._listener.close()
            raise ControlError(f"{self.path}: {error.strerror or error}") from error
        self._loop = BackgroundLoop("hicache-control", self._serve, Backoff(_FIRST_PAUSE, _REQUEST_SECONDS))
        if not self._loop.wake():
            self.close()
            raise ControlError(f"{self.path}: there is no thread to answer with")

    def close(self) -> None:
        if self._loop.stopping:
            return
        self._loop.stop(0)
        # shutdown() wakes accept(); close() alone would not.
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._listener.close()
        self.path.unlink(missing_ok=True)
        self._loop.stop(_REQUEST_SECONDS)
        with self._lock:
            while self._awaited:
                self._let_first_go()
        self._threads.close(_REQUEST_SECONDS)

    def _serve(self) -> float | Retry:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return RETRY  # no descriptor left, or closed
        try:
            self._threads.start(lambda: self._talk(connection))
        except RuntimeError:  # no thread to be had
            connection.close()
            return RETRY
        return 0.0

    def _talk(self, connection: socket.socket) -> None:
        with connection:
            try:
                with self._awaiting(connection):
                    request = _receive(connection, _REQUEST_SECONDS)
                with self._one_at_a_time:
                    answer = self._answer(request)
                with self._awaiting(connection):
                    connection.settimeout(_REQUEST_SECONDS)
                    _send(connection, answer)
            except Exception as error:  # noqa: BLE001 - whatever somebody sends, the next request is answered
                logger.debug("hicache_ext: a request broke off: %r", error)

    @contextmanager
    def _awaiting(self, connection: socket.socket) -> Iterator[None]:
        """While a client has to do something. Of too many that take their time the first has to go."""
        with self._lock:
            if self._loop.stopping:
                raise ControlError("the server ends")
            if len(self._awaited) >= _MOST_AWAITED:
                self._let_first_go()
            self._awaited[connection] = None
        try:
            yield
        finally:
            with self._lock:
                self._awaited.pop(connection, None)

    def _let_first_go(self) -> None:
        first = next(iter(self._awaited))
        del self._awaited[first]
        with contextlib.suppress(OSError):  # it has gone by itself
            first.shutdown(socket.SHUT_RDWR)

    def _answer(self, request: Request) -> Answer:
        try:
            return self._handle(request)
        except Exception as error:
            logger.exception("hicache_ext: a request failed")
            return {"ok": False, "messages": [f"{type(error).__name__} (see the server's log)"]}


def servers() -> Iterator[Path]:
    """Sockets of this user's running backends, sorted by process id; sockets without a listener are removed."""
    for path in _sockets(runtime_directory()):
        if _has_listener(path):
            yield path
        else:
            path.unlink(missing_ok=True)


def sockets_without_listener() -> list[Path]:
    """What killed servers of this user have left. Makes nothing and removes nothing; a directory that others could have
    filled has nothing of ours."""
    place = _place_of_sockets()
    try:
        if not _is_of_this_user_alone(place.lstat()):
            return []
    except OSError:
        return []
    return [path for path in _sockets(place) if path.is_socket() and not _has_listener(path)]


def _is_of_this_user_alone(status: os.stat_result) -> bool:
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


def _place_of_sockets() -> Path:
    chosen = os.environ.get(DIRECTORY_VARIABLE)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if chosen:
        return Path(chosen)
    if runtime and os.access(runtime, os.W_OK):
        return Path(runtime) / "hicache_ext"
    return Path(tempfile.gettempdir()) / f"hicache_ext-{os.getuid()}"


def _sockets(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.sock"), key=lambda path: (len(path.name), path.name))


def _has_listener(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            # The process id is no proof: in containers that share the directory it means another process.
            connection.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError as error:
            logger.debug("hicache_ext: %s: %s", path, error)
    return True


def ask(path: Path, request: Request, seconds: float = 60.0) -> Answer:
    """The answer of the backend behind ``path``. Raises ControlError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(seconds)
        try:
            connection.connect(os.fspath(path))
            _send(connection, request)
            return _receive(connection, seconds)
        except (OSError, ValueError) as error:
            raise ControlError(f"process {path.name.partition('-')[0]} does not answer: {error}") from error


def _send(connection: socket.socket, document: dict[str, Any]) -> None:
    connection.sendall(json.dumps(document).encode() + b"\n")


def _receive(connection: socket.socket, seconds: float) -> dict[str, Any]:
    """What comes within ``seconds``, however slowly: not so many for each piece."""
    received = b""
    until = time.monotonic() + seconds
    while not received.endswith(b"\n"):
        connection.settimeout(max(0.001, until - time.monotonic()))
        piece = connection.recv(65536)
        if not piece:
            raise ValueError("the connection ended")
        received += piece
        if len(received) > _LONGEST_LINE:
            raise ValueError("the line is too long")
    document = json_in(received)
    if not isinstance(document, dict):
        raise ValueError("not a mapping")
    return document

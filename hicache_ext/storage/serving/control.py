"""Commands reach running servers on this machine over one UNIX socket per backend, in a directory of the user.

A request is one line of JSON, the answer another. Signals are not used, because SGLang owns them. No secrets go over
the socket, and only the same user can connect (directory mode 0700).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
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
_FIRST_PAUSE = 0.01
_LOOK_EVERY = 60.0
"""Seconds between checks whether the socket was removed, as by a cleaner of temporary files, and must be recreated."""


def runtime_directory() -> Path:
    """Return the directory of this user's sockets; create it if missing. Raises ControlError if others can use it."""
    directory = _place_of_sockets()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.lstat()
    except OSError as error:
        raise ControlError(f"{directory}: {error.strerror or error}") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ControlError(f"{directory} is not a directory of this user alone (mode 0700)")
    return directory


class ControlSocket:
    """Answers requests with ``handle(request)``, one at a time. Each client has its own thread."""

    def __init__(self, handle: Callable[[Request], Answer]) -> None:
        """Listen and start the thread. Raises ControlError."""
        self._handle = handle
        self._one_at_a_time = threading.Lock()
        self._lock = threading.Lock()
        self._clients: set[socket.socket] = set()
        self._threads = ThreadPool("hicache-control-client")
        self.path, self._listener = _new_listener()
        self._loop = BackgroundLoop("hicache-control", self._serve, Backoff(_FIRST_PAUSE, _REQUEST_SECONDS))
        if not self._loop.wake():
            self.close()
            raise ControlError(f"{self.path}: there is no thread to answer with")

    def close(self) -> None:
        if self._loop.stopping:
            return
        self._loop.stop(0)
        with self._lock:
            _remove(self.path, self._listener)
        self._loop.stop(_REQUEST_SECONDS)
        for connection in list(self._clients):
            with contextlib.suppress(OSError):  # the client has disconnected
                connection.shutdown(socket.SHUT_RDWR)
        self._threads.close(_REQUEST_SECONDS)

    def _serve(self) -> float | Retry:
        try:
            connection, _ = self._listener.accept()
        except TimeoutError:
            return self._listen_again()
        except OSError:
            return RETRY  # no descriptor left, or closed
        self._clients.add(connection)
        try:
            self._threads.start(lambda: self._talk(connection))
        except RuntimeError:  # no thread could be started
            self._clients.discard(connection)
            connection.close()
            return RETRY
        return 0.0

    def _listen_again(self) -> float | Retry:
        """Create another socket if this server's was removed, so that nobody can find it."""
        if self._loop.stopping or self.path.is_socket():
            return 0.0
        try:
            path, listener = _new_listener()
        except ControlError as error:
            logger.debug("hicache_ext: %s", error)
            return RETRY
        with self._lock:
            if self._loop.stopping:
                _remove(path, listener)
            else:
                self._listener.close()
                self.path, self._listener = path, listener
        return 0.0

    def _talk(self, connection: socket.socket) -> None:
        with connection:
            try:
                request = _receive(connection, _REQUEST_SECONDS)
                with self._one_at_a_time:
                    answer = self._answer(request)
                connection.settimeout(_REQUEST_SECONDS)
                _send(connection, answer)
            except Exception as error:  # noqa: BLE001 - whatever somebody sends, the next request is answered
                logger.debug("hicache_ext: a request broke off: %r", error)
            finally:
                self._clients.discard(connection)

    def _answer(self, request: Request) -> Answer:
        try:
            return self._handle(request)
        except Exception as error:
            logger.exception("hicache_ext: a request failed")
            return {"ok": False, "messages": [f"{type(error).__name__} (see the server's log)"]}


def servers() -> Iterator[Path]:
    """Yield the sockets of this user's running backends; remove sockets without a listener."""
    for path in sorted(runtime_directory().glob("*.sock")):
        if has_listener(path):
            yield path
        else:
            path.unlink(missing_ok=True)


def _new_listener() -> tuple[Path, socket.socket]:
    """Listen at a socket whose name is unique across containers. Raises ControlError."""
    path = runtime_directory() / f"{secrets.token_hex(8)}.sock"
    unfinished = path.with_suffix(".new")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _address(unfinished) as address:
            listener.bind(address)
        # With a full backlog a UNIX socket refuses commands immediately.
        listener.listen(64)
        listener.settimeout(_LOOK_EVERY)
        # Only now, because a command that found it earlier would remove it as a socket without a listener.
        unfinished.rename(path)
    except OSError as error:
        _remove(unfinished, listener)
        raise ControlError(f"{path}: {error.strerror or error}") from error
    return path, listener


def _remove(path: Path, listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
    # shutdown() wakes accept(); close() alone would not.
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()


@contextmanager
def _address(path: Path) -> Iterator[str]:
    """Yield the address of a socket via a descriptor of its directory, because a path may be longer than an address
    can be. Raises OSError."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def _place_of_sockets() -> Path:
    chosen = os.environ.get(DIRECTORY_VARIABLE)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if chosen:
        return Path(chosen)
    if runtime and os.access(runtime, os.W_OK):
        return Path(runtime) / "hicache_ext"
    return Path(tempfile.gettempdir()) / f"hicache_ext-{os.getuid()}"


def has_listener(path: Path) -> bool:
    """Return whether a process listens at this socket. Never raises or waits."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.setblocking(False)  # a stopped process with a full backlog
        try:
            with _address(path) as address:
                connection.connect(address)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError as error:
            logger.debug("hicache_ext: %s: %s", path, error)
    return True


def ask(path: Path, request: Request, seconds: float = 60.0) -> Answer:
    """Return the answer of the backend behind ``path``. Raises ControlError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(seconds)
        try:
            with _address(path) as address:
                connection.connect(address)
            _send(connection, request)
            return _receive(connection, seconds)
        except (OSError, ValueError) as error:
            raise ControlError(f"the server behind {path} does not answer: {error}") from error


def _send(connection: socket.socket, document: dict[str, Any]) -> None:
    connection.sendall(json.dumps(document).encode() + b"\n")


def _receive(connection: socket.socket, seconds: float) -> dict[str, Any]:
    """Receive one document within ``seconds`` in total, not per piece."""
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

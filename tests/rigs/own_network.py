"""A network of this process's own, for engines that listen on all interfaces at ports nobody chose.

::

    with own_network():
        ...  # this thread, the threads and the processes it starts see only a loopback device of their own

Needs the right to make network namespaces: root, or any user under ``unshare --user --map-root-user``.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
import threading
from collections.abc import Iterator

_CLONE_NEWNET = 0x40000000
_SIOCGIFFLAGS = 0x8913
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1
_IFREQ = struct.Struct("16sh22x")

_lock = threading.Lock()
_namespace: int | None = None
"""File descriptor of the one namespace of this process. Engines keep threads for the life of the process, and a thread
stays in the namespace it was started in: a second namespace would be out of their reach."""


class NetworkUnavailable(RuntimeError):
    """This process may not make a network namespace."""


@contextlib.contextmanager
def own_network() -> Iterator[None]:
    """Move the calling thread into this process's own network, and back at the end.

    Raises NetworkUnavailable. Threads that exist already stay where they are; sockets stay in the network in which they
    were made.
    """
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _enter()
        try:
            yield
        finally:
            _set_namespace(home)
    finally:
        os.close(home)


def _enter() -> None:
    global _namespace
    with _lock:
        if _namespace is not None:
            _set_namespace(_namespace)
            return
        try:
            _check(_libc().unshare(_CLONE_NEWNET))
        except OSError as error:
            raise NetworkUnavailable(
                f"no network namespace of its own ({error.strerror}); run as root or under unshare -r"
            ) from error
        _bring_loopback_up()
        _namespace = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _bring_loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = fcntl.ioctl(control, _SIOCGIFFLAGS, _IFREQ.pack(b"lo", 0))
        flags = _IFREQ.unpack(request)[1]
        fcntl.ioctl(control, _SIOCSIFFLAGS, _IFREQ.pack(b"lo", flags | _IFF_UP))


def _set_namespace(descriptor: int) -> None:
    _check(_libc().setns(descriptor, _CLONE_NEWNET))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))

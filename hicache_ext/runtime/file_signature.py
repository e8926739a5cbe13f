"""Whether a file or directory is another one than before, without reading it."""

from __future__ import annotations

import ctypes
import os
import struct

FileSignature = tuple[int, int, int, int]
DirectorySignature = tuple[int, int, int, bytes]

_AT_FDCWD = -100
_STATX_BTIME = 0x800
_LENGTH_OF_STATX, _MASK, _BTIME = 256, 0, 80
"""Bytes of the kernel's answer, and where in it these are (statx(2))."""


def file_signature(file: str | os.PathLike[str]) -> FileSignature | None:
    """Changes with every write of a file, also where it is a link to another one by then (a Kubernetes ConfigMap).

    None where it cannot be seen.
    """
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def why_replaced(fd: int, directory: str | os.PathLike[str]) -> str | None:
    """How ``directory`` has become another one than the one that is open as ``fd``, in words; None while it is the
    same, or cannot be seen. Raises OSError for a bad ``fd``."""
    opened = os.fstat(fd)
    try:
        now = os.stat(directory)
    except (FileNotFoundError, NotADirectoryError):
        return "the directory that was opened is not there any more"
    except OSError:
        return None
    if os.path.samestat(opened, now):
        return None
    return f"another {'directory' if opened.st_dev == now.st_dev else 'file system'} is there than was opened"


def directory_signature(directory: str | os.PathLike[str]) -> DirectorySignature | None:
    """Tells a directory from all others, also from that of a file system made later on the same device: device, inode,
    id of the file system, and when the directory was made, as far as that is known. None where there is none. Raises
    OSError."""
    try:
        # That of XFS is the device's number, and ext4 makes its root at a whole second: neither alone tells.
        status, file_system = os.stat(directory), os.statvfs(directory).f_fsid
    except (FileNotFoundError, NotADirectoryError):
        return None
    answer = ctypes.create_string_buffer(_LENGTH_OF_STATX)
    try:
        failed = ctypes.CDLL(None).statx(_AT_FDCWD, os.fsencode(directory), 0, _STATX_BTIME, answer)
    except AttributeError:  # a C library without it
        failed = -1
    known = not failed and struct.unpack_from("I", answer, _MASK)[0] & _STATX_BTIME
    return status.st_dev, status.st_ino, file_system, answer.raw[_BTIME : _BTIME + 12] if known else b""

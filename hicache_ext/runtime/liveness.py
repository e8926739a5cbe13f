"""Names by which processes of several machines know each other in files, whether such a process still runs, and which
boot of this machine it is."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_FOREIGN_WRITER_SILENCE = 600.0
"""Seconds without a sign of life after which a writer of another machine counts as dead."""


def writer_name(pid: int | None = None) -> str:
    """``host:pid:start`` of a process; the start time tells a recycled pid from the writer that had it before."""
    pid = os.getpid() if pid is None else pid
    return f"{_host()}:{pid}:{_start_time(pid)}"


def writer_alive(writer: str, last_change: float) -> bool:
    """Whether the process that called itself ``writer`` may still be running."""
    host, _, rest = writer.rpartition(":")[0].rpartition(":")
    if host != _host():
        return time.time() - last_change < _FOREIGN_WRITER_SILENCE
    return rest.isdigit() and writer_name(int(rest)) == writer


def boot_id() -> str | None:
    """The kernel's name of this boot of the machine; None where it does not tell."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return None


def _host() -> str:
    # Part of file names, too.
    return socket.gethostname().replace("/", "_")


def _start_time(pid: int) -> str:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "gone"
    fields = stat.rpartition(")")[2].split()
    # A killed process stays a zombie until its parent looks. It writes no more, unless another thread of it is still
    # ending, perhaps inside a write: a slot given away by then held the bytes of two pages (one kill in 150).
    ended = fields[0] in ("Z", "X") and int(fields[17]) <= 1
    return "gone" if ended else fields[19]

"""Which boot of this machine it is. Who is alive on it: members.py."""

from __future__ import annotations

from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str | None:
    """The kernel's name of this boot of the machine; None where it does not tell."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return None

"""Whether a file is another one than before, without reading it."""

from __future__ import annotations

import os

FileSignature = tuple[int, int, int, int]


def file_signature(file: str | os.PathLike[str]) -> FileSignature | None:
    """Changes with every write of a file, also where it is a link to another one by then (a Kubernetes ConfigMap).

    None where it cannot be seen.
    """
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns

"""What differs between releases of SGLang, and nothing else. Imports neither torch nor SGLang."""

from __future__ import annotations

import importlib.metadata
import logging

from hicache_ext.errors import UnsupportedError

logger = logging.getLogger(__name__)

TESTED_SGLANG = "0.5.23"
"""The release that all tests run with, and the oldest one that is served."""


def check_sglang_version(installed: str | None = None) -> None:
    """Refuse an SGLang that is known to be unsafe, warn about one that was not tested.

    Releases before the tested one left LoRA and cache_salt out of the page hashes in places, and lack the calls this
    package answers. Raises UnsupportedError.
    """
    if installed is None:
        installed = importlib.metadata.version("sglang")
    if installed == TESTED_SGLANG:
        return
    if _numbers(installed) < _numbers(TESTED_SGLANG):
        raise UnsupportedError(
            f"SGLang {installed}", f"this package needs {TESTED_SGLANG}", f"pip install sglang=={TESTED_SGLANG}"
        )
    logger.warning("hicache_ext was tested with SGLang %s; this is %s", TESTED_SGLANG, installed)


def _numbers(version: str) -> tuple[int, ...]:
    release = version.split("+")[0].split(".post")[0]
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in release.split(".")[:3])

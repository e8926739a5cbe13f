"""A configuration as the command line names it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from hicache_ext.config import read_document
from hicache_ext.config.sources import read_text
from hicache_ext.errors import ConfigError


def read_configuration(file: str) -> Mapping[str, Any]:
    """The raw document in a file, in inline JSON, or on standard input ('-'). Raises ConfigError."""
    if file != "-":
        return read_document(file)
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError:
        raise ConfigError("standard input", "is not UTF-8 text") from None
    return read_text(text, "standard input")

"""What ``linker_extra_config`` of ``--unified-cache-external-linker-config`` may hold, and what is made of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from hicache_ext.config import ExtraConfig, check_document, read_document
from hicache_ext.config.model import SECTION
from hicache_ext.config.problems import did_you_mean
from hicache_ext.errors import ConfigError

FILE = "config_file"
PLACE = "linker_extra_config"
_ALLOWED = f"{{{SECTION}: {{tiers: ...}}}}, or {{{FILE}: /path/hicache.yaml}}"


def launched_with(extra_config: Mapping[str, Any] | None) -> tuple[dict[str, Any], str | None]:
    """The document that HiCache would be given, and the file that holds it, if one does. Raises ConfigError.

    A file may hold the keys that SGLang reads for HiCache alone (``prefetch_threshold``, ...); they mean nothing here.
    """
    given = dict(extra_config or {})
    for key in given:
        if key not in (SECTION, FILE):
            raise ConfigError(f"{PLACE}.{key}", f"unknown key{did_you_mean(key, (SECTION, FILE))}", _ALLOWED)
    if len(given) != 1:
        problem = "holds nothing" if not given else f"holds both {SECTION} and {FILE}"
        raise ConfigError(PLACE, problem, _ALLOWED)
    if SECTION in given:
        if not isinstance(given[SECTION], Mapping):
            raise ConfigError(f"{PLACE}.{SECTION}", "is no mapping", _ALLOWED)
        return ExtraConfig.around(given[SECTION]), None
    file = given[FILE]
    if not isinstance(file, str) or not file.strip():
        raise ConfigError(f"{PLACE}.{FILE}", "is no path", "/path/hicache.yaml")
    file = os.path.abspath(file.removeprefix("@"))
    document = read_document(file)
    check_document(document)
    return ExtraConfig.around(document[SECTION]), file

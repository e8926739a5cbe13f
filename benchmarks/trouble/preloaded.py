"""Imported by the process that clients are forked from: what the contenders of HICACHE_TROUBLE import, once for all."""

import contextlib
import os

from benchmarks.trouble.contenders import CONTENDERS

for _name in filter(None, os.environ.get("HICACHE_TROUBLE", "").split(";")):
    # What is missing is said by the client that opens it.
    with contextlib.suppress(Exception):
        CONTENDERS[_name].load()

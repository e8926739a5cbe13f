"""Constants of a pair that are too long for a test: the stride of the decode writer, the pause between probes of a tier
(see server_hooks.py)."""

from __future__ import annotations

from hicache_ext.pd.decode_writer import DecodeWriter
from hicache_ext.storage.tiering import pulling


def register() -> None:
    DecodeWriter.__init__.__kwdefaults__["stride"] = 32
    pulling.PROBE_INTERVAL = 2.0

"""Admission that chooses after some hundred pages: a test has no time for some thousand (see server_hooks.py)."""

from __future__ import annotations

from hicache_ext.storage.tiering import admission as policy


def register() -> None:
    policy._STEP = 64

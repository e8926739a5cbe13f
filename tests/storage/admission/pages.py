"""Runs of pages as admission sees them."""

from __future__ import annotations

import hashlib

from hicache_ext.storage.contract.store import PageKeys

IDENTITY = bytes(range(16))


def run(name: str, count: int, *, first: int = 0, identity: bytes = IDENTITY) -> PageKeys:
    """Pages of one request, in order."""
    hashes = [hashlib.sha256(f"{name}/{page}".encode()).digest() for page in range(first, first + count)]
    return PageKeys.of_joined(identity, b"".join(hashes))

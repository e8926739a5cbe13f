"""The seal of a tier: who else may read or change its keys, and how fast its cipher is here."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from hicache_ext.config import TierConfig
from hicache_ext.config.seal import SealConfig, SealKeyReference
from hicache_ext.page.transforms.sealing import CipherKind, fastest_cipher
from hicache_ext.storage.contract.diagnosis import Finding, Level

_SUBJECT = "seal"


def seal_findings(tier: TierConfig) -> Iterator[Finding]:
    """Names files and ids, never a key."""
    if tier.seal is None:
        return
    yield Finding(_SUBJECT, Level.OK, _in_words(tier.seal))
    for key in tier.seal.keys:
        yield from _of_environment(key) if key.kind == "env" else _of_file(key)
    if fastest_cipher() is not CipherKind.AES_256_GCM:
        seen = "this processor has no instructions for AES: pages are sealed with ChaCha20-Poly1305, which is slower"
        yield Finding(f"{_SUBJECT} cipher", Level.NOTE, seen)


def _in_words(seal: SealConfig) -> str:
    writes = seal.write_with or seal.keys[0].id
    others = ", ".join(key.id for key in seal.keys if key.id != writes)
    return f"{seal.mode}, pages are written with key {writes}" + (f" and read with {others}, too" if others else "")


def _of_environment(key: SealKeyReference) -> Iterator[Finding]:
    seen = "it is in the environment: processes that the server starts, and crash dumps, have it, too"
    yield Finding(f"{_SUBJECT} key {key.id}", Level.NOTE, seen, "keep it in a file of mode 0600")


def _of_file(key: SealKeyReference) -> Iterator[Finding]:
    """The tier says itself where a file cannot be read."""
    name = key.name
    try:
        status = os.stat(name)
    except OSError:
        return
    mode = stat.S_IMODE(status.st_mode)
    can = []
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        can.append("every account")
    elif mode & (stat.S_IRGRP | stat.S_IWGRP):
        can.append(f"group {status.st_gid}")
    if status.st_uid not in (0, os.geteuid()):
        can.append(f"account {status.st_uid}, whose it is")
    if can:
        # A secret of a pod with fsGroup is its group's.
        of_all = mode & (stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP) or len(can) > 1
        seen = f"{name} has mode {mode:04o}: {' and '.join(can)} can read or change it"
        remedy = "chmod 600, and the server's account as owner; in Kubernetes defaultMode: 0400"
        yield Finding(f"{_SUBJECT} key {key.id}", Level.WARNING if of_all else Level.NOTE, seen, remedy)

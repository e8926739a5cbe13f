"""Valid settings that may surprise: SGLang's own settings, roles, unused tiers."""

from __future__ import annotations

import os
import shutil
import socket
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

from hicache_ext.config import ExtraConfig, HicacheExtConfig
from hicache_ext.config.sections import SGLANG
from hicache_ext.errors import MissingPackageError
from hicache_ext.page.recording import SUFFIX
from hicache_ext.storage.contract.diagnosis import Finding, Level
from hicache_ext.storage.tiering.recording import SALT_FILE
from hicache_ext.storage.tiering.tier_use import tier_use
from hicache_ext.storage.tiering.tracing import check_packages

_DEFAULT_THRESHOLD = 256
"""Tokens; SGLang 0.5.23."""
_CONNECT_TIMEOUT = 2.0


def setting_findings(checked: ExtraConfig, *, inline: bool) -> Iterator[Finding]:
    """``inline``: the configuration is given as JSON on the command line, not as a file."""
    config = checked.hicache_ext
    yield Finding("configuration", Level.OK, f"valid; role {config.role}, {len(config.tiers)} tier(s)")
    threshold = checked.prefetch_threshold
    if threshold is None:
        yield Finding(
            "prefetch_threshold",
            Level.NOTE,
            f"SGLang asks storage for spans of {_DEFAULT_THRESHOLD} tokens or more only (its default)",
            "set prefetch_threshold lower if prompts share less than that",
        )
    else:
        yield Finding("prefetch_threshold", Level.OK, f"{threshold} tokens; shorter spans never ask storage")
    if checked.allocator is None:
        seen = "host pages are not page-aligned"
        yield Finding("allocator", Level.NOTE, seen, "allocator: shm in inline JSON aligns them, for direct I/O")
    elif not inline and config.role != "decode":
        seen = "SGLang ignores 'allocator' in a file"
        yield Finding(
            "allocator", Level.WARNING, seen, "pass the configuration inline: hicache-ext config render --inline"
        )
    else:
        yield Finding("allocator", Level.OK, checked.allocator)
    yield _events(config)
    yield _tracing(config)
    yield _record(config)
    for line in tier_use(config).lines():
        yield Finding("tiers", Level.OK, line)
    for name in config.tiers:
        if name not in (*config.retrieve_locations, *config.store_locations):
            yield Finding(
                "tiers", Level.WARNING, f"tier {name} is neither read nor written", "name it in a location list"
            )
        elif name not in config.retrieve_locations and config.role != "decode":
            yield Finding("tiers", Level.NOTE, f"tier {name} is written and never read by this node", "")


def _events(config: HicacheExtConfig) -> Finding:
    """What KV-aware routers learn of the tiers."""
    if config.events is None:
        seen = "KV-aware routers learn nothing of the tiers, and SGLang's /get_hicache_l3_cache_layout answers disabled"
        return Finding("events", Level.OK, f"off: {seen} (docs/kv-events.md)")
    where = f"at {config.events.endpoint}, replay at {config.events.replay_endpoint}"
    silent = [name for name in config.retrieve_locations if not config.tiers[name].tells_pages]
    if silent:
        seen = f"{where}; nothing is told of {', '.join(silent)}: they do not say which pages they hold"
        return Finding("events", Level.NOTE, seen, "docs/kv-events.md says what a router does about them")
    return Finding("events", Level.OK, where)


def _tracing(config: HicacheExtConfig) -> Finding:
    """Whether spans can be made, and go anywhere."""
    if config.tracing is None:
        return Finding("tracing", Level.OK, "off (docs/traces.md)")
    try:
        check_packages()
    except MissingPackageError as error:
        return Finding(
            "tracing", Level.ERROR, "the server will not start: " + str(error), "install it, or leave it out"
        )
    endpoint = config.tracing.endpoint
    if endpoint == SGLANG:
        seen = "to the collector of SGLang's --enable-trace, without which the server does not start"
        return Finding("tracing", Level.NOTE, seen, "start it with --enable-trace --otlp-traces-endpoint HOST:PORT")
    parts = urllib.parse.urlsplit(endpoint)
    address = (parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))
    try:
        socket.create_connection(address, timeout=_CONNECT_TIMEOUT).close()
    except OSError as error:
        return Finding("tracing", Level.WARNING, f"{endpoint}: {error}", "start the collector; servers run without it")
    return Finding("tracing", Level.OK, f"to {endpoint}, where somebody listens")


def _record(config: HicacheExtConfig) -> Finding:
    """Whether recordings can be written, and who may read what tells prompts by them."""
    if config.record is None:
        return Finding("record", Level.OK, "off (docs/recordings.md)")
    directory = Path(config.record.path)
    nearest = next(path for path in (directory, *directory.parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        seen = f"the server will not start: this account may not write to {nearest}"
        return Finding("record", Level.ERROR, seen, "give it another directory, or leave record out")
    salt = directory / SALT_FILE
    try:
        told = salt.exists() and bool(salt.stat().st_mode & 0o077)
        files = [path.stat().st_size for path in directory.glob(f"*{SUFFIX}")]
        free = shutil.disk_usage(nearest).free
    except OSError as error:
        return Finding("record", Level.WARNING, f"{directory}: {error.strerror}", "")
    if told:
        seen = f"other accounts may read {salt}: with it and a prompt, a recording says whether that was asked"
        return Finding("record", Level.WARNING, seen, f"chmod 600 {salt}")
    room = config.record.size - sum(files)
    if free < room:
        seen = f"{directory} may grow by {room:,} bytes, and {free:,} are free"
        return Finding("record", Level.WARNING, seen, "a smaller record.size; what does not fit is not recorded")
    return Finding("record", Level.OK, f"{len(files)} files of {sum(files):,} bytes in {directory}")

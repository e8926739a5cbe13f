"""Arguments of commands that compute page hashes: what a request has beside its tokens."""

from __future__ import annotations

import argparse
import re

from hicache_ext.errors import ConfigError
from hicache_ext.page.hashes import namespace_seed, namespaced_extra_key

_DIGEST = re.compile(r"[0-9a-f]{32}")


def add_namespace_arguments(parser: argparse.ArgumentParser) -> None:
    """``--extra-key``, ``--cache-salt`` and ``--adapter``."""
    parser.add_argument("--extra-key", metavar="TEXT", help="the requests' extra_key, where they have one")
    parser.add_argument("--cache-salt", metavar="TEXT", help="the requests' cache_salt, where they have one")
    parser.add_argument(
        "--adapter", metavar="DIGEST", help="of the requests' LoRA adapter: the server logs it when it loads one"
    )


def seed_of(arguments: argparse.Namespace) -> bytes:
    """The seed of the chain of page hashes. Raises ConfigError."""
    adapter = arguments.adapter or ""
    if adapter and not _DIGEST.fullmatch(adapter):
        raise ConfigError("--adapter", f"{adapter!r} is not an adapter digest", "32 hexadecimal digits")
    return namespace_seed(namespaced_extra_key(arguments.extra_key, adapter), arguments.cache_salt)

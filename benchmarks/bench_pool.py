#!/usr/bin/env python3
"""Mooncake, Redis and object tiers against their engines' own clients; the same as ``hicache-ext bench pool``."""

import sys

from hicache_ext.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", "pool", *sys.argv[1:]]))

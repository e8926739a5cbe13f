#!/usr/bin/env python3
"""Multi-turn conversations against servers and PD pairs; the same as ``hicache-ext bench multiturn``."""

import sys

from hicache_ext.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", "multiturn", *sys.argv[1:]]))

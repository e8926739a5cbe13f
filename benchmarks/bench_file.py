#!/usr/bin/env python3
"""The file tier against SGLang's HiCacheFile and the raw disk; the same as ``hicache-ext bench file``."""

import sys

from hicache_ext.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", "file", *sys.argv[1:]]))

#!/usr/bin/env python3
"""Copies between GPU and host memory, every engine beside SGLang's own; the same as ``hicache-ext bench kernels``.

In one command on a machine with a GPU (about 20 minutes; without one, what can be measured on the CPU)::

    benchmarks/bench_kernels.py --markdown kernels.md --json kernels.json --plot kernels.png
"""

import sys

from hicache_ext.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", "kernels", *sys.argv[1:]]))

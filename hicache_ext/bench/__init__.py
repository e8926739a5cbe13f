"""Benchmarks: several contenders in one run on one machine, interleaved, medians and ratios (``hicache-ext bench``)."""

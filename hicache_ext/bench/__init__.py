"""Benchmarks: several contenders in one run on one machine, interleaved, medians and ratios.

frame.py is what every benchmark shares; the others are one benchmark each (``hicache-ext bench``).
"""

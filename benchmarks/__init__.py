"""Benchmarks of this project that are no part of the package. Run from the repository: python -m benchmarks.NAME."""

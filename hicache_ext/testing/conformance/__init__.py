"""Conformance suites: pytest classes to inherit from, one fixture or method to fill in."""

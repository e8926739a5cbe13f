"""Conformance suites: pytest classes to inherit from, one fixture or method to fill in."""

import pytest

_PARTS = ("cases", "damage", "declared", "pages", "processes", "removal", "round_trips", "second_process")
_MORE = ("second_reader", "several_stores", "state_machine", "storage_backend", "threads")
# A case that fails says which values differed.
pytest.register_assert_rewrite(*[f"{__name__}.{part}" for part in (*_PARTS, *_MORE)])

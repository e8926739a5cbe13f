"""Conformance suites: pytest classes to inherit from, one fixture or method to fill in."""

import pytest

_PARTS = ("one_store", "page_store", "pages", "second_reader", "state_machine")
# A case that fails says which values differed.
pytest.register_assert_rewrite(*[f"{__name__}.{part}" for part in (*_PARTS, "storage_backend")])

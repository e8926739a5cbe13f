"""Keys and metrics in the documentation are those of the code (tests/docs/generated.py)."""

from __future__ import annotations

import pytest

from tests.docs.generated import PAGES, in_document


@pytest.mark.parametrize("page", PAGES)
def test_the_page_is_what_the_generator_prints(page: str) -> None:
    assert in_document(page) == PAGES[page](), "run: .venv/bin/python -m tests.docs.generated"

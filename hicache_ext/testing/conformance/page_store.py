"""Every promise of ``storage/contract/store.py`` as a test. For any PageStore, bare or wrapped.

A store's test file:

    class MyMedium(Medium):
        type = "mine"
        shared = False
        ...  # open, open_elsewhere, read, write, keys, failing, full


    class TestMyStore(PageStoreTests):
        @pytest.fixture
        def medium(self, tmp_path):
            return MyMedium(tmp_path)

``Medium`` says what each of its parts is for. docs/write-a-tier.md shows how to use it.
"""

from __future__ import annotations

from hicache_ext.testing.conformance.concurrency import ProcessCases, SeveralStoresCases, ThreadCases
from hicache_ext.testing.conformance.one_store import DamageCases, DeclaredCases, RemovalCases, RoundTripCases


class PageStoreTests(
    RoundTripCases, RemovalCases, DamageCases, DeclaredCases, SeveralStoresCases, ThreadCases, ProcessCases
):
    """Inherit and override the fixture ``medium``."""

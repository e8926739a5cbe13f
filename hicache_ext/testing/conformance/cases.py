"""The fixtures of the PageStore suite, and what its cases share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import pytest

from hicache_ext.storage.contract import bad_pages
from hicache_ext.storage.contract.store import PageStore
from hicache_ext.storage.tiers.file import path_store
from hicache_ext.testing.conformance.medium import Medium
from hicache_ext.testing.conformance.pages import in_threads


class PageStoreCases:
    """Base of every part of the suite."""

    patience = 60.0
    """Seconds after which a call that should have ended counts as hanging."""

    @pytest.fixture
    def medium(self) -> Medium:
        """A fresh medium. An override that ends the test's own resources yields it."""
        pytest.fail(
            f"{type(self).__name__} needs a fixture `medium` that answers a hicache_ext.testing.conformance.medium."
            "Medium: the way past the store, without which the suite cannot tell whether the store is right",
            pytrace=False,
        )

    @pytest.fixture
    def store(self, medium: Medium) -> Iterator[PageStore]:
        """A store over the medium; both are closed at the end."""
        store = medium.open()
        yield store
        store.close()
        medium.close()

    @pytest.fixture(autouse=True)
    def any_number_of_bad_pages(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A pool removes only a few in a minute, and the file tier looks for more; here every one is bad on purpose."""
        monkeypatch.setattr(bad_pages, "MOST_REMOVED", 1 << 30)
        monkeypatch.setattr(path_store, "SCRUB_AFTER", math.inf)

    def count(self, store: PageStore, event: str, reason: str | None = None) -> int:
        """How often ``event`` was counted in the metrics of the store, or of the stores it is made of."""
        tiers: Sequence[PageStore] = getattr(store, "tiers", [store])
        return sum(tier.metrics.total(event) if reason is None else tier.metrics.value(event, reason) for tier in tiers)

    def in_threads(self, *works: Callable[[], None]) -> None:
        """Run each of ``works`` on a thread of its own, within ``patience``."""
        in_threads(*works, patience=self.patience)

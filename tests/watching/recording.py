"""What the exporter says of a store, looked at now and then: the series that alert rules are tested with."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.storage.contract.reports import reported
from hicache_ext.storage.serving.metrics_export import Exporter, _build_info
from hicache_ext.storage.tiering.reload import ReloadableStore

Series = tuple[str, tuple[tuple[str, str], ...]]
"""A name, and its labels as (label, value)."""

_numbers = itertools.count()


class Recording(Exporter):
    """An exporter in this process that exports when a test looks. Its samples have a model name of their own."""

    def __init__(self, sources: Callable[[], Sequence[TierMetrics]]) -> None:
        self._families: dict[str, Any] = {}
        self._model = f"recorded-{next(_numbers)}"
        super().__init__(sources, {"model_name": self._model})
        self._loop.stop()

    @classmethod
    def of_store(cls, store: ReloadableStore) -> Recording:
        """What a backend exports of its tiers."""
        return cls(lambda: [store.metrics, *reported(store.tiers)])

    def _child(self, family: Any, metrics: TierMetrics, **more: str) -> Any:
        self._families[family._name] = family
        return super()._child(family, metrics, **more)

    def look(self) -> dict[Series, float]:
        """Every series with its present value, under the names that a scrape has."""
        self.export()
        samples = [
            sample
            for family in [_build_info(), *self._families.values()]
            for metric in family.collect()
            for sample in metric.samples
            if sample.labels.get("model_name") == self._model and not sample.name.endswith("_created")
        ]
        return {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in samples}

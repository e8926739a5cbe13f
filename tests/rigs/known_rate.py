"""What a prefill costs, known and not measured."""

from __future__ import annotations

from hicache_ext.storage.tiering.pulling import SizedCost


class KnownRate(SizedCost):
    """``rate``: tokens per second, at any size, without doubt."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self._rate = rate

    def saved_by(self, amount: float) -> float:
        return amount / self._rate

    def doubt(self, amount: int) -> float:
        return 1.0

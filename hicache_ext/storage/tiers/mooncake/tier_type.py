"""``type: mooncake``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hicache_ext.packages import how_to_install
from hicache_ext.storage.contract.registry import TierType
from hicache_ext.storage.tiers.mooncake.config import MooncakeTierConfig

if TYPE_CHECKING:
    from hicache_ext.storage.contract.store import PageStore


class MooncakeTier(TierType):
    """The memory of a Mooncake Store cluster that runs already."""

    config = MooncakeTierConfig
    install = f"{how_to_install('mooncake')} (or mooncake-transfer-engine-non-cuda, not both)"

    def open(self, name: str, tier: MooncakeTierConfig) -> PageStore:
        from hicache_ext.storage.tiers.mooncake.engine import Attachment
        from hicache_ext.storage.tiers.mooncake.pages import MooncakeStore

        return MooncakeStore(name, tier, Attachment(name, tier))

    def series(self) -> Mapping[str, Sequence[str]]:
        from hicache_ext.storage.contract.reports import SUSPECTS

        return {
            "suspect": SUSPECTS,
            "rejected": ("away", "full", "holder", "suspect", "unconfirmed"),
            "error": ("timeout", "full", "transfer", "master_unreachable", "master_timeout", "lease_expired", "leased"),
        }

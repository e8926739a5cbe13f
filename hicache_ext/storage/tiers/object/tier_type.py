"""``type: object``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hicache_ext.errors import StoreSetupError
from hicache_ext.packages import how_to_install
from hicache_ext.storage.contract.diagnosis import Finding, Level
from hicache_ext.storage.contract.registry import TierType
from hicache_ext.storage.tiers.object.config import ObjectTierConfig

if TYPE_CHECKING:
    from hicache_ext.storage.contract.store import PageStore

_REQUEST_ERRORS = (
    *("absent", "no_bucket", "denied", "slow_down", "timeout", "connection", "http_5xx", "http_4xx"),
    *("cut", "other"),
)


class ObjectTier(TierType):
    """Object stores, or a directory."""

    config = ObjectTierConfig
    install = how_to_install("obstore")

    def open(self, name: str, tier: ObjectTierConfig) -> PageStore:
        from hicache_ext.storage.tiers.object.client import make_client
        from hicache_ext.storage.tiers.object.store import ObjectPageStore

        return ObjectPageStore(name, tier, lambda: make_client(name, tier))

    def examine(self, name: str, tier: ObjectTierConfig) -> Sequence[Finding]:
        """Examine the tier. For a directory, the trial uses a separate one, so that the tier's own stays unchanged."""
        if tier.scheme != "file":
            return super().examine(name, tier)
        from hicache_ext.storage.contract.trial import trial_directory

        directory = Path("/", tier.prefix)
        findings: list[Finding] = []
        if not directory.exists():
            seen = f"{directory} does not exist; a server makes it at its start"
            findings.append(Finding("path", Level.NOTE, seen, "mount its disk first, if that is meant"))
        try:
            with trial_directory(directory) as place:
                trial = tier.model_copy(update={"url": f"file://{place}"})
                found = super().examine(name, trial)
                return findings + [replace(one, seen=one.seen.replace(str(place), str(directory))) for one in found]
        except OSError as error:
            raise StoreSetupError(name, f"directory {str(directory)!r}: {error.strerror or error}") from error

    def series(self) -> Mapping[str, Sequence[str]]:
        from hicache_ext.storage.contract.reports import SUSPECTS

        return {
            "cleared": ("",),
            "suspect": SUSPECTS,
            "rejected": ("suspect",),
            "error": (*_REQUEST_ERRORS, "not_as_sent"),
        }

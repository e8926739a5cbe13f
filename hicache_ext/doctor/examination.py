"""The examination: the installation, SGLang's settings, then the findings of every tier."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hicache_ext.config import ExtraConfig, TierConfig
from hicache_ext.doctor.installation import installation_findings
from hicache_ext.doctor.seals import seal_findings
from hicache_ext.doctor.settings import setting_findings
from hicache_ext.doctor.sglang_names import feature_findings, table
from hicache_ext.errors import ConfigError, StoreError
from hicache_ext.storage.contract.diagnosis import Finding, Level
from hicache_ext.storage.contract.registry import examine_tier

_ORDER = (Level.OK, Level.NOTE, Level.WARNING, Level.ERROR)


@dataclass(frozen=True, slots=True)
class Section:
    """Findings on one subject."""

    title: str
    findings: tuple[Finding, ...]
    rows: Sequence[dict[str, str]] = ()
    """A table that belongs to them."""

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "title": self.title,
            "findings": [
                {"subject": one.subject, "level": one.level.value, "seen": one.seen, "remedy": one.remedy}
                for one in self.findings
            ],
            **({"table": list(self.rows)} if self.rows else {}),
        }


def examine(checked: ExtraConfig, *, inline: bool, only: Sequence[str] | None = None) -> Iterator[Section]:
    """One section after the other, as they are found; ``only`` names the tiers to look at (None: all)."""
    yield Section("installation", tuple(installation_findings()))
    if rows := table():
        yield Section("what is used of SGLang", tuple(feature_findings()), rows)
    yield Section("configuration", tuple(setting_findings(checked, inline=inline)))
    for name, tier in checked.hicache_ext.tiers.items():
        if only is None or name in only:
            yield Section(f"tier {name}: {tier.summary()}", tuple(_tier_findings(name, tier)))


def worst(sections: Sequence[Section]) -> Level:
    """The worst level of all findings."""
    return max((one.level for section in sections for one in section.findings), key=_ORDER.index, default=Level.OK)


def _tier_findings(name: str, tier: TierConfig) -> Sequence[Finding]:
    try:
        return [Finding("open", Level.OK, "the tier can be opened"), *seal_findings(tier), *examine_tier(name, tier)]
    except ConfigError as error:
        return [Finding("open", Level.ERROR, str(error), "servers do not start with it, required or not")]
    except StoreError as error:
        if tier.required:
            return [Finding("open", Level.ERROR, str(error), "servers do not start until this is mended")]
        return [Finding("open", Level.WARNING, str(error), "servers start without it (required: false)")]
    except Exception as error:  # noqa: BLE001 - the other tiers are to be looked at all the same
        return [Finding("diagnosis", Level.ERROR, f"it ended in {type(error).__name__}", "please report it")]

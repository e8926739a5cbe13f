"""What every type of tier has in the configuration."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from hicache_ext.config.schema import Allowed, ConfigModel, checked, true_or_false


class TierConfig(ConfigModel):
    """What every type of tier has. ``type`` picks the class; the tier's name is its key in ``tiers``."""

    type: Annotated[str, Allowed("the type of a tier")]
    required: Annotated[
        bool,
        Field(description="false: the server starts even if this tier cannot"),
        Allowed("true or false"),
        checked(true_or_false),
    ] = True

    def directories(self) -> tuple[str, ...]:
        """The local directories this tier owns; no two tiers may share one."""
        return ()

    def summary(self) -> str:
        """One line for ``hicache-ext config check``; secrets never appear in it."""
        return self.type

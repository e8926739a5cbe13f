"""The types of tier: which configuration class each ``type`` names.

A later type is one ``TierConfig`` class in a module of its own, its name added to ``TIER_CLASSES``, and a store in
storage/contract/registry.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, get_args

from pydantic import SerializeAsAny, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core.core_schema import ValidationInfo

from hicache_ext.config.file_tier import FileTierConfig
from hicache_ext.config.mooncake_tier import MooncakeTierConfig
from hicache_ext.config.object_tier import ObjectTierConfig
from hicache_ext.config.problems import did_you_mean, kind_of, listed, quoted, refuse
from hicache_ext.config.redis_tier import RedisTierConfig
from hicache_ext.config.schema import as_pydantic_error
from hicache_ext.config.tier import TierConfig
from hicache_ext.errors import ConfigError

TIER_CLASSES: tuple[type[TierConfig], ...] = (FileTierConfig, MooncakeTierConfig, ObjectTierConfig, RedisTierConfig)


def tier_types() -> dict[str, type[TierConfig]]:
    """The class of each known ``type``."""
    return {get_args(model.model_fields["type"].annotation)[0]: model for model in TIER_CLASSES}


def _by_type(value: Any, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> TierConfig:
    if isinstance(value, TierConfig):
        return value
    types = tier_types()
    if not isinstance(value, Mapping):
        raise as_pydantic_error(
            ConfigError("", f"{kind_of(value)} is not accepted", "a mapping with a type and its settings")
        )
    if "type" not in value:
        raise as_pydantic_error(ConfigError(".type", "required", listed(types)))
    name = value["type"]
    if not isinstance(name, str):
        raise as_pydantic_error(refuse(name, listed(types), ".type"))
    if name not in types:
        problem = f"unknown tier type {quoted(name)}{did_you_mean(name, types)}"
        raise as_pydantic_error(ConfigError(".type", problem, listed(types)))
    return types[name].model_validate(value, context=info.context)


AnyTier = Annotated[SerializeAsAny[TierConfig], WrapValidator(_by_type)]
"""One tier of whichever class its ``type`` names."""

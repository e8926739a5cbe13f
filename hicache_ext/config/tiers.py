"""The tiers of a configuration: the class of each is that of the registered type which its ``type`` names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import SerializeAsAny, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core.core_schema import ValidationInfo

from hicache_ext.config.problems import did_you_mean, kind_of, listed, quoted, refuse
from hicache_ext.config.schema import as_pydantic_error
from hicache_ext.config.tier import TierConfig
from hicache_ext.errors import ConfigError, TierTypeError
from hicache_ext.storage.contract.registry import tier_type, tier_type_names


def tier_types() -> dict[str, type[TierConfig]]:
    """The class of each ``type`` that can be used; what another package brings and cannot be imported is left out."""
    classes = {}
    for name in tier_type_names():
        try:
            classes[name] = _class_of(name)
        except TierTypeError:
            continue
    return classes


def _class_of(name: str) -> type[TierConfig]:
    """Raises TierTypeError."""
    model = tier_type(name).config
    if not issubclass(model, TierConfig):
        raise TierTypeError(name, f"cannot be used: its configuration {model.__qualname__} is no TierConfig")
    return model


def _by_type(value: Any, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> TierConfig:
    if isinstance(value, TierConfig):
        return value
    names = tier_type_names()
    if not isinstance(value, Mapping):
        raise as_pydantic_error(
            ConfigError("", f"{kind_of(value)} is not accepted", "a mapping with a type and its settings")
        )
    if "type" not in value:
        raise as_pydantic_error(ConfigError(".type", "required", listed(names)))
    name = value["type"]
    if not isinstance(name, str):
        raise as_pydantic_error(refuse(name, listed(names), ".type"))
    if name not in names:
        problem = f"unknown tier type {quoted(name)}{did_you_mean(name, names)}"
        raise as_pydantic_error(ConfigError(".type", problem, listed(names)))
    try:
        model = _class_of(name)
    except TierTypeError as error:
        raise as_pydantic_error(ConfigError(".type", str(error))) from None
    return model.model_validate(value, context=info.context)


AnyTier = Annotated[SerializeAsAny[TierConfig], WrapValidator(_by_type)]
"""One tier of whichever class its ``type`` names."""

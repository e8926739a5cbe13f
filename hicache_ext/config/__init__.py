"""Typed configuration: one document, checked whole at start, every mistake one sentence.

``load_config`` is the entry point. Keys and their meaning: docs/configuration.md.
"""

from __future__ import annotations

from hicache_ext.config.load import Source, check_document, load_config, load_document, read_document
from hicache_ext.config.model import ExtraConfig, HicacheExtConfig, KernelsConfig, ModelConfig, RoleConfig, ServerRole
from hicache_ext.config.secrets import Secret
from hicache_ext.config.tier import RemoteTierConfig, TierConfig, tier_types
from hicache_ext.config.values import (
    format_duration,
    format_size,
    parse_duration,
    parse_size,
    rounded_size,
)

__all__ = [
    "ExtraConfig",
    "HicacheExtConfig",
    "KernelsConfig",
    "ModelConfig",
    "RemoteTierConfig",
    "RoleConfig",
    "Secret",
    "ServerRole",
    "Source",
    "TierConfig",
    "check_document",
    "format_duration",
    "format_size",
    "load_config",
    "load_document",
    "parse_duration",
    "parse_size",
    "read_document",
    "rounded_size",
    "tier_types",
]

"""What a configuration may say and hardly means, for ``hicache-ext config``."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pydantic import ValidationError

from hicache_ext.config import ExtraConfig, HicacheExtConfig, ServerRole, format_duration
from hicache_ext.config.load import secrets_in
from hicache_ext.config.schema import as_config_error
from hicache_ext.errors import ConfigError
from hicache_ext.storage.tiering.tier_use import tier_use

_LONG_TIMEOUT = 30.0
"""Seconds of a tier's timeout that are a mistake rather."""
_LONGEST_DRAIN = 13.0
"""Seconds: SGLang kills its schedulers 15 s after it asked them to end (0.5.21 to 0.5.23); a close takes one more."""


def notes_on(checked: ExtraConfig, inline: bool) -> Iterator[str]:
    """What is allowed and hardly meant, a sentence each."""
    config = checked.hicache_ext
    if not inline and checked.allocator and config.role != "decode":
        # On a decode node this package's hook reads the file before SGLang builds its pools (sglang/pd_hooks.py).
        yield "SGLang ignores 'allocator' in a file; pass the configuration inline to use it"
    for name in config.tiers:
        if name not in (*config.retrieve_locations, *config.store_locations):
            yield f"tier {name} is neither read nor written"
    for name, tier in config.tiers.items():
        if tier.timeout is not None and math.inf > tier.timeout >= _LONG_TIMEOUT:
            yield (
                f"tier {name}: timeout is {format_duration(tier.timeout)}, which a tier that hangs costs a request; a "
                "number without unit is seconds, milliseconds are written 200ms"
            )
        if tier.admission == "learned" and tier.sharing().shared:
            yield (
                f"tier {name}: it is shared, and 'admission: learned' knows only what this server is asked for; pages "
                "that other ones would read may be refused"
            )
        if tier.admission == "learned" and getattr(tier, "capacity", 0) is None:
            yield f"tier {name}: 'admission: learned' refuses nothing where the capacity is unlimited"
    if config.background.drain > _LONGEST_DRAIN:
        yield (
            f"background.drain is {format_duration(config.background.drain)}, and SGLang kills its processes 15 s "
            "after it told them to end: what is still queued then is lost; use "
            f"{format_duration(_LONGEST_DRAIN)} or less"
        )
    for _, secret in secrets_in(checked):
        try:
            secret.reveal()
        except ConfigError as error:
            yield f"{error}; a server on this node would not reach that tier"
    yield from _role_notes(config)


def _role_notes(config: HicacheExtConfig) -> Iterator[str]:
    """What a server of a role would find wrong or useless."""
    roles: tuple[ServerRole, ...] = ("prefill", "decode") if config.role == "auto" else (config.role,)
    for role in roles:
        try:
            view = config.for_role(role)
            use = tier_use(view)
        except (ConfigError, ValidationError) as error:
            problem = as_config_error(error) if isinstance(error, ValidationError) else error
            yield f"a server of the role {role} is refused at its start: {problem}"
            continue
        stored = [use.sharing[name] for name in view.store_locations]
        if role == "decode" and config.role != "auto" and stored and not any(sharing.shared for sharing in stored):
            yield (
                "a decode node that stores in private tiers alone writes what no prefill node can read; store in a "
                "shared one"
            )

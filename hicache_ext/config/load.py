"""``load_config``: from whatever SGLang or an operator holds to the checked configuration."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from hicache_ext.config.model import ExtraConfig, HicacheExtConfig
from hicache_ext.config.problems import config_error, key_path, shown
from hicache_ext.config.schema import as_config_error
from hicache_ext.config.secrets import Secret
from hicache_ext.config.sources import INLINE, keys_that_are_not_text, read_file, read_text
from hicache_ext.errors import ConfigError

Source = Mapping[str, Any] | str | os.PathLike[str]
"""A mapping (SGLang's ``extra_config``), a path, or a text as the launch flag takes it: ``@path`` or inline JSON."""


def load_config(source: Source) -> HicacheExtConfig:
    """The section ``hicache_ext`` of ``source``, checked and resolved on this node.

    Raises ``ConfigError``, or ``ConfigErrors`` when several places are wrong: one sentence each, with the full key
    path, what was wrong and what is allowed. Call it at start; it reads files and environment variables.
    """
    return load_document(source).hicache_ext


def load_document(source: Source) -> ExtraConfig:
    """Like ``load_config``, with SGLang's own keys around the section."""
    return check_document(read_document(source))


def read_document(source: Source) -> Mapping[str, Any]:
    """The raw document in ``source``, parsed and not yet checked; templates are not expanded."""
    if isinstance(source, Mapping):
        return source
    if isinstance(source, str):
        if source.lstrip().startswith("{"):
            return read_text(source, INLINE)
        source = source.removeprefix("@")
    if not isinstance(source, str | os.PathLike):
        raise ConfigError("", f"the configuration is {shown(source)}", "a mapping, or a path to a file")
    return read_file(Path(source))


def check_document(document: Mapping[str, Any]) -> ExtraConfig:
    """``document`` checked and resolved on this node."""
    if errors := list(keys_that_are_not_text(document)):
        raise config_error(errors)
    try:
        checked = ExtraConfig.validated(document)
    except ValidationError as error:
        # "from None": pydantic's error must not reach a log; it repeats what was put in.
        raise as_config_error(error) from None
    for location, secret in secrets_in(checked):
        secret.key = key_path(location)
    return checked


def secrets_in(value: object, location: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Secret]]:
    """Every ``Secret`` in a configuration, with where it stands."""
    if isinstance(value, Secret):
        yield location, value
    elif isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from secrets_in(getattr(value, name), (*location, name))
    elif isinstance(value, dict | tuple):
        steps: Iterable[tuple[str | int, object]] = value.items() if isinstance(value, dict) else enumerate(value)
        for step, below in steps:
            yield from secrets_in(below, (*location, step))

"""Secrets by reference: the configuration names an environment variable or a file, never the value.

SGLang returns the configuration over HTTP and prints it at start, so a password written into it is a password leaked.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import core_schema

from hicache_ext.config.problems import did_you_mean, quoted
from hicache_ext.config.schema import as_pydantic_error
from hicache_ext.config.values import expand_templates, is_environment_name
from hicache_ext.errors import ConfigError

SECRET_ALLOWED = "{env: NAME} or {file: /path}"

_LARGEST_SECRET = 64 * 1024
_KINDS = ("env", "file")


@dataclass(slots=True, unsafe_hash=True, repr=False)
class Secret:
    """Where a secret value is found. The value is read by ``reveal()`` each time and kept nowhere.

    ``kind`` is "env" or "file", ``name`` the variable or the path. ``key`` is the full key path, for errors; it is set
    while the configuration is loaded. May be used as the type of a field of a tier.
    """

    kind: str
    name: str
    key: str = field(default="", compare=False)

    @classmethod
    def parse(cls, value: object, key: str = "") -> Secret:
        """A reference from ``{env: NAME}`` or ``{file: /path}``; else a ``ConfigError`` without the value."""
        if isinstance(value, Secret):
            return value
        if not isinstance(value, Mapping):
            problem = "a secret is never written here: put it in an environment variable or a file and reference it"
            raise ConfigError(key, problem, SECRET_ALLOWED)
        for kind in value:
            if kind not in _KINDS:
                nearest = did_you_mean(kind, _KINDS) if isinstance(kind, str) else ""
                raise ConfigError(key, f"unknown key in a reference to a secret{nearest}", SECRET_ALLOWED)
        if len(value) != 1:
            problem = "a reference to a secret names exactly one of env and file"
            raise ConfigError(key, problem, SECRET_ALLOWED)
        [(kind, name)] = value.items()
        # The name is not repeated in these two sentences: a password put here by mistake must not be printed.
        if kind == "env" and not (isinstance(name, str) and is_environment_name(name)):
            raise ConfigError(key, "env does not hold the name of an environment variable", SECRET_ALLOWED)
        if kind == "file":
            if not isinstance(name, str) or not name.startswith(("/", "{")) or "\0" in name:
                raise ConfigError(key, "file does not hold an absolute path", SECRET_ALLOWED)
            name = expand_templates(name, key)
            if not os.path.isabs(name):
                raise ConfigError(key, "file does not hold an absolute path", SECRET_ALLOWED)
        return cls(kind, name, key)

    def reference(self) -> dict[str, str]:
        """The reference as it is written in the configuration."""
        return {self.kind: self.name}

    def reveal(self) -> str:
        """The secret value, read now, which UTF-8 can hold; one newline at the end of a file is dropped.

        Raises ``ConfigError`` naming the key path if the variable is not set, the file cannot be read, it is empty, or
        it is not UTF-8 text.
        """
        value = os.environ.get(self.name) if self.kind == "env" else self._read_file()
        if value is None:
            raise ConfigError(self.key, f"the environment variable {self.name} is not set")
        if not value:
            place = f"environment variable {self.name}" if self.kind == "env" else f"file {quoted(self.name)}"
            raise ConfigError(self.key, f"the {place} is empty")
        try:
            # Bytes of the environment that are no UTF-8 arrive as surrogates.
            value.encode()
        except UnicodeEncodeError:
            # "from None" and no detail: the original error carries the secret.
            raise ConfigError(self.key, f"the environment variable {self.name} is not UTF-8 text") from None
        return value

    def _read_file(self) -> str:
        try:
            with Path(self.name).open("rb") as file:
                raw = file.read(_LARGEST_SECRET + 1)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise ConfigError(self.key, f"the file {quoted(self.name)} cannot be read ({reason})") from None
        if len(raw) > _LARGEST_SECRET:
            raise ConfigError(self.key, f"the file {quoted(self.name)} is larger than 64KiB")
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            # "from None" and no detail: the original error carries the bytes of the secret.
            raise ConfigError(self.key, f"the file {quoted(self.name)} is not UTF-8 text") from None
        return text.removesuffix("\n").removesuffix("\r")

    def __repr__(self) -> str:
        return f"Secret({self.kind}={quoted(self.name)})"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        def parse(value: object) -> Secret:
            try:
                return cls.parse(value)
            except ConfigError as error:
                raise as_pydantic_error(error) from None

        return core_schema.no_info_plain_validator_function(
            parse, serialization=core_schema.plain_serializer_function_ser_schema(lambda secret: secret.reference())
        )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {
            "oneOf": [
                {
                    "type": "object",
                    "properties": {kind: {"type": "string"}},
                    "required": [kind],
                    "additionalProperties": False,
                }
                for kind in _KINDS
            ]
        }

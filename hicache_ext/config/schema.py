"""The base of every configuration model: pydantic traverses the document, and we word the errors.

Each model translates pydantic's reports about it into a key location and a (problem, allowed) pair, so that errors of
nested models accumulate and all wrong values of a file are reported together. No error carries the rejected value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, InitErrorDetails, core_schema

from hicache_ext.config.problems import config_error, did_you_mean, key_path, kind_of, listed, shown
from hicache_ext.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Allowed:
    """What a field accepts: ``text`` ends its error sentences, and ``parse`` converts the written value. ``parse``
    raises ``ConfigError`` whose ``key`` is only the part below the field (``""`` or ``"[1]"``); ``text`` replaces an
    ``allowed`` that is "".

    Fields of type bool, ``Literal`` or ``ConfigModel`` need none: their type is sufficient.
    """

    text: str
    parse: Callable[[object], object] | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        if self.parse is None:
            return handler(source)
        return core_schema.no_info_before_validator_function(self.parse, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        # Accepts any value: editors show the keys and what they accept; only the parser validates values.
        return handler(schema) if self.parse is None else {"anyOf": [{"description": self.text}]}


class ConfigModel(BaseModel):
    """A frozen mapping of known keys. A model says in class variables what pydantic cannot know.

    ``removed`` names keys of former versions with what decides instead; ``misplaced_key`` says where a key belongs that
    is known elsewhere; ``shows_values`` is false where somebody may write a secret into any place.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, hide_input_in_errors=True, use_attribute_docstrings=True
    )

    shows_values: ClassVar[bool] = True
    removed: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def misplaced_key(cls, key: str) -> str | None:
        """Return where the unknown ``key`` belongs, or None; for models to override."""
        return None

    @model_validator(mode="wrap")
    @classmethod
    def _translate_errors(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(_with_words(cls, values))
        except ValidationError as error:
            lines: list[InitErrorDetails] = [
                {"type": "value_error", "loc": details["loc"], "input": None, "ctx": {"error": translated}}
                for details in error.errors(include_url=False)
                for translated in _translated(cls, details).errors
            ]
            raise ValidationError.from_exception_data(cls.__name__, lines, hide_input=True) from None


OFF = "off"


def _with_words(model: type[ConfigModel], values: Any) -> Any:
    """Restore the word off, which YAML 1.1 reads as false, in ``values`` of fields that accept it."""
    if not isinstance(values, Mapping) or all(value is not False for value in values.values()):
        return values
    return {
        key: OFF if value is False and key in model.model_fields and _OFF.search(allowed_for(model, key)) else value
        for key, value in values.items()
    }


_OFF = re.compile(r"\boff\b")


def as_config_error(error: ValidationError) -> ConfigError:
    """Return the sentences in ``error``, which a ``ConfigModel`` raised, with their full key paths."""
    found = []
    for details in error.errors(include_url=False):
        ours = details["ctx"]["error"]
        found.append(ConfigError(key_path(details["loc"]) + ours.key, ours.problem, ours.allowed or None))
    return config_error(found)


def allowed_for(model: type[BaseModel], field: str) -> str:
    """Return a field's ``Allowed`` text, or that of its type; "" for another package's field that has neither."""
    found = model.model_fields[field]
    for note in found.metadata:
        if isinstance(note, Allowed):
            return note.text
    kind = found.annotation
    if kind is bool:
        return "true or false"
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return "a mapping with " + listed(kind.model_fields)
    return listed(_words(kind))


def _translated(model: type[ConfigModel], details: ErrorDetails) -> ConfigError:
    """Translate an error found by pydantic; the key of the result is relative to the location."""
    kind, location, value = details["type"], details["loc"], details["input"]
    ours = details.get("ctx", {}).get("error")
    field = str(location[0]) if location else ""
    if isinstance(ours, ConfigError):
        if len(ours.errors) > 1:
            return ours
        allowed = allowed_for(model, field) if ours.allowed == "" and field in model.model_fields else ours.allowed
        return ConfigError(ours.key, ours.problem, allowed)
    if not location:
        return ConfigError("", f"{kind_of(value)} is not accepted", "a mapping with " + listed(model.model_fields))
    if kind == "missing":
        return ConfigError("", "required", allowed_for(model, field))
    if field not in model.model_fields:
        if instead := _removed(model).get(field):
            return ConfigError("", f"there is no such key any more: {instead}; remove it")
        problem = f"unknown key; {place}" if (place := model.misplaced_key(field)) else "unknown key"
        if not place:
            problem += did_you_mean(field, model.model_fields)
        return ConfigError("", problem, listed(model.model_fields))
    nearest = did_you_mean(value, _words(model.model_fields[field].annotation)) if isinstance(value, str) else ""
    told = shown(value, field) if model.shows_values else kind_of(value)
    return ConfigError("", f"{told} is not accepted{nearest}", allowed_for(model, field))


def _removed(model: type[ConfigModel]) -> dict[str, str]:
    """Return the removed keys of this class and its bases."""
    return {key: why for base in reversed(model.__mro__) for key, why in vars(base).get("removed", {}).items()}


def _words(kind: Any) -> list[str]:
    """Return the words that a type accepts: those of a ``Literal``, even if optional or inside a mapping."""
    if get_origin(kind) is Literal:
        return [word for word in get_args(kind) if isinstance(word, str)]
    return [word for part in get_args(kind) for word in _words(part)]

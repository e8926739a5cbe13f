"""The mapping ``seal`` of a tier: pages that only holders of a key can make, or read (docs/security.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, WithJsonSchema, model_validator

from hicache_ext.config.problems import did_you_mean, listed, refuse, shown
from hicache_ext.config.schema import Allowed, ConfigModel, as_pydantic_error, checked, one_of
from hicache_ext.config.secrets import Secret
from hicache_ext.errors import ConfigError, MissingPackageError
from hicache_ext.packages import need
from hicache_ext.page.transforms.header import SHORTEST_SECRET, is_key_id

if TYPE_CHECKING:
    from hicache_ext.page.transforms.sealing import Seal

MODES = ("authenticate", "encrypt")

_ID_ALLOWED = "1 to 16 letters, digits, dots, dashes and underscores"
_KEYS_ALLOWED = "a list of keys such as [{id: a, file: /etc/hicache/seal-a}], each with an id and one of file and env"


@dataclass(frozen=True, slots=True)
class SealKeyReference:
    """One key: its id, and where its secret is found."""

    id: str
    secret: Secret


def _keys(value: object) -> tuple[SealKeyReference, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise refuse(value, _KEYS_ALLOWED)
    found: list[SealKeyReference] = []
    for number, given in enumerate(value):
        if isinstance(given, SealKeyReference):
            found.append(given)
            continue
        if not isinstance(given, Mapping):
            # Not repeated in the sentence: it may be a key.
            raise ConfigError(f"[{number}]", "a key is never written here: reference it", _KEYS_ALLOWED)
        id = given.get("id")
        if not isinstance(id, str) or not is_key_id(id):
            raise ConfigError(f"[{number}].id", "required, and no such id is accepted", _ID_ALLOWED)
        if any(id == known.id for known in found):
            raise ConfigError(f"[{number}].id", f"two keys have the id {id}")
        try:
            secret = Secret.parse({key: value for key, value in given.items() if key != "id"})
        except ConfigError as error:
            raise ConfigError(f"[{number}]", error.problem, error.allowed) from None
        found.append(SealKeyReference(id, secret))
    return tuple(found)


class SealConfig(ConfigModel):
    """``seal`` of one tier."""

    required_because: ClassVar[Mapping[str, str]] = {"mode": "a seal needs a mode", "keys": "a seal needs a key"}

    mode: Annotated[
        Literal["authenticate", "encrypt"],
        Field(description="authenticate: nobody without a key makes a page; encrypt: nor reads one, nor its name"),
        Allowed(listed(MODES)),
        one_of(*MODES),
    ]
    keys: Annotated[
        tuple[SealKeyReference, ...],
        Field(description="keys, by reference; pages of each are read"),
        Allowed(_KEYS_ALLOWED),
        checked(_keys),
        WithJsonSchema(
            {
                "type": "array",
                "minItems": 1,
                "items": {
                    "type": "object",
                    "properties": {"id": {"type": "string"}, "file": {"type": "string"}, "env": {"type": "string"}},
                    "required": ["id"],
                    "additionalProperties": False,
                },
            }
        ),
    ]
    write_with: Annotated[
        str | None,
        Field(description="the id of the key of new pages; left out: the only one"),
        Allowed("the id of one of the keys"),
    ] = None

    @model_validator(mode="after")
    def _one_key_writes(self) -> SealConfig:
        ids = [key.id for key in self.keys]
        if self.write_with is None and len(ids) > 1:
            raise as_pydantic_error(ConfigError(".write_with", "several keys: one of them has to write", listed(ids)))
        if self.write_with is not None and self.write_with not in ids:
            problem = f"{shown(self.write_with)} is no key{did_you_mean(self.write_with, ids)}"
            raise as_pydantic_error(ConfigError(".write_with", problem, listed(ids)))
        return self

    def opened(self, key: str) -> Seal:
        """The seal with its keys, read now. ``key``: the key path of this mapping, for errors.

        Raises ConfigError for a secret that is not there or too short, MissingPackageError.
        """
        try:
            need("cryptography")
        except MissingPackageError as error:
            raise ConfigError(key, str(error)) from None
        # Not before a tier is opened: it imports numpy.
        from hicache_ext.page.transforms.sealing import Seal, SealKey, SealMode

        found = []
        for number, reference in enumerate(self.keys):
            place = f"{key}.keys[{number}]"
            text = replace(reference.secret, key=place).reveal()
            if len(text) < SHORTEST_SECRET:
                allowed = f"at least {SHORTEST_SECRET} characters that nobody can guess, as of: openssl rand -base64 32"
                raise ConfigError(place, "the key is too short", allowed)
            found.append(SealKey(reference.id, text))
        writes = self.write_with or self.keys[0].id
        found.sort(key=lambda one: one.id != writes)
        return Seal(SealMode[self.mode.upper()], tuple(found))

"""The mapping ``seal`` of a tier: pages that only holders of a key can make, or read (docs/security.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, WithJsonSchema, model_validator

from hicache_ext.config.problems import did_you_mean, kind_of, listed
from hicache_ext.config.schema import Allowed, ConfigModel, as_pydantic_error, checked
from hicache_ext.config.secrets import Secret
from hicache_ext.errors import ConfigError, MissingPackageError
from hicache_ext.packages import need
from hicache_ext.page.transforms.header import SHORTEST_SECRET, is_key_id

if TYPE_CHECKING:
    from hicache_ext.page.transforms.sealing import Seal

MODES = ("authenticate", "encrypt")

_ID_ALLOWED = "1 to 16 letters, digits, dots, dashes and underscores"
_WRITE_WITH_ALLOWED = "the id of one of the keys"
_KEYS_ALLOWED = "a list of keys such as [{id: a, file: /etc/hicache/seal-a}], each with an id and one of file and env"


_SECRET_ALLOWED = (
    f"one line of at least {SHORTEST_SECRET} characters that nobody can guess, as of: openssl rand -base64 32"
)
_FEWEST_CHARACTERS = 8
"""Different ones in a key. 32 random hex digits have fewer once in 30 million."""
_NO_PART_OF_A_KEY = {
    "\ufeff": "a byte order mark",
    "\0": "a NUL",
    "\n": "more than one line",
    "\r": "more than one line",
}


@dataclass(slots=True, unsafe_hash=True, repr=False)
class SealKeyReference(Secret):
    """One key: its id, and where its secret is found."""

    id: str = ""

    def reference(self) -> dict[str, str]:
        return {"id": self.id, self.kind: self.name}

    def reveal(self) -> str:
        """The key, read now. Raises ConfigError also for a text of which an editor or a shell would make another key
        unseen, and for one that can be guessed."""
        text = Secret.reveal(self)
        odd = next((what for part, what in _NO_PART_OF_A_KEY.items() if part in text), None)
        if odd is None and text != text.strip():
            odd = "a blank at its beginning or its end"
        if odd is None and not text.isprintable():
            odd = "a character that cannot be seen"
        if odd is not None:
            raise ConfigError(self.key, f"it is not exactly one key: it has {odd}", _SECRET_ALLOWED)
        if len(text) < SHORTEST_SECRET:
            raise ConfigError(self.key, "the key is too short", _SECRET_ALLOWED)
        if len(set(text)) < _FEWEST_CHARACTERS or text in (text + text)[1:-1]:
            problem = "the key can be guessed: it has few different characters, or repeats itself"
            raise ConfigError(self.key, problem, _SECRET_ALLOWED)
        return text


def _refuse(value: object, allowed: str, more: str = "") -> ConfigError:
    """Never repeats the value: somebody may write a key into any place of a seal."""
    return ConfigError("", f"{kind_of(value)} is not accepted{more}", allowed)


def _mode(value: object) -> object:
    if isinstance(value, str) and value in MODES:
        return value
    raise _refuse(value, listed(MODES), did_you_mean(value, MODES) if isinstance(value, str) else "")


def _write_with(value: object) -> object:
    if value is None or isinstance(value, str):
        return value
    raise _refuse(value, _WRITE_WITH_ALLOWED)


def _keys(value: object) -> tuple[SealKeyReference, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise _refuse(value, _KEYS_ALLOWED)
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
            key = SealKeyReference.parse({key: value for key, value in given.items() if key != "id"})
        except ConfigError as error:
            raise ConfigError(f"[{number}]", error.problem, error.allowed) from None
        found.append(SealKeyReference(key.kind, key.name, id=id))
    return tuple(found)


class SealConfig(ConfigModel):
    """``seal`` of one tier."""

    required_because: ClassVar[Mapping[str, str]] = {"mode": "a seal needs a mode", "keys": "a seal needs a key"}

    mode: Annotated[
        Literal["authenticate", "encrypt"],
        Field(description="authenticate: nobody without a key makes a page; encrypt: nor reads one, nor its name"),
        Allowed(listed(MODES)),
        checked(_mode),
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
        Allowed(_WRITE_WITH_ALLOWED),
        checked(_write_with),
    ] = None

    @model_validator(mode="before")
    @classmethod
    def _no_key_is_a_name(cls, values: object) -> object:
        """A name that is near to none of ours may be a key, and is not repeated."""
        for name in values if isinstance(values, Mapping) else ():
            if name not in cls.model_fields and not (isinstance(name, str) and did_you_mean(name, cls.model_fields)):
                raise as_pydantic_error(ConfigError("", "unknown key", listed(cls.model_fields)))
        return values

    @model_validator(mode="after")
    def _one_key_writes(self) -> SealConfig:
        ids = [key.id for key in self.keys]
        if self.write_with is None and len(ids) > 1:
            raise as_pydantic_error(ConfigError(".write_with", "several keys: one of them has to write", listed(ids)))
        if self.write_with is not None and self.write_with not in ids:
            problem = f"{kind_of(self.write_with)} that is no id of a key{did_you_mean(self.write_with, ids)}"
            raise as_pydantic_error(ConfigError(".write_with", problem, listed(ids)))
        return self

    def opened(self, key: str) -> Seal:
        """The seal with its keys, read now. ``key``: the key path of this mapping, for errors.

        Raises ConfigError for a secret that is not there or no key, MissingPackageError.
        """
        try:
            need("cryptography")
        except MissingPackageError as error:
            raise ConfigError(key, str(error)) from None
        # Not before a tier is opened: it imports numpy.
        from hicache_ext.page.transforms.sealing import Seal, SealKey, SealMode

        found = [
            SealKey(reference.id, replace(reference, key=f"{key}.keys[{number}]").reveal())
            for number, reference in enumerate(self.keys)
        ]
        writes = self.write_with or self.keys[0].id
        found.sort(key=lambda one: one.id != writes)
        return Seal(SealMode[self.mode.upper()], tuple(found))

"""Secrets by reference: the configuration names an environment variable or a file, never the value.

SGLang returns the configuration over HTTP and prints it at startup, so a password written into it is leaked.

The second part is the mapping ``seal`` of a tier. Its keys are secrets, and only their holders can create, or read,
the tier's pages (docs/security.md).
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import core_schema

from hicache_ext.config.problems import did_you_mean, listed, quoted
from hicache_ext.config.schema import Allowed, ConfigModel
from hicache_ext.config.values import expand_templates, format_size, from_list, is_environment_name
from hicache_ext.errors import ConfigError, MissingPackageError
from hicache_ext.packages import need
from hicache_ext.page.transforms.header import SHORTEST_SECRET, is_key_id

if TYPE_CHECKING:
    from hicache_ext.page.transforms.sealing import Seal


SECRET_ALLOWED = "{env: NAME} or {file: /path}"

_LARGEST_SECRET = 64 * 1024
_KINDS = ("env", "file")


@dataclass(slots=True, unsafe_hash=True, repr=False)
class Secret:
    """A reference to a secret value, which ``reveal()`` reads anew each time and which is stored nowhere.

    ``kind`` is "env" or "file", ``name`` the variable or the path. ``key`` is the full key path, for errors; it is set
    while the configuration is loaded. May be used as the type of a field of a tier.
    """

    kind: str
    name: str
    key: str = field(default="", compare=False)

    @classmethod
    def parse(cls, value: object, key: str = "") -> Secret:
        """Parse ``{env: NAME}`` or ``{file: /path}``. Raises ``ConfigError``, without the value, for anything else."""
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
        # These two sentences do not repeat the name: a password put here by mistake must not be printed.
        if kind == "env" and not (isinstance(name, str) and is_environment_name(name)):
            raise ConfigError(key, "env does not hold the name of an environment variable", SECRET_ALLOWED)
        if kind == "file":
            if not isinstance(name, str) or not name.startswith(("/", "{")) or "\0" in name:
                raise ConfigError(key, "file does not hold an absolute path", SECRET_ALLOWED)
            name = expand_templates(name, key)
            if not os.path.isabs(name):
                raise ConfigError(key, "file does not hold an absolute path", SECRET_ALLOWED)
        return cls(kind, name, key)

    def reveal(self) -> str:
        """Read and return the secret value, which is valid UTF-8; one newline at the end of a file is dropped.

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
            # Environment bytes that are not UTF-8 arrive as surrogates.
            value.encode()
        except UnicodeEncodeError:
            # "from None" and no detail: the original error carries the secret.
            raise ConfigError(self.key, f"the environment variable {self.name} is not UTF-8 text") from None
        return value

    def _read_file(self) -> str:
        try:
            return text_of(self.name, _LARGEST_SECRET).removesuffix("\n").removesuffix("\r")
        except ConfigError as error:
            raise ConfigError(self.key, f"the file {quoted(self.name)} {error.problem}") from None

    def __repr__(self) -> str:
        return f"Secret({self.kind}={quoted(self.name)})"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(cls.parse)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"description": SECRET_ALLOWED}


def text_of(path: str, most: int) -> str:
    """Read a plain file of up to ``most`` bytes. Raises ConfigError with an empty key and without any of the text."""
    try:
        # Without O_NONBLOCK, opening a pipe without a writer would hang.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise ConfigError("", "cannot be read (it is no plain file)")
            with open(fd, "rb", closefd=False) as file:
                raw = file.read(most + 1)
        finally:
            os.close(fd)
    except OSError as error:
        raise ConfigError("", f"cannot be read ({error.strerror or type(error).__name__})") from None
    if len(raw) > most:
        raise ConfigError("", f"is larger than {format_size(most)}")
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        # "from None" and no detail: the original error carries the bytes of a secret.
        raise ConfigError("", f"is not UTF-8 text in line {raw.count(10, 0, error.start) + 1}") from None


SecretOrNone = Annotated[Secret | None, Allowed(SECRET_ALLOWED)]
"""The type of a key that holds a secret, or is left out."""


# -- keys of seals -----------------------------------------------------------------------------------------------------


_ID_ALLOWED = "1 to 16 letters, digits, dots, dashes and underscores"
_KEYS_ALLOWED = "a list of keys such as [{id: a, file: /etc/hicache/seal-a}], each with an id and one of file and env"


_SECRET_ALLOWED = (
    f"one line of at least {SHORTEST_SECRET} characters that nobody can guess, as of: openssl rand -base64 32"
)
_FEWEST_CHARACTERS = 8
"""Minimum distinct characters in a key. 32 random hex digits have fewer once in 30 million."""
_ONE_KEY = re.compile(r"[!-~](?:[ -~]*[!-~])?")
"""Printable ASCII without outer blanks: editors and shells could silently change any other key."""


@dataclass(slots=True, unsafe_hash=True, repr=False)
class SealKeyReference(Secret):
    """One key: its id and the reference to its secret."""

    id: str = ""

    @classmethod
    def parse(cls, value: object, key: str = "") -> SealKeyReference:
        """Parse a secret reference that also has an ``id``."""
        if isinstance(value, SealKeyReference):
            return value
        if not isinstance(value, Mapping):
            # The sentence does not repeat the value: it may be a key.
            raise ConfigError(key, "a key is never written here: reference it", _KEYS_ALLOWED)
        id = value.get("id")
        if not isinstance(id, str) or not is_key_id(id):
            raise ConfigError(f"{key}.id", "required, and no such id is accepted", _ID_ALLOWED)
        found = Secret.parse({name: value for name, value in value.items() if name != "id"}, key)
        return cls(found.kind, found.name, key, id)

    def reveal(self) -> str:
        """Read and return the key. Raises ConfigError also for text that is not exactly one key, or is guessable."""
        text = Secret.reveal(self)
        if not _ONE_KEY.fullmatch(text):
            problem = "it is not exactly one key: one line of printable ASCII, without blanks or marks around it"
            raise ConfigError(self.key, problem, _SECRET_ALLOWED)
        if len(text) < SHORTEST_SECRET:
            raise ConfigError(self.key, "the key is too short", _SECRET_ALLOWED)
        if len(set(text)) < _FEWEST_CHARACTERS or text in (text + text)[1:-1]:
            problem = "the key can be guessed: it has few different characters, or repeats itself"
            raise ConfigError(self.key, problem, _SECRET_ALLOWED)
        return text


def _distinct(keys: tuple[SealKeyReference, ...]) -> tuple[SealKeyReference, ...]:
    ids = [key.id for key in keys]
    for number, id in enumerate(ids):
        if id in ids[:number]:
            raise ConfigError(f"[{number}].id", f"two keys have the id {id}")
    return keys


class SealConfig(ConfigModel):
    """``seal`` of one tier."""

    shows_values: ClassVar[bool] = False
    removed: ClassVar[Mapping[str, str]] = {"write_with": "the first of keys writes, so put that one first"}

    mode: Literal["authenticate", "encrypt"]
    """authenticate: nobody without a key makes a page; encrypt: nor reads one, nor its name"""
    keys: Annotated[
        tuple[SealKeyReference, ...], from_list, Field(min_length=1), AfterValidator(_distinct), Allowed(_KEYS_ALLOWED)
    ]
    """keys, by reference; pages of each are read, and new ones are written with the first"""

    @model_validator(mode="before")
    @classmethod
    def _no_key_is_a_name(cls, values: object) -> object:
        """Refuse unknown names without repeating them unless they are close to a known name: they may be keys."""
        for name in values if isinstance(values, Mapping) else ():
            known = name in cls.model_fields or name in cls.removed
            if not known and not (isinstance(name, str) and did_you_mean(name, cls.model_fields)):
                raise ConfigError("", "unknown key", listed(cls.model_fields))
        return values

    def opened(self, key: str) -> Seal:
        """Return the seal with its keys, which are read now. ``key`` is the key path of this mapping, for errors.

        Raises ConfigError for a secret that is missing or not a key, and MissingPackageError.
        """
        try:
            need("cryptography")
        except MissingPackageError as error:
            raise ConfigError(key, str(error)) from None
        # Imported only when a tier is opened, because it imports numpy.
        from hicache_ext.page.transforms.sealing import Seal, SealKey, SealMode

        found = [
            SealKey(reference.id, replace(reference, key=f"{key}.keys[{number}]").reveal())
            for number, reference in enumerate(self.keys)
        ]
        return Seal(SealMode[self.mode.upper()], tuple(found))

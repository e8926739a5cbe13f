"""``load_config``: turns what SGLang or an operator provides into the checked configuration."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import yaml
from pydantic import BaseModel, ValidationError

from hicache_ext.config.model import ExtraConfig, HicacheExtConfig
from hicache_ext.config.problems import config_error, key_path, kind_of, quoted, shown
from hicache_ext.config.schema import as_config_error
from hicache_ext.config.secrets import Secret, text_of
from hicache_ext.errors import ConfigError

Source = Mapping[str, Any] | str | os.PathLike[str]
"""A mapping (SGLang's ``extra_config``), a path, or the launch flag's text: ``@path`` or inline JSON."""


def load_config(source: Source) -> HicacheExtConfig:
    """Return the section ``hicache_ext`` of ``source``, checked and resolved on this node.

    Raises ``ConfigError`` with one sentence for each place that is wrong: the full key path, what was wrong and what is
    allowed. What does not fit together is said once each value is right by itself. Call it at start; it reads files and
    environment variables.
    """
    return load_document(source).hicache_ext


def load_document(source: Source) -> ExtraConfig:
    """Return the whole document: like ``load_config``, but with SGLang's own keys around the section."""
    return check_document(read_document(source))


def read_document(source: Source) -> Mapping[str, Any]:
    """Parse and return the raw document in ``source``, unchecked and with templates unexpanded."""
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
    """Check ``document`` and resolve it on this node."""
    if errors := list(misread(document)):
        raise config_error(errors)
    try:
        checked = ExtraConfig.model_validate(dict(document))
    except ValidationError as error:
        # "from None": pydantic's error repeats its input and must not reach a log.
        raise as_config_error(error) from None
    for location, secret in secrets_in(checked):
        secret.key = key_path(location)
    return checked


def secrets_in(value: object, location: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Secret]]:
    """Yield every ``Secret`` in a configuration with its location."""
    if isinstance(value, Secret):
        yield location, value
    elif isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from secrets_in(getattr(value, name), (*location, name))
    elif isinstance(value, dict | tuple):
        steps: Iterable[tuple[str | int, object]] = value.items() if isinstance(value, dict) else enumerate(value)
        for step, below in steps:
            yield from secrets_in(below, (*location, step))


INLINE = "inline JSON"
EXTENSIONS_ALLOWED = ".json, .yaml, .yml, .toml"

_LARGEST_FILE = 1024 * 1024
_PUNCTUATION = re.compile(r".|\\.|<[a-z ]*>")
_QUOTED_WORD = re.compile(r" ?'([^']*)'")
_TOML_PLACE = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)$")


def read_file(path: Path) -> dict[str, Any]:
    """Read the mapping in a .json, .yaml, .yml or .toml file."""
    name, language = str(path), _LANGUAGES.get(path.suffix.lower())
    # Checked without opening it: it may be a pipe.
    if language is None and path.exists() and not path.is_dir():
        found = f"unknown file extension {quoted(path.suffix)}" if path.suffix else "the file has no extension"
        raise ConfigError(name, found, EXTENSIONS_ALLOWED)
    try:
        text = text_of(name, _LARGEST_FILE)
    except ConfigError as error:
        raise ConfigError(name, error.problem) from None
    return read_text(text, name, language)


def read_text(text: str, name: str, language: str | None = None) -> dict[str, Any]:
    """Parse the mapping in ``text``; ``language`` defaults to JSON if it starts with a brace, else to YAML."""
    language = language or ("JSON" if text.lstrip().startswith("{") else "YAML")
    if not text.strip():
        raise ConfigError(name, "is empty")
    try:
        document = _PARSERS[language](text)
    except RecursionError:
        raise ConfigError(name, "is nested too deeply") from None
    except ConfigError as error:
        raise ConfigError(name, error.problem) from None
    except (ValueError, IndexError, yaml.YAMLError) as error:
        raise ConfigError(name, f"not valid {language}{_what_is_wrong(error)}") from None
    if document is None:
        raise ConfigError(name, "is empty")
    if not isinstance(document, dict):
        raise ConfigError(name, f"holds {kind_of(document)}, not a mapping")
    if errors := list(misread(document)):
        raise config_error(errors)
    return document


def misread(document: Mapping[Any, Any]) -> Iterator[ConfigError]:
    """Yield an error, in file order, for everything that YAML reads differently from what was meant: keys that are not
    text (on, 1, 2024-01-01) and numbers that it does not read in base 10."""
    waiting: list[tuple[tuple[Any, ...], object]] = [((), document)]
    seen: set[int] = set()
    while waiting:
        location, value = waiting.pop()
        if isinstance(value, _Misread):
            # The number is not shown: it may be a secret.
            yield ConfigError(key_path(location), f"YAML reads this number in {value.base}", _NUMBER_ALLOWED)
        elif isinstance(value, Mapping | list | tuple) and id(value) not in seen:  # an alias, maybe to its own parent
            seen.add(id(value))
            pairs = list(value.items() if isinstance(value, Mapping) else enumerate(value))
            for key, _ in pairs if isinstance(value, Mapping) else ():
                if not isinstance(key, str):
                    yield ConfigError(key_path(location), f"{shown(key)} is used as a key; put it in quotes", "text")
            waiting += [((*location, key), below) for key, below in reversed(pairs) if isinstance(key, str | int)]


def _what_is_wrong(error: Exception) -> str:
    """Describe what a parser found, and where, without quoting the text, which may contain secrets."""
    if isinstance(error, json.JSONDecodeError):
        return f" in line {error.lineno}: {error.msg}"
    if isinstance(error, tomllib.TOMLDecodeError):
        place = _TOML_PLACE.search(str(error))
        where = f" in line {place[1]}" if place and place[1] else " at the end" if place else ""
        return f"{where}: {_TOML_PLACE.sub('', str(error))}"
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        # Drop the alias, tag or anchor that PyYAML quotes: ``password: *hunter2`` is an unknown alias.
        problem = _QUOTED_WORD.sub(lambda word: word[0] if _PUNCTUATION.fullmatch(word[1]) else "", error.problem or "")
        return f"{f' in line {mark.line + 1}' if mark else ''}: {problem}"
    if isinstance(error, yaml.YAMLError):
        return ": it holds characters that YAML does not allow"
    return ": a number or date is out of range"


def _json_of(text: str) -> object:
    def mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ConfigError("", f"the key {quoted(key)} is written twice in one mapping")
            found[key] = value
        return found

    def constant(word: str) -> NoReturn:
        raise ConfigError("", f"not valid JSON: {word} is not a number")

    return json.loads(text, object_pairs_hook=mapping, parse_constant=constant)


class _Misread(int):
    """A number that YAML 1.1 reads in octal or base 60: ``ttl: 010`` would be 8 seconds, ``ttl: 1:30`` 90."""

    base: str


class _YamlLoader(yaml.SafeLoader):
    """Refuses duplicate keys in a mapping, of which YAML would take the last, and marks misread numbers."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and not key.tag.endswith(":merge"):
                line = key.start_mark.line + 1
                if key.value in lines:
                    first = lines[key.value]
                    raise ConfigError("", f"the key {quoted(key.value)} in line {line} is already set in line {first}")
                lines[key.value] = line
        return node

    def construct_number(self, node: yaml.ScalarNode) -> object:
        number = self.construct_yaml_int(node) if node.tag.endswith(":int") else self.construct_yaml_float(node)
        if ":" not in node.value and not _OCTAL.fullmatch(node.value):
            return number
        misread = _Misread(number)
        misread.base = "base 60" if ":" in node.value else "octal"
        return misread


for _kind in ("int", "float"):
    _YamlLoader.add_constructor(f"tag:yaml.org,2002:{_kind}", _YamlLoader.construct_number)


_NUMBER_ALLOWED = "a decimal number without a leading 0, one with a unit such as 90s, or text in quotes"
_OCTAL = re.compile(r"[-+]?0[0-7_]+")


_PARSERS: dict[str, Callable[[str], object]] = {
    "JSON": _json_of,
    "YAML": lambda text: yaml.load(text, _YamlLoader),
    "TOML": tomllib.loads,
}
_LANGUAGES = {".json": "JSON", ".yaml": "YAML", ".yml": "YAML", ".toml": "TOML"}

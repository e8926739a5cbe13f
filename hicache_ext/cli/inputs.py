"""The inputs of commands: configurations, prompts, and what a request has besides its tokens."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hicache_ext.cli.output import argument
from hicache_ext.config import load_config, read_document
from hicache_ext.config.load import read_text
from hicache_ext.errors import ConfigError, StoreError
from hicache_ext.page.hashes import namespace_seed, namespaced_extra_key
from hicache_ext.page.transforms.forms import Transforms
from hicache_ext.runtime.whole_file import json_in
from hicache_ext.storage.tiers.file.config import FileTierConfig

FILE_HELP = "a .json, .yaml, .yml or .toml file, '-' for standard input, or inline JSON"

_DIGEST = re.compile(r"[0-9a-f]{32}")


def read_configuration(file: str) -> Mapping[str, Any]:
    """Return the raw document in a file, in inline JSON, or on standard input ('-'). Raises ConfigError."""
    return read_text(read_input(file, "standard input"), "standard input") if file == "-" else read_document(file)


NAMESPACE = (
    argument("--extra-key", metavar="TEXT", help="the requests' extra_key, where they have one"),
    argument("--cache-salt", metavar="TEXT", help="the requests' cache_salt, where they have one"),
    argument("--adapter", metavar="DIGEST", help="of the requests' LoRA adapter: the server logs it when it loads one"),
)
MODEL = argument("--model", metavar="PATH", help="whose tokenizer makes token ids of the prompt")
PROMPTS = (
    argument(
        "--tokens", metavar="FILE", help="token ids: numbers, or JSON (a list, or a list of lists); '-': standard input"
    ),
    argument("--prompt", metavar="FILE", help="text as the server gets it; needs --model and the package transformers"),
)
"""One of them."""


def prompts_of(arguments: argparse.Namespace) -> list[list[int]]:
    """Return the token ids of each prompt. Raises ConfigError."""
    if arguments.tokens is not None:
        return parse_tokens(read_input(arguments.tokens, "--tokens"), "--tokens")
    text = read_input(arguments.prompt, "--prompt")
    if arguments.model is None:
        raise ConfigError("--model", "--prompt needs a tokenizer", "the directory or name of the model, or --tokens")
    return [list(tokenizer_of(arguments.model).encode(text))]


def tokenizer_of(model: str) -> Any:
    """Load the tokenizer of a model, by directory or name. Raises ConfigError."""
    if find_spec("torch") is not None:
        from hicache_ext.testing.sglang_cpu import declare_torchvision_operators

        declare_torchvision_operators()  # transformers imports torchvision for some models
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model)
    except Exception as error:  # noqa: BLE001 - a tokenizer may raise anything; the user gets its first line
        problem = unusable_model(model) or (
            f"no tokenizer could be loaded from {model!r}: {(str(error) or type(error).__name__).splitlines()[0]}"
        )
        raise ConfigError("--model", problem, "the directory or name of the model") from None


def unusable_model(model: str) -> str | None:
    """Say why no tokenizer can be in it, as far as can be seen from here; transformers takes a directory that is not
    there for a name."""
    path = Path(model)
    if path.is_dir():
        if any(path.glob("*token*")) or any(path.glob("vocab*")):
            return None
        return f"{model!r} holds no tokenizer (tokenizer.json, tokenizer_config.json, ...)"
    if path.exists():
        return f"{model!r} is a file"
    return f"{model!r}: there is no such directory" if model.startswith(("/", ".", "~")) else None


def seed_of(arguments: argparse.Namespace) -> bytes:
    """Return the seed of the chain of page hashes. Raises ConfigError."""
    adapter = arguments.adapter or ""
    if adapter and not _DIGEST.fullmatch(adapter):
        raise ConfigError("--adapter", f"{adapter!r} is not an adapter digest", "32 hexadecimal digits")
    return namespace_seed(namespaced_extra_key(arguments.extra_key, adapter), arguments.cache_salt)


@dataclass(frozen=True, slots=True)
class Target:
    """Directories of the file tier that a command is about."""

    directories: list[Path]
    tier: str | None = None
    """Its name, and ``capacity`` in bytes, and ``ttl`` in seconds, where a configuration tells them."""
    capacity: int | None = None
    ttl: float | None = None
    transforms: Transforms | None = None
    """The transforms of its pages, which a directory alone does not tell."""
    tenants: Sequence[str] = ()


TARGET = argument(
    "target", metavar="CONFIG|DIRECTORY", help="a configuration file (all paths of its file tiers), or one of them"
)


def targets(named: str, *, keys: bool = False) -> list[Target]:
    """The file tiers of a configuration, or the one directory that was named. ``keys``: with ``transforms``, for which
    the keys of seals are read. Raises ConfigError, StoreError."""
    if Path(named).is_dir():
        return [Target([Path(named)])]
    if not named.lstrip().startswith("{") and not Path(named.removeprefix("@")).exists():
        raise StoreError(f"{named!r}: there is no such directory or configuration file")
    config = load_config(named)
    tenants, found = tuple(config.tenant_limits or ()), []
    for name, tier in config.tiers.items():
        if isinstance(tier, FileTierConfig):
            transforms = tier.transforms(name) if keys else None
            found.append(Target(list(map(Path, tier.path)), name, tier.capacity, tier.ttl, transforms, tenants))
    if not found:
        raise ConfigError("hicache_ext.tiers", f"{named!r} has no tier of type file")
    return found


def read_input(file: str, key: str) -> str:
    """Read the text of a file, or of standard input for "-". Raises ConfigError naming ``key``."""
    try:
        if file != "-":
            return Path(file).read_text("utf-8")
        # Always UTF-8, regardless of the locale.
        raw = getattr(sys.stdin, "buffer", None)
        return sys.stdin.read() if raw is None else str(raw.read(), "utf-8")
    except UnicodeDecodeError:
        raise ConfigError(key, f"{file!r} is not UTF-8 text") from None
    except OSError as error:
        raise ConfigError(key, f"{file!r} cannot be read: {error.strerror or error}") from None


def parse_tokens(text: str, key: str) -> list[list[int]]:
    """The prompts in a text: JSON (a list, or a list of lists) or bare numbers. Raises ConfigError naming ``key``."""
    allowed = "token ids: numbers with blanks or commas between them, a JSON list, or a JSON list of lists"
    stripped = text.strip()
    if not stripped:
        raise ConfigError(key, "the file is empty", allowed)
    try:
        if not stripped.startswith("["):
            return [[int(word) for word in stripped.replace(",", " ").split()]]
        value = json_in(stripped)
    except ValueError:
        raise ConfigError(key, "not a list of token ids", allowed) from None
    prompts: list[Any] = value if value and all(isinstance(item, list) for item in value) else [value]
    for prompt in prompts:
        if not prompt or not all(isinstance(token, int) and not isinstance(token, bool) for token in prompt):
            raise ConfigError(key, "not a list of token ids", allowed)
    return prompts

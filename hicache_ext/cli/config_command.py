"""``hicache-ext config``: check a configuration, print one to paste, print its schema."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from hicache_ext.cli.inputs import read_configuration
from hicache_ext.config import (
    ExtraConfig,
    HicacheExtConfig,
    ServerRole,
    check_document,
    example_config,
    format_duration,
    json_schema,
)
from hicache_ext.config.load import secrets_in
from hicache_ext.config.render import as_inline_json, as_yaml, launch_flags
from hicache_ext.config.schema import as_config_error
from hicache_ext.config.sources import read_text
from hicache_ext.errors import ConfigError
from hicache_ext.storage.tiering.tier_use import tier_use

_FILE_HELP = "a .json, .yaml, .yml or .toml file, '-' for standard input, or inline JSON"
_RENDERED_FILE = "hicache.yaml"
_LONG_TIMEOUT = 30.0
"""Seconds of a tier's timeout that are a mistake rather."""
_LONGEST_DRAIN = 13.0
"""Seconds: SGLang kills its schedulers 15 s after it asked them to end (0.5.20 to 0.5.23); a close takes one more."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add ``check``, ``render`` and ``schema``."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    check = actions.add_parser("check", help="say whether a configuration is valid, and what it means on this node")
    check.add_argument("file", metavar="FILE", help=_FILE_HELP)
    check.set_defaults(run=_check)

    render = actions.add_parser(
        "render",
        help="print a complete configuration and the launch flags",
        description="Print FILE, or a configuration of one file tier made from the options; an example with neither.",
    )
    render.add_argument("file", metavar="FILE", nargs="?", help=_FILE_HELP)
    render.add_argument("--path", action="append", metavar="PATH", help="a directory of the tier; may be repeated")
    render.add_argument("--capacity", metavar="SIZE", help="of the whole tier, e.g. 512GiB, or unlimited")
    render.add_argument("--role", metavar="ROLE", help="prefill, decode or both (default both)")
    render.add_argument("--name", metavar="NAME", help="name of the tier (default disk)")
    render.add_argument("--inline", action="store_true", help="one line of JSON, for SGLang in place of @FILE")
    render.set_defaults(run=_render)

    schema = actions.add_parser("schema", help="print the JSON Schema, for editors")
    schema.set_defaults(run=_schema)


def _check(arguments: argparse.Namespace) -> int:
    file: str = arguments.file
    checked = check_document(read_configuration(file))
    inline = file.lstrip().startswith("{")
    print("OK" if inline else f"OK: {file}")
    print("\n".join(_summary(checked)))
    for note in _notes(checked, inline):
        print(f"note: {note}")
    return 0


def _render(arguments: argparse.Namespace) -> int:
    options = [arguments.path, arguments.capacity, arguments.role, arguments.name]
    document: Mapping[str, Any]
    if arguments.file is not None:
        if any(option is not None for option in options):
            raise ConfigError("", "FILE cannot be combined with --path, --capacity, --role or --name", "one of them")
        file, document = arguments.file, read_configuration(arguments.file)
    elif any(option is not None for option in options):
        file, document = _RENDERED_FILE, _from_options(arguments)
    else:
        file, document = _RENDERED_FILE, read_text(example_config(), "the example")
    # Checked as at a start, printed as written: templates are expanded by the node that reads the file.
    role = check_document(document).hicache_ext.role
    if arguments.inline:
        print(as_inline_json(document))
    elif document == read_text(example_config(), "the example"):
        print(example_config(), end="")
    else:
        print(f"# launch flags: {launch_flags(_file_to_name(file), role)}")
        print(as_yaml(document), end="")
    return 0


def _schema(arguments: argparse.Namespace) -> int:
    print(json.dumps(json_schema(), indent=2))
    return 0


def _file_to_name(file: str) -> str:
    """The file named in the printed flags: the given one, or the one to which the output goes."""
    return _RENDERED_FILE if file == "-" or file.lstrip().startswith("{") else file.removeprefix("@")


def _from_options(arguments: argparse.Namespace) -> dict[str, Any]:
    if not arguments.path or arguments.capacity is None:
        raise ConfigError("", "--path and --capacity are both needed to make a tier", "--path PATH --capacity SIZE")
    # A relative path is relative to where this command runs; the server runs elsewhere. A path that begins with a
    # template is left as it is.
    paths = [path if path.startswith("{") else os.path.abspath(path) for path in arguments.path]
    path = paths if len(paths) > 1 else paths[0]
    name = arguments.name or "disk"
    capacity = int(arguments.capacity) if arguments.capacity.isdecimal() else arguments.capacity
    return ExtraConfig.around(
        {
            "role": "both" if arguments.role is None else arguments.role,
            "tiers": {name: {"type": "file", "path": path, "capacity": capacity}},
            "retrieve_locations": [name],
            "store_locations": [name],
        }
    )


def _summary(checked: ExtraConfig) -> Iterator[str]:
    config = checked.hicache_ext
    use = tier_use(config)
    yield f"  role: {config.role}"
    for name, tier in config.tiers.items():
        needed = "" if tier.required else " (not required)"
        yield f"  tier {name}: {tier.summary()}{needed}, {tier.sharing()}"
    yield f"  retrieve from: {', '.join(config.retrieve_locations) or 'nowhere'}"
    yield f"  store to: {use.store_words()}"
    yield f"  promote to: {use.promotion_words()}"
    for name in config.roles if config.role == "auto" else ():
        view = config.for_role(name)
        use = tier_use(view)
        retrieve = ", ".join(view.retrieve_locations) or "nowhere"
        yield f"  as {name}: retrieve from {retrieve}, store to {use.store_words()}, promote to {use.promotion_words()}"


def _notes(checked: ExtraConfig, inline: bool) -> Iterator[str]:
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

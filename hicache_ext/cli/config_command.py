"""``hicache-ext config``: check a configuration, print one to paste, print its schema."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from hicache_ext.cli.inputs import FILE_HELP, read_configuration
from hicache_ext.cli.output import argument, command, show
from hicache_ext.config import ExtraConfig, HicacheExtConfig, ServerRole, check_document, format_duration
from hicache_ext.config.load import read_text, secrets_in
from hicache_ext.config.model import SECTION
from hicache_ext.config.render import (
    as_inline_json,
    as_yaml,
    chosen_flags,
    example_config,
    json_schema,
    launch_lines,
    linker_config,
)
from hicache_ext.errors import ConfigError
from hicache_ext.runtime.commands import print_json
from hicache_ext.storage.tiering.tier_use import tier_use


def config_command(parser: argparse.ArgumentParser) -> None:
    """Add ``check``, ``render`` and ``schema``."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    _check(actions.add_parser("check", help="say whether a configuration is valid, and what it means on this node"))
    what = "Print FILE, or a configuration made of the options (they can be combined), or an example with neither."
    helped = "print a complete configuration and how to launch SGLang with it"
    _render(actions.add_parser("render", help=helped, description=what))
    _schema(actions.add_parser("schema", help="print the JSON Schema, for editors"))


@command(examples=["> hicache-schema.json"], problem="")
def _schema(_: argparse.Namespace) -> int:
    print_json(json_schema())
    return 0


@command(argument("file", metavar="FILE", help=FILE_HELP), examples=["hicache.yaml"], problem="")
def _check(arguments: argparse.Namespace) -> int:
    file: str = arguments.file
    inline = file.lstrip().startswith("{")
    try:
        checked = check_document(read_configuration(file))
        notes = [f"{about}: {words}" for about, words in notes_on(checked, inline)]
        lines = ["OK" if inline else f"OK: {file}", *_summary(checked), *(f"note: {note}" for note in notes)]
        document = {"ok": True, "problems": [], "notes": notes, **_document(checked)}
    except ConfigError as error:
        # What is wrong is what this command is there to find.
        if not arguments.json:
            raise
        problems = [{"key": one.key, "problem": one.problem, "allowed": one.allowed} for one in error.errors]
        print_json({"ok": False, "problems": problems})
        return 2
    show(arguments, document, lines)
    return 0


def _document(checked: ExtraConfig) -> dict[str, Any]:
    """Return what the configuration means on this node, for ``--json``."""
    config = checked.hicache_ext
    views = {name: config.for_role(name) for name in config.roles} if config.role == "auto" else {}
    return {
        "role": config.role,
        "tiers": [
            {"tier": name, "type": tier.type, "summary": tier.summary(), "required": tier.required}
            | {"shared": (sharing := tier.sharing()).shared, "because": sharing.reason}
            for name, tier in config.tiers.items()
        ],
        **_use(config),
        "roles": {name: _use(view) for name, view in views.items()},
    }


def _use(config: HicacheExtConfig) -> dict[str, Any]:
    use = tier_use(config)
    return {
        "retrieve_locations": list(config.retrieve_locations),
        "store_locations": list(config.store_locations),
        "store_policies": {name: policy for name, (policy, _) in use.policies.items()},
        "promote_to": use.promote_to,
    }


def _summary(checked: ExtraConfig) -> Iterator[str]:
    config = checked.hicache_ext
    yield f"  role: {config.role}"
    for name, tier in config.tiers.items():
        needed = "" if tier.required else " (not required)"
        yield f"  tier {name}: {tier.summary()}{needed}, {tier.sharing()}"
    views = {f"as {name}: ": config.for_role(name) for name in config.roles} if config.role == "auto" else {}
    for who, view in {"": config, **views}.items():
        use = tier_use(view)
        yield f"  {who}retrieve from: {', '.join(view.retrieve_locations) or 'nowhere'}"
        yield f"  {who}store to: {use.store_words()}"
        yield f"  {who}promote to: {use.promotion_words()}"


# -- notes -------------------------------------------------------------------------------------------------------------

_LONG_TIMEOUT = 30.0
"""Seconds of a tier's timeout that are a mistake rather."""
_LONGEST_DRAIN = 13.0
"""Seconds: SGLang kills its schedulers 15 s after it asked them to end (0.5.21 to 0.5.23); a close takes one more."""


def notes_on(checked: ExtraConfig, inline: bool) -> Iterator[tuple[str, str]]:
    """Yield what is allowed and hardly meant: what it is about, and what is to be said of that."""
    config = checked.hicache_ext
    if not inline and checked.allocator and config.role != "decode":
        # On a decode node this package's hook reads the file before SGLang builds its pools (sglang/decode_manager.py).
        yield "allocator", "SGLang ignores it in a file; pass the configuration inline to use it"
    if config.tenants is not None and not checked.hicache_storage_pass_prefix_keys:
        words = "what is generated for a tenant is default's, but for what a later prompt brings first"
        yield "tenants", f"{words}; set 'hicache_storage_pass_prefix_keys: true' beside hicache_ext"
    for name, tier in config.tiers.items():
        about = f"tier {name}"
        if config.tenants is not None and getattr(tier, "layout", "slab") == "pages":
            yield about, "tenants have no shares in page files; use 'layout: slab'"
        if name not in (*config.retrieve_locations, *config.store_locations):
            yield about, "it is neither read nor written; name it in a location list"
        if tier.timeout is not None and math.inf > tier.timeout >= _LONG_TIMEOUT:
            words = f"timeout is {format_duration(tier.timeout)}, which a tier that hangs costs a request"
            yield about, f"{words}; a number without unit is seconds, milliseconds are written 200ms"
        if tier.admission == "learned" and tier.sharing().shared:
            words = "it is shared, and 'admission: learned' knows only what this server is asked for"
            yield about, f"{words}; pages that other ones would read may be refused"
        if tier.admission == "learned" and getattr(tier, "capacity", 0) is None:
            yield about, "'admission: learned' refuses nothing where the capacity is unlimited"
    if config.background.drain > _LONGEST_DRAIN:
        words = "SGLang kills its processes 15 s after it told them to end: what is still queued then is lost"
        most = format_duration(_LONGEST_DRAIN)
        yield "background.drain", f"{format_duration(config.background.drain)}, and {words}; use {most} or less"
    for _, secret in secrets_in(checked):
        try:
            secret.reveal()
        except ConfigError as error:
            words = str(error).removeprefix(f"{error.key}: ")
            yield error.key, f"{words}; a server on this node would not reach that tier"
    # What a server of a role would find wrong or useless.
    roles: tuple[ServerRole, ...] = ("prefill", "decode") if config.role == "auto" else (config.role,)
    for role in roles:
        try:
            view = config.for_role(role)
            sharing = tier_use(view).sharing
        except ConfigError as error:
            yield f"role {role}", f"a server of it is refused at its start: {error}"
            continue
        stored = [sharing[name].shared for name in view.store_locations]
        if role == "decode" and config.role != "auto" and stored and not any(stored):
            words = "a decode node that stores in private tiers alone writes what no prefill node can read"
            yield "store_locations", f"{words}; store in a shared one"


# -- render ------------------------------------------------------------------------------------------------------------

_POOLS = {
    "--mooncake": ("mooncake", "master", "HOST:PORT", "the master of a Mooncake Store"),
    "--redis": ("redis", "url", "URL", "Redis or Valkey; repeated: nodes of one cluster"),
    "--s3": ("object", "url", "URL", "s3://, gs:// or az://BUCKET/PREFIX"),
}
"""Option -> type of tier, the key of its address and that in words; in the order in which tiers are read: memory over
RDMA first."""
_WHERE_SECRETS_GO = "the address alone; secrets are named in the file: password: {env: VARIABLE}, and the like"


@command(
    argument("file", metavar="FILE", nargs="?", help=FILE_HELP),
    argument("--path", action="append", metavar="PATH", help="a directory of a file tier; may be repeated"),
    argument("--capacity", metavar="SIZE", help="of the whole file tier, e.g. 512GiB, or unlimited"),
    *(argument(name, action="append", metavar=form, help=f"a pool: {of}") for name, (_, _, form, of) in _POOLS.items()),
    argument(
        "--pd",
        metavar="ROLE",
        help="prefill or decode: a node of a disaggregated pair; both: not disaggregated (default both)",
    ),
    argument("--inline", action="store_true", help="one line of JSON, for SGLang in place of @FILE"),
    argument(
        "--linker",
        action="store_true",
        help="for SGLang's external linker: pages move between the GPU and storage, without a host cache",
    ),
    examples=(
        "--path /mnt/nvme0/hicache --capacity 512GiB > hicache.yaml",
        "--path /mnt/nvme0/hicache --capacity 512GiB --redis rediss://pool:6379",
        "--mooncake 10.0.0.1:50051 --pd decode",
        "--s3 s3://bucket/hicache --json",
        "--path /mnt/nvme0/hicache --capacity 512GiB --linker > hicache.yaml",
    ),
    problem="",
)
def _render(arguments: argparse.Namespace) -> int:
    options = ("--path", "--capacity", *_POOLS, "--pd")
    given = {name: value for name in options if (value := getattr(arguments, name[2:])) is not None}
    document: Mapping[str, Any]
    file = "hicache.yaml"  # to which the output goes, unless a file is given
    if arguments.file is not None:
        if given:
            raise ConfigError("", f"FILE cannot be combined with {', '.join(given)}", "one of them")
        document = read_configuration(arguments.file)
        text = as_yaml(document)
        if arguments.file != "-" and not arguments.file.lstrip().startswith("{"):
            file = arguments.file.removeprefix("@")
    elif given:
        document = _from_options(given)
        text = as_yaml(document)
    else:
        text = example_config()
        document = read_text(text, "the example")
    # Checked as at a start, printed as written: templates are expanded by the node that reads the file.
    checked = check_document(document)
    role = checked.hicache_ext.role
    if arguments.linker and role == "decode":
        problem = "a decode node stores what it generates through HiCache, and its linker would read nothing back"
        raise ConfigError("--linker", problem, "the role prefill or both")
    launch = launch_lines(file, role, linker=arguments.linker)
    for about, words in notes_on(checked, arguments.inline):
        print(f"note: {about}: {words}", file=sys.stderr)
    if arguments.linker or text != example_config():
        heading = [
            f"# Check it on the node that reads it: hicache-ext config check {file}, hicache-ext doctor {file}",
            "# Launch SGLang with:",
            "#   " + " \\\n#     ".join(launch),
            *(f"#   {flag}: {why}" for flag, why in chosen_flags(role, linker=arguments.linker).items()),
        ]
        text = "\n".join(heading) + "\n" + text
    whole = linker_config({SECTION: document[SECTION]}) if arguments.linker else document
    shown = as_inline_json(whole) if arguments.inline else text.rstrip("\n")
    show(arguments, {"file": file, "launch": launch, "document": document, "yaml": text}, [shown])
    return 0


def _from_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration of the options that are given. Raises ConfigError where one lacks another or holds a secret."""
    role, pools = given.get("--pd", "both"), [option for option in _POOLS if option in given]
    if ("--path" in given) != ("--capacity" in given) or not ("--path" in given or pools):
        problem = "--path and --capacity are both needed to make a file tier"
        raise ConfigError("", problem, "--path PATH --capacity SIZE, or --redis, --mooncake or --s3")
    if role == "decode" and "--path" in given and pools:
        problem = "a decode node reads nothing back: its own disk would serve nobody beside a pool"
        raise ConfigError("--path", problem, "the pool alone")
    tiers: dict[str, dict[str, Any]] = {}
    if "--path" in given:
        written: str = given["--capacity"]
        capacity = int(written) if written.isdecimal() else written
        tiers["disk"] = {"type": "file", "path": _paths(given["--path"]), "capacity": capacity}
    for option in pools:
        kind, address, *_ = _POOLS[option]
        # Looked at before anything may repeat it in a sentence.
        if any(sign in written for written in given[option] for sign in "@?"):
            raise ConfigError(option, "an address holds no password, login or options", _WHERE_SECRETS_GO)
        # Servers start without it, and attach it when it is there.
        tiers[kind] = {"type": kind, address: _one_or_all(given[option]), "required": False}
    section: dict[str, Any] = {"role": role, "tiers": tiers}
    # A decode node reads nothing back; its prefill nodes do.
    section["retrieve_locations"] = [] if role == "decode" else list(tiers)
    section["store_locations"] = list(tiers)
    if "--path" in given and pools:
        section["promote_to"] = "disk"
    if role == "prefill":
        # A prefix is read only where that is measured to beat computing it.
        section["pd"] = {"pull": {"mode": "adaptive"}}
    return ExtraConfig.around(section)


def _paths(given: list[str]) -> str | list[str]:
    """A relative path is relative to where this command runs; the server runs elsewhere. A path that begins with a
    template is left as it is."""
    for path in given:
        if not path.strip() or path.startswith("~"):
            raise ConfigError("--path", f"{path!r} is no directory of the server", "an absolute path")
    return _one_or_all([path if path.startswith("{") else os.path.abspath(path) for path in given])


def _one_or_all(values: list[str]) -> str | list[str]:
    return values if len(values) > 1 else values[0]

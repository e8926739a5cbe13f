"""``hicache-ext config``: check a configuration, print one to paste (render_command.py), print its schema."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from hicache_ext.cli import render_command
from hicache_ext.cli.config_notes import notes_on
from hicache_ext.cli.inputs import FILE_HELP, read_configuration
from hicache_ext.cli.usage import describe, show
from hicache_ext.config import ExtraConfig, HicacheExtConfig, check_document
from hicache_ext.config.render import json_schema
from hicache_ext.errors import ConfigError, ConfigErrors
from hicache_ext.runtime.results import print_json
from hicache_ext.storage.tiering.tier_use import tier_use


def configure(parser: argparse.ArgumentParser) -> None:
    """Add ``check``, ``render`` and ``schema``."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    check = actions.add_parser("check", help="say whether a configuration is valid, and what it means on this node")
    check.add_argument("file", metavar="FILE", help=FILE_HELP)
    describe(
        check,
        run=_check,
        examples=["hicache-ext config check hicache.yaml"],
        success="it is valid; notes may be there",
        problem="",
    )
    render_command.configure(
        actions.add_parser("render", help="print a complete configuration and how to launch SGLang with it")
    )
    schema = actions.add_parser("schema", help="print the JSON Schema, for editors")
    describe(schema, run=_schema, examples=["hicache-ext config schema > hicache-schema.json"], problem="")


def _check(arguments: argparse.Namespace) -> int:
    file: str = arguments.file
    inline = file.lstrip().startswith("{")
    try:
        checked = check_document(read_configuration(file))
        notes = list(notes_on(checked, inline))
        lines = ["OK" if inline else f"OK: {file}", *_summary(checked), *(f"note: {note}" for note in notes)]
        document = {"ok": True, "problems": [], "notes": notes, **_document(checked)}
    except ConfigError as error:
        # What is wrong is what this command is there to find.
        if not arguments.json:
            raise
        wrong = error.errors if isinstance(error, ConfigErrors) else (error,)
        problems = [{"key": one.key, "problem": one.problem, "allowed": one.allowed} for one in wrong]
        print_json({"ok": False, "problems": problems})
        return 2
    show(arguments, document, lines)
    return 0


def _schema(arguments: argparse.Namespace) -> int:
    print_json(json_schema())
    return 0


def _document(checked: ExtraConfig) -> dict[str, Any]:
    """What the configuration means on this node, for ``--json``."""
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

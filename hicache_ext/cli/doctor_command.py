"""``hicache-ext doctor``: examine a configuration and everything it depends on, and say what to do.

Exit codes: 0 nothing is wrong (notes and warnings may be there), 1 at least one error was found, 2 wrong usage or wrong
configuration.
"""

from __future__ import annotations

import argparse

from hicache_ext.cli.inputs import read_configuration
from hicache_ext.cli.usage import describe, show
from hicache_ext.config import check_document
from hicache_ext.doctor.examination import Section, examine, worst
from hicache_ext.doctor.sglang_names import table_in_words
from hicache_ext.errors import ConfigError, ConfigErrors
from hicache_ext.runtime.results import print_json
from hicache_ext.runtime.signals import terminated_in_order
from hicache_ext.storage.contract.diagnosis import Level


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", metavar="CONFIG", help="a .json, .yaml, .yml or .toml file, '-' for standard input, or inline JSON"
    )
    parser.add_argument("--tier", action="append", metavar="NAME", help="look at this tier alone; may be repeated")
    describe(
        parser,
        run=run,
        examples=["hicache-ext doctor hicache.yaml", "hicache-ext doctor hicache.yaml --tier pool"],
        success="nothing is wrong; notes and warnings may be there",
        problem="an error was found",
    )


def run(arguments: argparse.Namespace) -> int:
    """Examine and print; 0, 1 or 2 as the module says."""
    inline = arguments.file.lstrip().startswith("{")
    try:
        document = read_configuration(arguments.file)
        checked = check_document(document)
        for name in arguments.tier or ():
            if name not in checked.hicache_ext.tiers:
                raise ConfigError("--tier", f"no tier is named {name!r}", ", ".join(checked.hicache_ext.tiers))
    except ConfigError as error:
        if arguments.json:
            sentences = [str(one) for one in (error.errors if isinstance(error, ConfigErrors) else (error,))]
            print_json({"level": "error", "configuration": sentences, "sections": []})
            return 2
        raise
    sections: list[Section] = []
    with terminated_in_order():
        for section in examine(checked, inline=inline, only=arguments.tier):
            sections.append(section)
            if not arguments.json:
                # Printed one by one: a tier that hangs until its timeout must not hide earlier findings.
                print(_text(section), flush=True)
    level = worst(sections)
    document = {"level": level.value, "configuration": [], "sections": [section.document() for section in sections]}
    show(arguments, document, [_SUMMARY[level]])
    return 1 if level is Level.ERROR else 0


_SUMMARY = {
    Level.OK: "Nothing is wrong.",
    Level.NOTE: "Nothing is wrong; see the notes.",
    Level.WARNING: "It works; see the warnings.",
    Level.ERROR: "Something is wrong; see the errors.",
}
_MARKS = {Level.OK: "ok     ", Level.NOTE: "note   ", Level.WARNING: "WARNING", Level.ERROR: "ERROR  "}


def _text(section: Section) -> str:
    lines = [section.title]
    for finding in section.findings:
        lines.append(f"  {_MARKS[finding.level]} {finding.subject}: {finding.seen}")
        if finding.remedy:
            lines.append(f"          -> {finding.remedy}")
    if section.rows:
        lines.append(f"          {table_in_words(section.rows)}")
    return "\n".join([*lines, ""])

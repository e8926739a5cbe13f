"""Every command that does something, as the parsers have them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from hicache_ext.cli.main import COMMANDS, make_parser


def leaves(
    parser: argparse.ArgumentParser, words: tuple[str, ...] = ()
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every command that does something, with its parser."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        yield " ".join(words), parser
    for action in below:
        for name, subparser in action.choices.items():
            yield from leaves(subparser, (*words, name))


EVERY_COMMAND = dict(leaves(make_parser(*COMMANDS)))

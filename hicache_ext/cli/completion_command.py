"""``hicache-ext completion SHELL``: a script by which a shell completes commands, options and files.

It is made of the parsers (shtab), and static: the shell reads it once, and no Python runs when TAB is pressed.
"""

from __future__ import annotations

import argparse

from hicache_ext.cli.output import describe, show

_INSTALL = {
    "bash": "hicache-ext completion bash > ~/.local/share/bash-completion/completions/hicache-ext",
    "zsh": "hicache-ext completion zsh > ~/.zfunc/_hicache-ext    # ~/.zfunc in fpath, before compinit",
    "fish": "hicache-ext completion fish > ~/.config/fish/completions/hicache-ext.fish",
}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=tuple(_INSTALL), help="for which the script is")
    describe(parser, run=run, examples=tuple(_INSTALL.values()), problem="")


def run(arguments: argparse.Namespace) -> int:
    """Print the script."""
    import shtab

    from hicache_ext.cli.main import COMMANDS, make_parser

    parser = make_parser(*(command.name for command in COMMANDS))
    _complete_files(parser, shtab.FILE)
    script = shtab.complete(parser, shell=arguments.shell)
    show(arguments, {"shell": arguments.shell, "script": script}, [script.rstrip("\n")])
    return 0


def _complete_files(parser: argparse.ArgumentParser, files: object) -> None:
    """Every argument whose values are not listed may be a file: configurations, directories, prompts, reports."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                _complete_files(below, files)
        elif action.nargs != 0 and action.choices is None:
            action.complete = files  # type: ignore[attr-defined]

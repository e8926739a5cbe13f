"""``hicache-ext``: one command, its sub-commands in modules by subject that are imported only when they are used.

A new sub-command is a function from the parsed arguments to an exit code, declared with its arguments by ``command``
(output.py), and one line in ``COMMANDS``.

Exit codes: 0 done, 1 the command found or met a problem, 2 wrong usage or wrong configuration, 130 interrupted. With
``--json`` standard output holds one JSON document, the result, and nothing else; why a command could not do its work is
a sentence on standard error in any case. docs/command-line.md.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import select
import sys
from collections.abc import Callable, Sequence

from hicache_ext import __version__
from hicache_ext.errors import ConfigError, HicacheExtError, MissingPackageError
from hicache_ext.packages import package_behind
from hicache_ext.runtime.commands import standard_output_of
from hicache_ext.runtime.shown import shown_text

COMMANDS = {
    "prove": ("prove_command", "whether restored answers are the computed ones on your server"),
    "demo": ("prove_command", "the same with a server of its own, which is killed meanwhile"),
    "ls": ("directory_commands", "what a directory of the file tier holds: models, dtypes, ages, bytes"),
    "stat": ("directory_commands", "how full a directory of the file tier is"),
    "verify": ("directory_commands", "read and check every page of a directory"),
    "gc": ("directory_commands", "remove what killed processes left in a directory"),
    "clear": ("directory_commands", "remove the pages of a model, or all, from a directory"),
    "hint": ("prompt_commands", "lease, release or demote a prompt, as a request may ask for"),
    "pin": ("prompt_commands", "keep the pages of a prompt from being evicted"),
    "unpin": ("prompt_commands", "let the pages of a pin go like all others"),
    "pins": ("prompt_commands", "which pages are pinned, until when, and what they take"),
    "config": ("config_command", "check, render or describe a configuration"),
    "doctor": ("doctor_command", "look at a configuration and all it stands on; say what to do"),
    "stats": ("server_commands", "what the tiers of a running server do: hits, misses, latencies"),
    "curve": ("server_commands", "what share of page uses a smaller or larger tier would serve"),
    "explain": ("prompt_commands", "where the pages of a prompt are, and why there is no hit"),
    "warm": ("prompt_commands", "bring the pages of a prompt from the pool to this node's disk"),
    "reload": ("server_commands", "have running servers take over their configuration file"),
    "plan": ("plan_command", "what disks and a pool would do for your requests, before you buy"),
    "bench": ("bench_command", "measure the tiers on this machine against what else there is"),
}
"""Each sub-command: the module whose ``NAME_command`` completes its parser, and its line in ``--help``."""
_HELP_END = """\
examples:
  hicache-ext config render --path /mnt/nvme0/hicache --capacity 512GiB > hicache.yaml
  hicache-ext doctor hicache.yaml
  hicache-ext COMMAND --help

exit codes:
  0 done, 1 a problem was found or met, 2 wrong usage or wrong configuration, 130 interrupted
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``hicache-ext``; the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    _mend_streams()

    def run() -> int:
        parsed = make_parser(*words[:1]).parse_args(words)
        with standard_output_of(parsed):
            code: int = parsed.run(parsed)
        return code

    return without_traceback(run)


def without_traceback(run: Callable[[], int]) -> int:
    """The exit code of a command line. Wrong input, a missing package or a full disk is a sentence on stderr; a closed
    output or Ctrl-C is silent; a traceback is a bug of this package."""
    try:
        try:
            return run()
        finally:
            # Flushed here, so that a closed output raises inside this try and not while the interpreter exits. Also
            # after SystemExit, with which argparse ends --help.
            sys.stdout.flush()
    except HicacheExtError as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, ConfigError | MissingPackageError) else 1
    except ImportError as error:
        missing = package_behind(error)
        if missing is None:
            raise
        print(missing, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _output_is_closed():
            return 1
        place = "" if error.filename is None else f"{shown_text(error.filename)}: "
        print(f"{place}{error.strerror or error}", file=sys.stderr)
        return 1


def _mend_streams() -> None:
    """Whatever streams a caller leaves us: closed ones (``>&-``, cron) are empty; what the locale's encoding lacks, as
    in names of files and models, is printed as an escape."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - until the process ends
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _output_is_closed() -> bool:
    """Whether the reader of standard output has gone (``| head``); then nothing more is written to it."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def make_parser(*chosen: str) -> argparse.ArgumentParser:
    """The parser, with the arguments of the ``chosen`` commands only: the other modules are not imported."""
    parser = argparse.ArgumentParser(
        prog="hicache-ext",
        description="Storage tiers for SGLang's hierarchical KV cache (HiCache).",
        epilog=_HELP_END,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"hicache-ext {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, (module, help_line) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=help_line, description=help_line)
        if name in chosen:
            getattr(importlib.import_module(f"hicache_ext.cli.{module}"), f"{name}_command")(subparser)
    return parser

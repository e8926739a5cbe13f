"""``hicache-ext reload``: have running servers on this machine take over their configuration file."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from hicache_ext.config import load_document
from hicache_ext.errors import ControlError, HicacheExtError
from hicache_ext.storage.serving.control import Answer, ask, servers


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="the file that the servers were started with (@FILE)")
    parser.add_argument("--check", action="store_true", help="only say whether it would be taken over")
    parser.set_defaults(run=_reload)


def _reload(arguments: argparse.Namespace) -> int:
    file = os.path.abspath(arguments.file.removeprefix("@"))
    load_document(file)  # its mistakes are reported here, once, before any server is asked
    try:
        chosen = [path for path in servers() if _serves(path, file)]
    except ControlError as error:
        raise HicacheExtError(str(error)) from error
    if not chosen:
        print(f"no running server of this user was started with @{file}", file=sys.stderr)
        print("(a server that was given its configuration inline has to be restarted)", file=sys.stderr)
        return 1
    # All ranks are asked before the first one changes, so that they stay equal.
    refused = sum(not _asked(path, only_check=True) for path in chosen)
    if refused:
        print(f"refused by {refused} of {len(chosen)} processes; nothing was changed", file=sys.stderr)
        return 1
    if arguments.check:
        print(f"{len(chosen)} processes would take it over")
        return 0
    failed = sum(not _asked(path, only_check=False) for path in chosen)
    print(f"taken over by {len(chosen) - failed} of {len(chosen)} processes")
    return 1 if failed else 0


def _serves(path: Path, file: str) -> bool:
    try:
        return bool(_same_file(ask(path, {"call": "facts"}, seconds=5).get("file"), file))
    except ControlError as error:
        print(error, file=sys.stderr)
        return False


def _same_file(one: object, other: str) -> bool:
    return isinstance(one, str) and (one == other or os.path.realpath(one) == os.path.realpath(other))


def _asked(path: Path, *, only_check: bool) -> bool:
    process = path.name.partition("-")[0]
    try:
        answer: Answer = ask(path, {"call": "reload", "only_check": only_check})
    except ControlError as error:
        answer = {"ok": False, "messages": [str(error)]}
    messages = answer.get("messages", [])
    for line in messages if isinstance(messages, list) else []:
        print(f"process {process}: {line}", file=sys.stdout if answer.get("ok") else sys.stderr)
    if answer.get("ok") and not messages and not only_check:
        print(f"process {process}: nothing to change")
    return bool(answer.get("ok"))

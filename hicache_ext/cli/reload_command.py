"""``hicache-ext reload``: have running servers on this machine take over their configuration file."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hicache_ext.cli.output import describe, show
from hicache_ext.config import load_document
from hicache_ext.errors import ControlError, HicacheExtError
from hicache_ext.storage.serving.control import Answer, ask, has_listener, servers


def configure_reload(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="the file that the servers were started with (@FILE)")
    parser.add_argument("--check", action="store_true", help="only say whether it would be taken over")
    describe(
        parser,
        "--check hicache.yaml",
        "hicache.yaml",
        run=_reload,
        problem="no server runs with that file, or a process refuses it",
    )


def _reload(arguments: argparse.Namespace) -> int:
    file = os.path.abspath(arguments.file.removeprefix("@"))
    load_document(file)  # its mistakes are reported here, once, before any server is asked
    try:
        found = [facts for path in servers() if (facts := facts_of(path)) is not None]
    except ControlError as error:
        raise HicacheExtError(str(error)) from error
    chosen = [
        facts for facts in found if "file" not in facts or os.path.realpath(facts["file"]) == os.path.realpath(file)
    ]
    if not any(facts.get("file") for facts in chosen):
        print(f"no running server of this user was started with @{file}", file=sys.stderr)
        print("(a server that was given its configuration inline has to be restarted)", file=sys.stderr)
        return 1
    # All ranks are asked before the first one changes, so that they stay equal.
    answers = [_asked(facts, only_check=True) for facts in chosen]
    refused = sum(not answer["ok"] for answer in answers)
    if not refused and not arguments.check:
        answers = [_asked(facts, only_check=False) for facts in chosen]
    willing, total = sum(answer["ok"] for answer in answers), len(answers)
    if refused:
        print(f"refused by {refused} of {total} processes; nothing was changed", file=sys.stderr)
    document = {
        "file": file,
        "check": arguments.check,
        "changed": not refused and not arguments.check,
        "processes": answers,
    }
    done = (
        f"{total} processes would take it over" if arguments.check else f"taken over by {willing} of {total} processes"
    )
    show(arguments, document, [] if refused else [done])
    return 0 if willing == total else 1


def facts_of(path: Path) -> dict[str, Any] | None:
    """What one process of a server says of itself; without ``file`` where it did not answer: it may be a rank of the
    server that is to be reloaded. None for one that has ended meanwhile."""
    try:
        return {"path": path, "pid": path.stem, "file": "", **ask(path, {"call": "facts"}, seconds=5)}
    except ControlError as error:
        if not has_listener(path):
            return None
        print(error, file=sys.stderr)
        return {"path": path, "pid": path.stem}


def _asked(facts: Mapping[str, Any], *, only_check: bool) -> dict[str, Any]:
    """What one process answered, as ``--json`` has it. Two containers may both have its number."""
    process = str(facts["pid"])
    try:
        if "file" not in facts:
            raise ControlError("it does not answer; it may have been started with this file, too")
        answer: Answer = ask(facts["path"], {"call": "reload", "only_check": only_check})
    except ControlError as error:
        answer = {"ok": False, "messages": [str(error)]}
    told = answer.get("messages", [])
    messages = [str(line) for line in told] if isinstance(told, list) else []
    ok = bool(answer.get("ok"))
    for line in messages:
        print(f"process {process}: {line}", file=sys.stdout if ok else sys.stderr)
    if ok and not messages and not only_check:
        print(f"process {process}: nothing to change")
    return {"process": process, "ok": ok, "messages": messages}

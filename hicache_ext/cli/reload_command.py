"""``hicache-ext reload``: have running servers on this machine take over their configuration file."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from hicache_ext.cli.output import describe, show
from hicache_ext.config import load_document
from hicache_ext.errors import ControlError, HicacheExtError
from hicache_ext.storage.serving.control import Answer, ask, servers


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="the file that the servers were started with (@FILE)")
    parser.add_argument("--check", action="store_true", help="only say whether it would be taken over")
    describe(
        parser,
        run=_reload,
        examples=["hicache-ext reload --check hicache.yaml", "hicache-ext reload hicache.yaml"],
        success="every process has taken it over (--check: would)",
        problem="no server runs with that file, or a process refuses it",
    )


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
    processes = [_asked(path, only_check=True) for path in chosen]
    refused = sum(not process["ok"] for process in processes)
    if not refused and not arguments.check:
        processes = [_asked(path, only_check=False) for path in chosen]
    willing, total = sum(process["ok"] for process in processes), len(processes)
    if refused:
        print(f"refused by {refused} of {total} processes; nothing was changed", file=sys.stderr)
    changed = not refused and not arguments.check
    document = {"file": file, "check": arguments.check, "changed": changed, "processes": processes}
    done = f"taken over by {willing} of {total} processes" if changed else f"{total} processes would take it over"
    show(arguments, document, [] if refused else [done])
    return 0 if willing == total else 1


def _serves(path: Path, file: str) -> bool:
    try:
        served = ask(path, {"call": "facts"}, seconds=5).get("file")
    except ControlError as error:
        print(error, file=sys.stderr)
        return False
    return isinstance(served, str) and (served == file or os.path.realpath(served) == os.path.realpath(file))


def _asked(path: Path, *, only_check: bool) -> dict[str, Any]:
    """What one process of a server answers, as ``--json`` has it; its words are printed."""
    process = path.name.partition("-")[0]
    try:
        answer: Answer = ask(path, {"call": "reload", "only_check": only_check})
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

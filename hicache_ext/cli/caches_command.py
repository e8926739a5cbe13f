"""``hicache-ext caches``: what this package keeps on a machine outside of tiers, and its removal.

All of it is made again when it is needed. Pages of tiers are none of it: ``hicache-ext clear`` removes those.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from hicache_ext.cli.output import describe, fitted, show
from hicache_ext.config import rounded_size
from hicache_ext.runtime.code_cache import compiled_files
from hicache_ext.runtime.user_cache import user_cache


@dataclass(frozen=True, slots=True)
class KeptFile:
    """One file outside of tiers."""

    path: str
    kind: str
    bytes: int


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--remove", action="store_true", help="remove these files; running servers need none of them")
    describe(
        parser,
        run=run,
        examples=["hicache-ext caches", "hicache-ext caches --remove"],
        problem="a file could not be removed",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the files; 1 when one could not be removed."""
    kept = list(_kept_files())
    failed = _remove(kept) if arguments.remove else []
    document = {"removed": arguments.remove, "files": [asdict(file) for file in kept], "failed": failed}
    lines = ["Nothing is kept outside of tiers."]
    if kept:
        rows = [(file.kind, rounded_size(file.bytes), file.path) for file in kept]
        lines = fitted([("what", "size", "file"), *rows])
        if arguments.remove:
            lines.append(f"{len(kept) - len(failed)} of {len(kept)} removed")
    show(arguments, document, lines)
    for sentence in failed:
        print(sentence, file=sys.stderr)
    return 1 if failed else 0


def _kept_files() -> Iterator[KeptFile]:
    found: dict[Path, str] = dict.fromkeys(compiled_files(), "compiled code")
    if (cache := user_cache()) is not None:
        for path in sorted(cache.rglob("*")):
            if not path.is_dir() or path.is_symlink():
                kind = "calibration of copies" if path.parent.name == "kernels" else "other"
                found.setdefault(path, kind)
    for path, kind in found.items():
        with suppress(FileNotFoundError):
            yield KeptFile(os.fspath(path), kind, path.lstat().st_size)


def _remove(kept: list[KeptFile]) -> list[str]:
    """A sentence for each file that is still there. Directories of ours that are empty then go, too."""
    failed = []
    for file in kept:
        try:
            Path(file.path).unlink(missing_ok=True)
        except OSError as error:
            failed.append(f"{file.path}: {error.strerror or error}")
    if (cache := user_cache()) is not None:
        for directory in (*sorted((path for path in cache.rglob("*") if path.is_dir()), reverse=True), cache):
            with suppress(OSError):
                directory.rmdir()
    return failed

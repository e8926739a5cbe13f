"""``python -m benchmarks.trouble``: measure the table of trouble, and write it as Markdown and JSON."""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
import traceback
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.trouble.clients import CannotRun, start_processes
from benchmarks.trouble.contenders import CONTENDERS
from benchmarks.trouble.media import medium_of, medium_type
from benchmarks.trouble.report import facts_of_run, write_report
from benchmarks.trouble.rows import ROWS, Cells, Rig
from hicache_ext.bench.frame import today, write_json
from tests.rigs.own_network import own_network


def measure(
    contenders: Sequence[str], rows: Sequence[str], root: Path, *, quick: bool, seed: int
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Row, contender and cells (or why there are none), one after the other."""
    os.environ["HICACHE_TROUBLE"] = ";".join(contenders)
    for name in contenders:
        contender = CONTENDERS[name]
        kind = medium_type(contender.medium)
        befall = [title for title in rows if not ROWS[title].needs(contender, kind)]
        yield from ((title, name, {"not_run": ROWS[title].needs(contender, kind)}) for title in set(rows) - set(befall))
        try:
            with medium_of(contender.medium, root / f"contender-{list(CONTENDERS).index(name)}") as medium:
                for number, title in enumerate(befall):
                    chance = random.Random(zlib.crc32(f"{seed} {title} {name}".encode()))
                    yield title, name, _ran(Rig(contender, medium, number, quick, chance, medium.fresh(number)), title)
                    befall = befall[1:]
        except (OSError, RuntimeError) as error:
            yield from ((title, name, {"not_run": f"{type(error).__name__}: {error}"[:200]}) for title in befall)


def _ran(rig: Rig, title: str) -> dict[str, Any]:
    started = time.monotonic()
    try:
        ROWS[title].run(rig)
    except CannotRun as reason:
        return {"not_run": f"does not open: {reason}"}
    except Exception as error:  # noqa: BLE001 - a row that fails is no reason to lose the others
        traceback.print_exc()
        return {"not_run": f"the row failed: {type(error).__name__}: {error}"[:200]}
    cells: Cells = rig.cells
    return {**cells.entry(), "took": round(time.monotonic() - started, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trouble", description=__doc__)
    parser.add_argument("--contenders", default=";".join(CONTENDERS), help="names, semicolons between them")
    parser.add_argument("--rows", default=";".join(ROWS), help="titles, semicolons between them")
    parser.add_argument("--json", type=Path, help="what was measured; what the file holds of other cells is kept")
    parser.add_argument("--report", type=Path, help="the document whose tables are replaced")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="fewer pages and trials")
    parser.add_argument("--render", action="store_true", help="measure nothing, write the report from --json")
    arguments = parser.parse_args()
    contenders, rows = arguments.contenders.split(";"), arguments.rows.split(";")
    for given, known in ((contenders, CONTENDERS), (rows, ROWS)):
        if strangers := [name for name in given if name not in known]:
            parser.error(f"{strangers[0]!r} is not known; known: {', '.join(known)}")
    document: dict[str, Any] = {"results": {}}
    if arguments.json and arguments.json.exists():
        document = json.loads(arguments.json.read_text())
    if not arguments.render:
        start_processes()
        with tempfile.TemporaryDirectory(prefix="hicache-trouble-") as root, ExitStack() as stack:
            if any(CONTENDERS[name].medium == "mooncake" for name in contenders):
                # Mooncake's processes listen on all interfaces.
                stack.enter_context(own_network())
            document |= facts_of_run(Path(root))
            for title, name, cells in measure(contenders, rows, Path(root), quick=arguments.quick, seed=arguments.seed):
                print(f"{title}: {name}: {cells}", flush=True)
                document["results"].setdefault(title, {})[name] = {**cells, "date": today()}
                if arguments.json:
                    write_json(arguments.json, document)
    if arguments.report:
        write_report(arguments.report, document)


if __name__ == "__main__":
    main()

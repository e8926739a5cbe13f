"""``python -m tests.campaigns.prove_runs``: ``hicache-ext prove --quick`` over and over, without a fault: no alarm.

The server computes in its model's own 16 bits, and in every other run others ask meanwhile, so that batches form as
they please.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import threading
from collections import Counter
from pathlib import Path

from hicache_ext.bench.frame import machine_facts, today, write_json
from hicache_ext.cli import prove_command
from hicache_ext.cli.prove_command import DIFFERENT, EQUAL
from hicache_ext.config.model import ExtraConfig
from hicache_ext.errors import ServerError
from hicache_ext.testing.server import SglangServer
from hicache_ext.testing.small_model import NAME, make_small_model
from tests.rigs.tiny_model import make_tiny_model


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--tiny", action="store_true", help="a tiny model with random weights: a run takes seconds")
    parser.add_argument(
        "--report",
        type=Path,
        help="a .md file for what one whole run says, a restart included; its figures go beside it",
    )
    arguments = parser.parse_args()
    prove_command.QUICK_LENGTHS = (400,) if arguments.tiny else prove_command.QUICK_LENGTHS
    prove_command.AT_ONCE = 4
    verdicts: Counter[str] = Counter()
    furthest = 0.0
    with tempfile.TemporaryDirectory(prefix="hicache-prove-runs-") as directory:
        root = Path(directory)
        model = make_tiny_model(root / "model") if arguments.tiny else make_small_model(root / NAME)
        tier = {"type": "file", "path": str(root / "pages"), "capacity": "2GiB"}
        with SglangServer(
            model,
            log_file=root / "server.log",
            storage_backend="dynamic",
            extra_config=ExtraConfig.around({"tiers": {"disk": tier}}),
            extra_arguments=("--enable-metrics", "--max-total-tokens", "16384"),
        ) as server:
            for number in range(arguments.runs):
                over = threading.Event()
                others = threading.Thread(target=_ask_meanwhile, args=(server, over), daemon=True)
                if number % 2:
                    others.start()
                try:
                    proof = prove_command.prove(server, quick=True, say=lambda line: None)
                finally:
                    over.set()
                    if number % 2:
                        others.join()
                verdicts[proof.verdict] += 1
                for case in proof.cases:
                    if case.spread.worst:
                        furthest = max(furthest, case.restored.worst / case.spread.worst)
                print(number + 1, proof.verdict, [(case.name, case.restored, case.spread) for case in proof.cases])
            whole = _whole_run(server, arguments.report, root) if arguments.report is not None else EQUAL
    print(f"{arguments.runs} runs: {dict(verdicts)}; restored differed by up to {furthest:.2f} times the spread")
    return 1 if DIFFERENT in (*verdicts, whole) else 0


def _whole_run(server: SglangServer, report: Path, directory: Path) -> str:
    """Write what ``hicache-ext prove`` says of the server, and return its verdict."""

    def restart() -> None:
        server.kill()
        server.start()

    proof = prove_command.prove(server, restart=restart)
    document = proof.document()
    # Nothing of the machine's paths.
    document["server"] |= {"model": Path(document["server"]["model"]).name}
    report.parent.mkdir(parents=True, exist_ok=True)
    report.write_text("\n".join(prove_command.as_lines(document)) + "\n")
    machine = machine_facts(directory, ("sglang", "torch"))
    write_json(report.with_suffix(".json"), {"date": today(), "machine": machine, **document})
    return proof.verdict


def _ask_meanwhile(server: SglangServer, over: threading.Event) -> None:
    chance = random.Random()
    while not over.wait(0.2):
        try:
            server.generate([chance.randrange(10, 250) for _ in range(chance.randrange(20, 200))], 8)
        except ServerError:
            return


if __name__ == "__main__":
    raise SystemExit(main())

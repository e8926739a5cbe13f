"""Multi-turn conversations as `hicache-ext bench multiturn` holds them, also with servers and pairs made for the run.

    python -m benchmarks.bench_multiturn --arm pd-without --arm pd-ours --flush --markdown FILE.md

The servers run on CPU too (hicache_ext.testing.server); a pair needs what tests/rigs/pd_pair.py does.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hicache_ext.bench.harness import fresh_directory
from hicache_ext.bench.multiturn_command import add_arguments, compare, running_targets
from hicache_ext.bench.multiturn_targets import Answer, Target
from hicache_ext.bench.multiturn_workload import Conversation
from hicache_ext.cli.main import without_traceback
from hicache_ext.config.model import ExtraConfig
from hicache_ext.errors import BenchmarkError, ServerError
from hicache_ext.testing.server import SglangServer
from hicache_ext.testing.tiny_model import make_tiny_model
from tests.rigs.pd_pair import PdPair

_PAGE_SIZE = 16
PAIR_ARMS = ("pd-without", "pd-sglang", "pd-ours")
ARMS = {
    "no-cache": "one server, no hierarchical cache",
    "l2": "one server, HiCache with host memory only",
    "sglang-file": "one server, HiCache with SGLang's file backend",
    "ours": "one server, HiCache with a file tier of hicache_ext",
    "pd-without": "a pair, decode node without offload",
    "pd-sglang": "a pair, SGLang's own decode offload into our tier",
    "pd-ours": "a pair, decode writer of hicache_ext",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arms = "; ".join(f"{name}: {what}" for name, what in ARMS.items())
    parser.add_argument(
        "--arm", action="append", default=[], choices=tuple(ARMS), help=f"servers made for the run: {arms}"
    )
    parser.add_argument("--logs", type=Path, metavar="DIRECTORY", help="where made servers log (default: deleted)")
    add_arguments(parser)
    arguments = parser.parse_args()
    with fresh_directory(Path(tempfile.gettempdir())) as directory:
        targets: list[Target] = running_targets(arguments)
        if arguments.arm:
            model = make_tiny_model(directory / "model")
            targets += [rig_target(arm, model, directory, arguments.logs or directory) for arm in arguments.arm]
        return compare(arguments, targets, {arguments.logs: "DIRECTORY"} if arguments.logs else None)


class RigTarget(Target):
    """A server or a pair of the rig, started for one run with an empty storage directory."""

    def __init__(self, name: str, start: Callable[[ExitStack], SglangServer | PdPair]) -> None:
        self.name = name
        self._start = start
        self._stack = ExitStack()
        self._server: SglangServer | PdPair | None = None

    def __enter__(self) -> RigTarget:
        self._server = self._start(self._stack)
        return self

    def __exit__(self, *error: object) -> None:
        self._server = None
        self._stack.close()

    def ask(self, conversation: Conversation, tokens: int) -> Answer:
        assert self._server is not None
        try:
            answer = self._server.generate(conversation.tokens, tokens, sampling={"ignore_eos": True})
        except (ServerError, OSError) as error:
            raise BenchmarkError(f"{self.name}: {error}") from error
        return Answer(
            answer.time_to_first_token,
            answer.total_time,
            answer.output_ids,
            "",
            answer.prompt_tokens,
            len(answer.output_ids),
            {"device": answer.cached.device, "host": answer.cached.host, "storage": answer.cached.storage},
        )

    def flush(self) -> None:
        server = self._server.prefill if isinstance(self._server, PdPair) else self._server
        assert server is not None
        server.flush_cache()


def rig_target(arm: str, model: Path, directory: Path, logs: Path) -> RigTarget:
    """The target of one of ``ARMS``; pages go to ``directory``."""
    place, log_place = directory / arm, logs / arm
    config = _our_config(place / "pool", written_by_us=arm != "pd-sglang")

    def start(stack: ExitStack) -> SglangServer | PdPair:
        log_place.mkdir(parents=True, exist_ok=True)
        if arm in PAIR_ARMS:
            return stack.enter_context(
                PdPair(
                    model,
                    directory=log_place,
                    prefill_config=config,
                    decode_config=config,
                    decode_offload=arm != "pd-without",
                    page_size=_PAGE_SIZE,
                )
            )
        backend = {"sglang-file": "file", "ours": "dynamic"}.get(arm)
        return stack.enter_context(
            SglangServer(
                model,
                log_file=log_place / "server.log",
                page_size=_PAGE_SIZE,
                hierarchical_cache=arm != "no-cache",
                storage_backend=backend,
                extra_config=config if arm == "ours" else {"prefetch_threshold": 16} if arm == "sglang-file" else None,
                environment={"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": os.fspath(place / "pool")},
            )
        )

    return RigTarget(arm, start)


def _our_config(pool: Path, *, written_by_us: bool) -> dict[str, Any]:
    section: dict[str, Any] = {"tiers": {"pool": {"type": "file", "path": os.fspath(pool), "capacity": "2GiB"}}}
    if not written_by_us:
        section["pd"] = {"write": {"enabled": False}}
    return {**ExtraConfig.around(section), "prefetch_threshold": 16}


if __name__ == "__main__":
    sys.exit(without_traceback(main))

"""Multi-turn conversations as `hicache-ext bench multiturn` holds them, with servers and pairs made for the run.

    python -m benchmarks.bench_multiturn --arm no-storage --arm sglang-file --arm ours --flush --json FILE
    python -m benchmarks.bench_multiturn --arm pd-no-storage --arm pd-without --arm pd-ours --flush --json FILE

All run on CPU too (hicache_ext.testing.server); pairs need what tests/rigs/pd_pair.py does.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hicache_ext.bench.frame import fresh_directory, positive
from hicache_ext.bench.multiturn import Target, add_arguments, compare
from hicache_ext.cli.main import without_traceback
from hicache_ext.config.model import ExtraConfig
from hicache_ext.errors import CommandError, MissingPackageError
from hicache_ext.runtime.commands import standard_output_of
from hicache_ext.testing import small_model
from hicache_ext.testing.client import Generation
from hicache_ext.testing.server import SglangServer
from tests.rigs.pd_pair import PdPair

ARMS = {
    "no-storage": "HiCache with device and host memory alone",
    "sglang-file": "HiCache with SGLang's own file backend",
    "ours": "HiCache with a file tier of hicache_ext",
    "on-device": "HiCache without storage, whose caches are never flushed: the limit",
}
PAIR_ARMS = {
    "pd-no-storage": "a pair without storage",
    "pd-without": "a pair, the prefill node with a file tier of hicache_ext, the decode node without offload",
    "pd-sglang": "the same, and SGLang's own decode offload into the same tier",
    "pd-ours": "the same, and the decode writer of hicache_ext into that tier",
}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    described = "; ".join(f"{name}: {what}" for name, what in (ARMS | PAIR_ARMS).items())
    parser.add_argument("--arm", action="append", required=True, choices=(*ARMS, *PAIR_ARMS), help=described)
    parser.add_argument("--model-path", help="their model (default: a small real one that comes as a package)")
    parser.add_argument("--page-size", type=positive, default=64, help="tokens per page (default: %(default)s)")
    parser.add_argument("--directory", type=Path, metavar="PATH", help="where storage lies (default: a temporary one)")
    parser.add_argument("--logs", type=Path, metavar="DIRECTORY", help="where they log (default: deleted)")
    parser.add_argument("server_arguments", nargs="*", metavar="-- SERVER ARGUMENT", help="for sglang.launch_server")
    add_arguments(parser)
    arguments = parser.parse_args(words)
    place = arguments.directory or Path(tempfile.gettempdir())
    with standard_output_of(arguments), fresh_directory(place) as directory:
        return compare(arguments, lambda number: _targets(arguments, directory / str(number)))


def _targets(arguments: argparse.Namespace, directory: Path) -> list[Target]:
    model, given = _model(arguments, directory.parent)
    # Named, not left to SGLang: each node would take its share of what is free while the other one starts, too.
    of_a_pair = [*given, "--mem-fraction-static", "0.3", "--max-total-tokens", "8192", *arguments.server_arguments]
    logs = arguments.logs or directory
    return [
        _pair(arm, model, directory / arm, logs / arm, arguments.page_size, of_a_pair)
        if arm in PAIR_ARMS
        else _server(arm, model, directory / arm, arguments, [*given, *arguments.server_arguments])
        for arm in arguments.arm
    ]


def _model(arguments: argparse.Namespace, directory: Path) -> tuple[str, Sequence[str]]:
    """Return the model, made in ``directory`` unless one was named; and what its servers need."""
    if arguments.model_path is not None:
        return arguments.model_path, ()
    try:
        return str(small_model.make_small_model(directory / small_model.NAME)), small_model.arguments_to_serve()
    except MissingPackageError as error:
        raise CommandError(f"{error}, or name a model: --model-path") from error


def _server(
    arm: str, model: str, directory: Path, arguments: argparse.Namespace, server_arguments: Sequence[str]
) -> Target:
    """Return the server of one of ``ARMS``; its pages go to ``directory``."""
    pool = directory / "pages"
    config: dict[str, Any] | None = None
    if arm == "ours":
        config = ExtraConfig.around({"tiers": {"disk": {"type": "file", "path": str(pool), "capacity": "32GiB"}}})
    elif arm == "sglang-file":
        config = {}
    if config is not None:
        config["prefetch_threshold"] = arguments.page_size
    start = partial(
        SglangServer,
        model,
        log_file=(arguments.logs or directory.parent) / f"{arm}.log",
        page_size=arguments.page_size,
        storage_backend={"sglang-file": "file", "ours": "dynamic"}.get(arm),
        extra_config=config,
        extra_arguments=server_arguments,
        environment={"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": os.fspath(pool)},
        start_timeout=1800,
    )
    return Target(arm, arm, start, flushes=arm != "on-device")


def _pair(arm: str, model: str, directory: Path, logs: Path, page_size: int, server_arguments: list[str]) -> Target:
    config = _our_config(directory / "pool", page_size, written_by_us=arm != "pd-sglang")

    @contextmanager
    def start() -> Iterator[_Pair]:
        logs.mkdir(parents=True, exist_ok=True)
        with PdPair(
            model,
            directory=logs,
            prefill_config=None if arm == "pd-no-storage" else config,
            decode_config=config,
            decode_offload=arm in ("pd-sglang", "pd-ours"),
            storage_backend=None if arm == "pd-no-storage" else "dynamic",
            page_size=page_size,
            prefill_arguments=["--hicache-ratio", "2", *server_arguments],
            decode_arguments=server_arguments,
        ) as pair:
            yield _Pair(pair)

    return Target(arm, arm, start)


class _Pair:
    """A pair as one server: the decode node's answer, with the prefill node's account of what was cached."""

    def __init__(self, pair: PdPair) -> None:
        self._pair = pair

    def generate(
        self, prompt: Sequence[int], max_new_tokens: int, *, sampling: Mapping[str, Any] | None = None
    ) -> Generation:
        answer = self._pair.generate(prompt, max_new_tokens, sampling=sampling)
        cached = {"cached_tokens_details": answer.prefill.meta_info.get("cached_tokens_details")}
        meta_info = {**answer.decode.meta_info, **cached}
        return replace(answer.decode, cached_tokens=answer.prefill.cached_tokens, meta_info=meta_info)

    def flush_cache(self) -> None:
        self._pair.prefill.flush_cache()


def _our_config(pool: Path, page_size: int, *, written_by_us: bool) -> dict[str, Any]:
    section: dict[str, Any] = {"tiers": {"pool": {"type": "file", "path": os.fspath(pool), "capacity": "2GiB"}}}
    if not written_by_us:
        section["pd"] = {"write": {"enabled": False}}
    return {**ExtraConfig.around(section), "prefetch_threshold": page_size}


if __name__ == "__main__":
    sys.exit(without_traceback(main))

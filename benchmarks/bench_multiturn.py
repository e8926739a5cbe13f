"""Multi-turn conversations as `hicache-ext bench multiturn` holds them, also with pairs made for the run.

    python -m benchmarks.bench_multiturn --arm pd-no-storage --arm pd-without --arm pd-ours --flush --json FILE

The pairs run on CPU too (hicache_ext.testing.server); they need what tests/rigs/pd_pair.py does.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from hicache_ext.bench.frame import fresh_directory
from hicache_ext.bench.multiturn import ARMS, Target, add_arguments, compare, model_of, targets
from hicache_ext.cli.main import without_traceback
from hicache_ext.config.model import ExtraConfig
from hicache_ext.runtime.commands import standard_output_of
from hicache_ext.testing.client import Generation
from tests.rigs.pd_pair import PdPair

PAIR_ARMS = {
    "pd-no-storage": "a pair without storage",
    "pd-without": "a pair, the prefill node with a file tier of hicache_ext, the decode node without offload",
    "pd-sglang": "the same, and SGLang's own decode offload into the same tier",
    "pd-ours": "the same, and the decode writer of hicache_ext into that tier",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, {**ARMS, **PAIR_ARMS})
    arguments = parser.parse_args()
    place = arguments.directory or Path(tempfile.gettempdir())
    with standard_output_of(arguments), fresh_directory(place) as directory:
        return compare(arguments, lambda number: _targets(arguments, directory / str(number)))


def _targets(arguments: argparse.Namespace, directory: Path) -> list[Target]:
    pairs = [arm for arm in arguments.arm if arm in PAIR_ARMS]
    servers = argparse.Namespace(**{**vars(arguments), "arm": [arm for arm in arguments.arm if arm not in pairs]})
    found = targets(servers, directory)
    if pairs:
        model, model_arguments = model_of(arguments, directory.parent)
        # Named, not left to SGLang: each node would take its share of what is free while the other one starts, too.
        sizes = ["--mem-fraction-static", "0.3", "--max-total-tokens", "8192"]
        given = [*model_arguments, *sizes, *arguments.server_arguments]
        logs = arguments.logs or directory
        found += [_pair(arm, model, directory / arm, logs / arm, arguments.page_size, given) for arm in pairs]
    return found


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

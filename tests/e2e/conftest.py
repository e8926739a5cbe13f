"""What the end-to-end tests share."""

from __future__ import annotations

import fcntl
import os
import pickle
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from hicache_ext.testing.client import Generation
from hicache_ext.testing.server import SglangServer
from tests.rigs.tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the tiny model every server of the session serves."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


LENGTH = 640


def random_prompt(number: int) -> list[int]:
    """``LENGTH`` tokens. Two of these share no page."""
    tokens = random.Random(number)
    return [tokens.randrange(250) for _ in range(LENGTH)]


def prompt_of(square: int, linear: int) -> list[int]:
    """``LENGTH`` tokens. Two of these share no page."""
    return [(square * position * position + linear * position) % 250 for position in range(LENGTH)]


FIRST_PROMPT, SECOND_PROMPT, THIRD_PROMPT = prompt_of(11, 5), prompt_of(7, 3), prompt_of(13, 7)


@pytest.fixture(scope="session")
def cold_answer(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Sequence[int]], Generation]:
    """To each of the prompts above, the answer of a server that has no hierarchical cache at all.

    One server for all tests and workers: every one is half a minute of processor time.
    """
    mine = tmp_path_factory.getbasetemp()
    shared = mine.parent if "PYTEST_XDIST_WORKER" in os.environ else mine
    file = shared / "cold-answers"
    with (shared / "cold-answers.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            log = shared / "cold-answers.log"
            with SglangServer(tiny_model, log_file=log, page_size=16, hierarchical_cache=False) as server:
                answers = {
                    tuple(prompt): server.generate(prompt) for prompt in (FIRST_PROMPT, SECOND_PROMPT, THIRD_PROMPT)
                }
            file.write_bytes(pickle.dumps(answers))
    known: dict[tuple[int, ...], Generation] = pickle.loads(file.read_bytes())
    return lambda prompt: known[tuple(prompt)]


def file_tier_config(directory: Path, *, capacity: str = "256MiB", layout: str = "auto", **ours: Any) -> dict[str, Any]:
    """What an operator's configuration file holds, with one file tier."""
    disk = {"type": "file", "path": str(directory), "capacity": capacity, "layout": layout}
    return {
        "backend_name": "hicache_ext",
        "module_path": "hicache_ext.storage.backend",
        "class_name": "HiCacheExtBackend",
        "interface_v1": 1,
        "hicache_ext": {"tiers": {"disk": disk}, **ours},
    }


def restored_by(
    reader: SglangServer, writer: SglangServer, prompt: Sequence[int], cold: Generation, tokens: int
) -> Generation:
    """The first answer of ``reader`` with ``tokens`` tokens from the pool that ``writer`` fills.

    Waited for, because a machine that stops for a moment has a pool left out, and one that was away is looked for
    less and less often. Every answer on the way is the cold one.
    """
    deadline = time.monotonic() + 150
    while True:
        writer.flush_cache()
        assert writer.generate(prompt).output_ids == cold.output_ids
        writer.flush_cache()  # waits for the writes
        reader.flush_cache()
        restored = reader.generate(prompt)
        assert restored.output_ids == cold.output_ids
        if restored.cached.storage == tokens:
            return restored
        assert time.monotonic() < deadline, "nothing came from the pool"

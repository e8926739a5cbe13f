"""What the end-to-end tests share."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hicache_ext.testing.client import Generation
from hicache_ext.testing.server import SglangServer
from hicache_ext.testing.tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the tiny model every server of the session serves."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


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

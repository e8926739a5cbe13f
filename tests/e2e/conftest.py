"""What the end-to-end tests share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

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

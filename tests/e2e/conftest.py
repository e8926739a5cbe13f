"""What the end-to-end tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache_ext.testing.tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the tiny model every server of the session serves."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")

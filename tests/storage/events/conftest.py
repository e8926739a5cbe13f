"""Looks follow each other quickly here."""

from __future__ import annotations

import pytest

from hicache_ext.storage.serving import events


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "LOOK_INTERVAL", 0.05)

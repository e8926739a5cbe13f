"""Troubles that only a backend has, played to docs/alerts.yml as in tests/watching/test_alerts.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hicache_ext.testing.conformance.storage_backend import PAGE_SIZE
from hicache_ext.testing.host_pools import mha_pools
from tests.backend.test_contracts import KEYS, BrokenStore
from tests.watching.recording import Recording
from tests.watching.timeline import Timeline

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


def test_a_server_that_serves_nothing_for_long_is_told(open_backend: Callable[..., Any], tmp_path: Path) -> None:
    backend = open_backend(mha_pools(page_size=PAGE_SIZE).host)
    recording = Recording(backend._export_sources)
    serves = recording.look()
    backend.served.suspended = True
    pauses = recording.look()
    timeline = Timeline()
    timeline.at_rest(30, serves)
    timeline.firing()
    timeline.at_rest(15, pauses)
    timeline.firing()  # weights are being read, perhaps
    timeline.at_rest(15, pauses)
    timeline.firing(("HicacheNotServing", ""))
    timeline.play(tmp_path)


def test_wrong_pages_are_told_at_once_and_not_as_a_pause(open_backend: Callable[..., Any], tmp_path: Path) -> None:
    backend = open_backend(mha_pools(page_size=PAGE_SIZE).host)
    recording = Recording(backend._export_sources)
    serves = recording.look()
    backend.distrust("a test")
    ended = recording.look()
    timeline = Timeline()
    timeline.at_rest(30, serves)
    timeline.firing()
    timeline.at_rest(1, ended)
    timeline.firing(("HicacheDistrusted", ""))
    timeline.at_rest(30, ended)
    timeline.firing(("HicacheDistrusted", ""))
    timeline.play(tmp_path)


def test_a_configuration_file_that_was_not_taken_over_is_told(
    open_backend: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = open_backend(mha_pools(page_size=PAGE_SIZE).host)
    recording = Recording(backend._export_sources)
    in_force = recording.look()
    monkeypatch.setattr(backend, "_config_file", SimpleNamespace(in_force=False))
    refused = recording.look()
    timeline = Timeline()
    timeline.at_rest(30, in_force)
    timeline.firing()
    timeline.at_rest(10, refused)
    timeline.firing(("HicacheConfigNotInForce", ""))
    timeline.at_rest(5, in_force)
    timeline.firing()
    timeline.play(tmp_path)


def test_a_call_that_raised_is_told(open_backend: Callable[..., Any], tmp_path: Path) -> None:
    backend = open_backend(mha_pools(page_size=PAGE_SIZE).host)
    recording = Recording(backend._export_sources)
    healthy = recording.look()
    working, backend._store = backend._store, BrokenStore(RuntimeError("bug"))
    assert backend.batch_exists(KEYS) == 0
    backend._store = working
    failed = recording.look()
    timeline = Timeline()
    timeline.at_rest(30, healthy)
    timeline.firing()
    timeline.goes_on(1, healthy, failed)
    timeline.at_rest(5, failed)
    timeline.firing(("HicacheCallFailed", "backend"))
    timeline.play(tmp_path)

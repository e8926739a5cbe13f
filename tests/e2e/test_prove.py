"""``hicache-ext prove`` against a real server: wrong pages that pass every check are found; there is no false alarm."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache_ext.cli import prove_command
from hicache_ext.cli.prove_command import DIFFERENT, EQUAL, prove
from hicache_ext.testing.server import SglangServer
from hicache_ext.testing.small_model import arguments_to_serve
from tests.e2e.conftest import file_tier_config
from tests.rigs import tier_faults
from tests.rigs.server_hooks import rig_environment

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SHAPE = "2:2:32"
"""Layers, heads and dimension of the tiny model."""


def test_each_planted_fault_is_found_and_none_where_none_was_planted(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prove_command, "QUICK_LENGTHS", (400,))
    monkeypatch.setattr(prove_command, "AT_ONCE", 2)
    # Faults shorten no answer: what is read is all there, and only wrong.
    monkeypatch.setattr(prove_command, "_WAITS", (1.0,))
    faults = tmp_path / "faults"
    with SglangServer(
        tiny_model,
        log_file=tmp_path / "server.log",
        page_size=16,
        storage_backend="dynamic",
        extra_config=file_tier_config(tmp_path / "l3"),
        extra_arguments=arguments_to_serve(),
        environment=rig_environment({tier_faults.VARIABLE: f"file:{faults}"}),
    ) as server:
        verdicts = {}
        for fault in ("", "head", "layers", "page", "unscaled", ""):
            tier_faults.direct(faults, f"wrong:{fault}:{SHAPE}" if fault else "")
            proof = prove(server, quick=True, say=lambda line: None)
            assert all(case.restored_tokens >= 320 for case in proof.cases), proof.cases
            verdicts.setdefault(fault, []).append([case.verdict for case in proof.cases])
    assert verdicts.pop("") == [[EQUAL, EQUAL]] * 2
    assert verdicts == {fault: [[DIFFERENT, DIFFERENT]] for fault in verdicts}

"""The rig's faults reach the tiers of a server: they once hooked a name that had moved, and everything was healthy."""

from __future__ import annotations

import os
import pkgutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hicache_ext.config import load_config
from hicache_ext.config.model import ExtraConfig
from hicache_ext.storage.contract.store import SetResult
from hicache_ext.storage.tiering import reload
from hicache_ext.storage.tiers.memory import MemoryPageStore
from hicache_ext.testing.conformance.pages import assert_hits, page_keys, store_pages
from tests.rigs import step_costs, tier_faults
from tests.rigs.server_hooks import rig_environment


def test_what_is_hooked_is_what_opens_the_tiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, _, name = tier_faults._TARGET.rpartition(".")
    assert pkgutil.resolve_name(module) is reload
    original = reload.open_tier
    monkeypatch.setenv(tier_faults.VARIABLE, "dead")
    monkeypatch.setattr(reload, name, lambda *arguments: tier_faults.after_open(original(*arguments), *arguments))
    tier = {"type": "file", "path": str(tmp_path), "capacity": "16MiB"}
    config = load_config(ExtraConfig.around({"tiers": {"disk": tier}}))
    opened = reload.open_live_tiers(config.tiers, config.role)
    assert store_pages(opened["disk"], page_keys(2)) == [SetResult.ERROR] * 2
    for tier in opened.values():
        tier.close()


def test_a_file_says_what_is_wrong_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault, keys = tmp_path / "fault", page_keys(2)
    monkeypatch.setenv(tier_faults.VARIABLE, f"file:{fault}")
    store = tier_faults.after_open(MemoryPageStore())
    assert store_pages(store, keys[:1]) == [SetResult.STORED]
    tier_faults.direct(fault, "dead")
    assert store_pages(store, keys[1:]) == [SetResult.ERROR]
    assert store.count_leading(keys) == 0
    tier_faults.direct(fault, "slow:0.2")
    started = time.monotonic()
    assert store.contains(keys) == [True, False]
    assert time.monotonic() - started >= 0.2
    tier_faults.direct(fault, "")
    assert_hits(store, keys[:1])
    tier_faults.direct(fault, "confused")
    with pytest.raises(ValueError, match="slow:SECONDS, dead, wrong:KIND:SHAPE or file:PATH"):
        store.contains(keys)


def test_step_costs_are_read_as_they_were_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "steps"
    monkeypatch.setenv(step_costs.VARIABLE, str(file))
    assert step_costs.read_step_costs(file, 0) == ([], 0)
    offload = step_costs.timed(time.sleep, requests=1)
    check = step_costs.timed(time.sleep, then=step_costs.step_ends)
    for seconds in (0.01, 0.02, None, 0.03, None):
        if seconds is not None:
            offload(seconds)
        check(0)
    costs, offset = step_costs.read_step_costs(file, 0)
    assert len(costs) == 3 and all(cost >= 1e6 * slept for cost, slept in zip(costs, (0.01, 0.02, 0.03), strict=True))
    assert step_costs.read_step_costs(file, offset) == ([], offset)


@pytest.mark.slow
@pytest.mark.sglang
def test_a_process_of_the_rig_takes_the_hooks_that_its_environment_names() -> None:
    program = (
        "from hicache_ext.testing.sglang_cpu import prepare_process; prepare_process();"
        "from sglang.srt.plugins.hook_registry import HookRegistry; print([*HookRegistry._hooks])"
    )
    environment = {**os.environ, **rig_environment({tier_faults.VARIABLE: "dead"})}
    hooked = subprocess.run(
        [sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True
    )
    assert tier_faults._TARGET in hooked.stdout

"""What is off is not imported: a server with one file tier loads the modules of one, and none of what it has not."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from hicache_ext.config import ExtraConfig, load_config
from hicache_ext.storage.guards.pipeline import GuardPlan, plan_guards
from hicache_ext.storage.tiering import reload
from hicache_ext.storage.tiers.memory import MemoryPageStore

ROOT = Path(__file__).parents[1]

_OPENED = """
import json, sys
from pathlib import Path
if sys.argv[2] == "sglang":
    from hicache_ext.testing.sglang_cpu import prepare_process
    prepare_process()
    from hicache_ext.storage.backend import HiCacheExtBackend
from hicache_ext.config import ExtraConfig, load_config
from hicache_ext.storage.opening import open_tiers
tiers = {"disk": {"type": "file", "path": sys.argv[1], "capacity": "64MiB"}}
open_tiers(load_config(ExtraConfig.around({"tiers": tiers}))).close()
ours = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "hicache_ext"}
print(json.dumps({name: len(Path(module.__file__).read_text().splitlines()) for name, module in ours.items()}))
"""

OFF = (
    *("bench", "cli", "doctor", "pd", "plan", "config.render"),
    *("kernels.batched_dma", "kernels.calibration", "kernels.triton_engine"),
    *("page.recording", "page.transforms.body", "page.transforms.codec"),
    *(
        "page.transforms.numbers",
        "storage.contract.tenancy",
        "storage.contract.transforming",
        "storage.guards.time_limits",
    ),
    *("storage.guards.late_open", "storage.tiering.admission"),
    "storage.tiering.reuse",
    *(f"storage.serving.{name}" for name in ("config_file", "control", "events", "hints", "metrics_export", "prompts")),
    *("storage.tiering.prefetch", "storage.tiering.pulling", "storage.tiering.recording"),
    *("storage.tiering.tracing", "storage.tiers.memory", "storage.tiers.mooncake", "storage.tiers.object"),
    *("storage.tiers.redis", "sglang.announcements", "sglang.linker", "sglang.model_pools", "sglang.linker_ahead"),
)
"""Rooms and modules of which such a server has no use; it follows what requests say (storage.serving.kv_hints)."""

AIM = 20_000
"""Lines that such a server is to import, its backend included."""


def imported(directory: Path, how: str) -> dict[str, int]:
    """Module -> lines, of a process that opened one file tier; without the rig that stands in for a GPU."""
    program = [sys.executable, "-c", _OPENED, str(directory), how]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=True)
    lines: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return {name: count for name, count in lines.items() if not name.startswith("hicache_ext.testing")}


def test_a_tier_whose_guards_are_not_imported_would_get_none(tmp_path: Path) -> None:
    tiers = {"disk": {"type": "file", "path": str(tmp_path), "capacity": "64MiB"}}
    disk = load_config(ExtraConfig.around({"tiers": tiers})).tiers["disk"]
    store = MemoryPageStore("disk")
    assert reload.guard(disk, store) is store
    assert plan_guards(disk) == GuardPlan(slow_call=math.inf)


@pytest.mark.parametrize(
    ("how", "bound"),
    [("tiers alone", 19_300), pytest.param("sglang", 24_850, marks=[pytest.mark.sglang, pytest.mark.slow])],
)
def test_a_server_with_one_file_tier_imports_what_it_needs(how: str, bound: int, tmp_path: Path) -> None:
    """``bound``: what it was when it was written down last, and only ever shrinks."""
    lines = imported(tmp_path / "tier", how)
    for off in OFF:
        of_room = [name for name in lines if f"{name}.".startswith(f"hicache_ext.{off}.")]
        # A package that holds nothing itself is run with the first module in it.
        assert [name for name in of_room if lines[name] > 1] == []
    assert sum(lines.values()) <= max(bound, AIM)

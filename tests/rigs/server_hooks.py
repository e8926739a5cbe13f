"""Faults and measurements inside a real server of the CPU rig (hicache_ext.testing.server), by its environment."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from hicache_ext.testing.sglang_cpu import MODULES_VARIABLE

_ROOT = Path(__file__).parents[2]
MODULES = ("tests.rigs.tier_faults", "tests.rigs.step_costs", "tests.rigs.turn_times", "tests.rigs.layer_times")


def rig_environment(variables: Mapping[str, str] | None = None, modules: Sequence[str] = MODULES) -> dict[str, str]:
    """The environment of a server in which ``modules`` register hooks and listen to their ``variables``."""
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    return {MODULES_VARIABLE: ",".join(modules), "PYTHONPATH": path, **(variables or {})}


def hybrid_environment() -> dict[str, str]:
    """The environment of a server of a hybrid model (tiny_hybrid.py)."""
    return rig_environment(modules=["tests.rigs.hybrid_on_cpu"])

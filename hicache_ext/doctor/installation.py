"""Python, SGLang, torch, and whether the hooks of this package can take hold."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shlex
from collections.abc import Iterator
from pathlib import Path

import hicache_ext
from hicache_ext.doctor.sglang_names import release_finding
from hicache_ext.packages import installed_version
from hicache_ext.storage.contract.diagnosis import Finding, Level
from hicache_ext.storage.contract.registry import broken_tier_types

_PLUGIN_GROUP = "sglang.srt.plugins"


def installation_findings() -> Iterator[Finding]:
    """What is installed. Imports neither torch nor SGLang."""
    yield Finding("hicache_ext", Level.OK, hicache_ext.__version__)
    yield Finding("python", Level.OK, platform.python_version())
    yield release_finding()
    torch = installed_version("torch")
    if torch is None:
        yield Finding("torch", Level.ERROR, "not installed", "install it with SGLang")
    else:
        yield Finding("torch", Level.OK, torch)
    yield _plugin()
    for error in broken_tier_types():
        yield Finding("tier types", Level.ERROR, str(error), "servers start without it while no tier is of that type")


def _plugin() -> Finding:
    """The entry point through which SGLang calls this package in each of its processes."""
    points = [p for p in importlib.metadata.entry_points(group=_PLUGIN_GROUP) if p.name == "hicache_ext"]
    if not points:
        checkout = Path(hicache_ext.__file__).parents[1]
        what = f"pip install {shlex.quote(str(checkout))}" if (checkout / "setup.py").is_file() else "install it again"
        remedy = f"{what}, with the Python that SGLang is installed in"
        return Finding("plugin", Level.ERROR, f"SGLang finds no entry point hicache_ext in {_PLUGIN_GROUP}", remedy)
    allowed = os.environ.get("SGLANG_PLUGINS")
    if allowed is not None and "hicache_ext" not in [word.strip() for word in allowed.split(",")]:
        seen = "SGLANG_PLUGINS is set and does not name hicache_ext: its hooks will not run"
        return Finding("plugin", Level.WARNING, seen, "add hicache_ext to SGLANG_PLUGINS")
    module = points[0].value.partition(":")[0]
    if importlib.util.find_spec(module) is None:
        return Finding("plugin", Level.ERROR, f"{module} cannot be found", "install the package again")
    try:
        points[0].load()
    except Exception as error:  # noqa: BLE001 - whatever an import of the installed SGLang or torch raises
        return Finding(
            "plugin",
            Level.ERROR,
            f"{module} cannot be imported ({type(error).__name__})",
            "see docs/troubleshooting.md",
        )
    return Finding("plugin", Level.OK, "the hooks can be imported")

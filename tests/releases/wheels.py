"""Releases of SGLang beside the installed one: ``.sglang/RELEASE`` in the project's directory, unpacked wheels.

``python -m tests.releases.wheels RELEASE...`` (or ``all``) fetches them, without their dependencies: one environment
serves all of them on CPU. A process uses one that stands first in PYTHONPATH; its children inherit that.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

from hicache_ext.sglang.releases import TESTED

ROOT = Path(__file__).parents[2]
_BESIDE = ROOT / ".sglang"


def package_of(release: str) -> Path:
    """The directory ``sglang`` of a release. Raises FileNotFoundError with what to do."""
    for place in (_BESIDE / release, *map(Path, sys.path)):
        if (place / "sglang" / "srt").is_dir() and (place / f"sglang-{release}.dist-info").is_dir():
            return place / "sglang"
    raise FileNotFoundError(f"SGLang {release} is not here; run: python -m tests.releases.wheels {release}")


def fetch(release: str) -> None:
    """Unpack the wheel of a release, unless that is done or it is the installed one."""
    try:
        package_of(release)
    except FileNotFoundError:
        target, half = _BESIDE / release, _BESIDE / f"{release}.half"
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "install", "--no-deps", "--upgrade"]
        subprocess.run([*pip, "--target", str(half), f"sglang=={release}"], check=True)
        half.rename(target)


def environment_of(release: str) -> dict[str, str]:
    """For a child in which ``import sglang`` gives the release, and ``hicache_ext`` is this project's."""
    package = package_of(release).parent
    front = [str(package)] if package.is_relative_to(_BESIDE) else []
    before = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry and not _beside(entry)]
    # SGLang compiles its page hash under one name in every release: two at once would compile in turns, for ever.
    extensions = {"TORCH_EXTENSIONS_DIR": str(_BESIDE / "extensions" / release)} if front else {}
    return {**os.environ, **extensions, "PYTHONPATH": os.pathsep.join([*front, *before, str(ROOT)])}


def use_in_this_process(release: str) -> None:
    """Before anything imports SGLang; processes that this one starts use it, too."""
    if "sglang" in sys.modules:
        raise RuntimeError("SGLang is imported already")
    os.environ.update(environment_of(release))
    sys.path[:] = [entry for entry in sys.path if not _beside(entry)]
    package = package_of(release).parent
    if package.is_relative_to(_BESIDE):
        sys.path.insert(0, str(package))
    importlib.invalidate_caches()
    found = importlib.metadata.version("sglang")
    if found != release:
        raise RuntimeError(f"SGLang {release} was asked for, and {found} is found")


def _beside(entry: str) -> bool:
    return Path(entry).is_relative_to(_BESIDE)


if __name__ == "__main__":
    for one in TESTED if sys.argv[1:] == ["all"] else sys.argv[1:]:
        fetch(one)
        print(f"SGLang {one}: {package_of(one)}")

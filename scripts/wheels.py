"""Builds the wheels of a release in dist/: one for each kind of processor, with the native core.

zig, which comes as the Python package ``ziglang``, compiles for all of them, and for the C library of manylinux_2_28.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
MACHINES = {"x86_64": 62, "aarch64": 183}
"""As the platform is called -> e_machine of its ELF files."""
GLIBC = "2.28"
_CORE = "hicache_ext/native/core.so"


def build(machine: str, place: Path) -> Path:
    """The wheel for this machine, in ``place``. Raises CalledProcessError, and ValueError for one without its core."""
    compiler = f"{sys.executable} -m ziglang cc -target {machine}-linux-gnu.{GLIBC}"
    tag = f"manylinux_{GLIBC.replace('.', '_')}_{machine}"
    with tempfile.TemporaryDirectory() as made:
        command = [sys.executable, "setup.py", "-q", "build", "--build-base", made]
        subprocess.run(
            [*command, "bdist_wheel", "--plat-name", tag, "--bdist-dir", f"{made}/wheel", "--dist-dir", str(place)],
            cwd=ROOT,
            env={**os.environ, "CC": compiler, "LDSHARED": f"{compiler} -shared -Wl,-s"},
            check=True,
        )
    (wheel,) = place.glob(f"*-py3-none-{tag}.whl")
    with zipfile.ZipFile(wheel) as archive:
        if _CORE not in archive.namelist() or _machine_of(archive.read(_CORE)) != MACHINES[machine]:
            raise ValueError(f"{wheel} has no core for {machine}")
    return wheel


def _machine_of(library: bytes) -> int:
    found: int = struct.unpack_from("<H", library, 18)[0]
    return found


def main() -> None:
    """Build them all, and print their paths."""
    for machine in MACHINES:
        print(build(machine, ROOT / "dist"))


if __name__ == "__main__":
    main()

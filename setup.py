"""The native core, and README.md as the package index shows it; all else is in pyproject.toml.

The core (hicache_ext/native) is C that knows nothing of Python: one library for all versions of it. Where there is no
compiler the package is installed without it, and says so when it is used.

Relative links and pictures are dead there. Where ``[project.urls]`` names ``Source``, the address of the repository,
they lead to its files of this version; where it does not, they become their text (scripts/documents.py).
"""

import hashlib
import re
import sys
import tomllib
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "scripts"))

from documents import standing_alone  # noqa: E402

_source = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {}).get("Source")
_version = re.search(r'^__version__ = "(.+)"$', (ROOT / "hicache_ext" / "__init__.py").read_text(), re.MULTILINE)
if _version is None:
    raise SystemExit("hicache_ext/__init__.py has no line __version__ = ...")

NATIVE = ROOT / "hicache_ext" / "native"


def _version_of_sources() -> int:
    """``hicache_ext.native.sources_version``, which cannot be imported here: it wants numpy."""
    sources = [path.read_bytes() for path in sorted([*NATIVE.glob("*.h"), *NATIVE.glob("*.c")])]
    return int.from_bytes(hashlib.sha256(b"-".join(sources)).digest()[:8], "little") >> 1


class BuildCore(build_ext):
    """Builds the library anew each time: files of a release may be older than those that it replaces."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.force = True

    def get_ext_filename(self, fullname: str) -> str:
        """As native/__init__.py looks for it."""
        return fullname.replace(".", "/") + ".so"

    def build_extension(self, ext: Extension) -> None:
        Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)
        try:
            super().build_extension(ext)
        except CompileError:
            # A compiler that cannot choose between kinds of vectors when a program begins.
            ext.define_macros.append(("WIDE", ""))
            super().build_extension(ext)


class WheelOfAnyPython(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


CORE = Extension(
    "hicache_ext.native.core",
    sorted(str(path.relative_to(ROOT)) for path in NATIVE.glob("*.c")),
    depends=sorted(str(path.relative_to(ROOT)) for path in NATIVE.glob("*.h")),
    define_macros=[("HICACHE_VERSION", f"UINT64_C({_version_of_sources()})")],
    extra_compile_args=["-std=gnu11", "-O3", "-fvisibility=hidden", "-fwrapv", "-ffp-contract=off", "-Wall", "-Wextra"],
    optional=True,
)

setup(
    ext_modules=[CORE],
    cmdclass={"build_ext": BuildCore, "bdist_wheel": WheelOfAnyPython},
    long_description=standing_alone((ROOT / "README.md").read_text(), _source, f"v{_version[1]}"),
    long_description_content_type="text/markdown",
)

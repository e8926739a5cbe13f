"""README.md as the package index shows it; all else is in pyproject.toml.

Relative links and pictures are dead there. Where ``[project.urls]`` names ``Source``, the address of the repository,
they lead to its files of this version; where it does not, they become their text (scripts/documents.py).
"""

import re
import sys
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "scripts"))

from documents import standing_alone  # noqa: E402

_source = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {}).get("Source")
_version = re.search(r'^__version__ = "(.+)"$', (ROOT / "hicache_ext" / "__init__.py").read_text(), re.MULTILINE)
if _version is None:
    raise SystemExit("hicache_ext/__init__.py has no line __version__ = ...")

setup(
    long_description=standing_alone((ROOT / "README.md").read_text(), _source, f"v{_version[1]}"),
    long_description_content_type="text/markdown",
)

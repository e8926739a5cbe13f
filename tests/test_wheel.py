"""What is installed stands alone: it needs nothing of tests/ and benchmarks/, and brings nothing of them."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

from setuptools import find_packages

ROOT = Path(__file__).parents[1]


def test_no_module_of_the_package_imports_a_test_or_a_benchmark() -> None:
    found = []
    for file in sorted((ROOT / "hicache_ext").glob("**/*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [f"{file}: {name}" for name in names if name.partition(".")[0] in ("tests", "benchmarks")]
    assert found == []


def test_the_wheel_holds_the_package_and_nothing_else() -> None:
    chosen = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    packages = find_packages(str(ROOT), include=chosen)
    assert "hicache_ext.bench" in packages and {name.partition(".")[0] for name in packages} == {"hicache_ext"}

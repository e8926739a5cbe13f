"""What is installed stands alone: it needs nothing of tests/ and benchmarks/, and brings nothing of them
(tests/test_distribution.py)."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_no_module_of_the_package_imports_a_test_or_a_benchmark() -> None:
    found = []
    for file in sorted((ROOT / "hicache_ext").glob("**/*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [f"{file}: {name}" for name in names if name.partition(".")[0] in ("tests", "benchmarks")]
    assert found == []

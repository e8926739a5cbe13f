"""The errors of the package: all are in errors.py, of one base, and say what they are."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

from hicache_ext import errors
from hicache_ext.errors import HicacheExtError

PACKAGE = Path(errors.__file__).parent


def test_no_other_module_of_the_package_has_an_error_of_its_own() -> None:
    """A class whose base is named like an exception, wherever it stands in a file."""
    strays = []
    for path in PACKAGE.rglob("*.py"):
        if path == PACKAGE / "errors.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bases = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
                if any(re.search(r"(Error|Errors|Exception|Warning|Interrupt|Exit)$", base) for base in bases):
                    strays.append(f"{path.relative_to(PACKAGE)}: {node.name}")
    assert strays == []


def test_every_error_is_of_our_base_and_says_what_it_is() -> None:
    for _, cls in inspect.getmembers(errors, inspect.isclass):
        if cls.__module__ == errors.__name__:
            assert issubclass(cls, HicacheExtError) and cls.__doc__, cls

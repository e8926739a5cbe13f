"""The error tree in errors.py: what is drawn is what there is, and there is none elsewhere."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

from hicache_ext import errors
from hicache_ext.errors import HicacheExtError

PACKAGE = Path(errors.__file__).parent


def drawn_tree() -> dict[str, tuple[str | None, set[str]]]:
    """Class -> (the class it hangs from, other bases that its line names)."""
    drawing = inspect.getdoc(errors).partition("\n\n")[2]  # type: ignore[union-attr]
    tree: dict[str, tuple[str | None, set[str]]] = {}
    above: list[str] = []
    for line in drawing.splitlines():
        found = re.match(r"    ((?:\|   |    )*(?:\|-- |`-- )?)(\w+Errors?)\b(.*)", line)
        if found:
            depth = len(found[1]) // 4
            del above[depth:]
            also = re.search(r"; also an? (\w+)$", found[3])
            tree[found[2]] = (above[-1] if above else None, {also[1]} if also else set())
            above.append(found[2])
    return tree


def test_the_drawing_is_the_tree() -> None:
    classes = {cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, BaseException)}
    real = {}
    for cls in classes:
        ours = [base.__name__ for base in cls.__bases__ if base in classes]
        others = {base.__name__ for base in cls.__bases__ if base not in classes}
        real[cls.__name__] = (ours[0] if ours else None, others - ({"Exception"} if cls is HicacheExtError else set()))
        assert len(ours) == (cls is not HicacheExtError), cls
    assert drawn_tree() == real


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


def test_every_error_says_what_it_is() -> None:
    assert all(getattr(errors, name).__doc__ for name in drawn_tree())

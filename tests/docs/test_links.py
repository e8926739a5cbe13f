"""Links and modules that documents name exist, and every decision is in the index."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DECISIONS = ROOT / "docs" / "decisions"
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(path for path in (ROOT / "docs").rglob("*.md") if path.parent.name not in ("benchmarks", "reports")),
]

_LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)")
_MODULE = re.compile(r"`([a-z0-9_/{},]+\.py)`")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def anchor_of(heading: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_of_a_document_leads_to_a_file_and_a_heading(document: Path) -> None:
    for name, anchor in _LINK.findall(document.read_text()):
        if name.startswith(("http:", "https:")):
            continue
        target = (document.parent / name).resolve() if name else document
        assert target.exists(), f"{name}: there is no such file"
        if anchor and target.suffix == ".md":
            anchors = {anchor_of(heading) for heading in _HEADING.findall(target.read_text())}
            assert anchor in anchors, f"{name}#{anchor}: there is no such heading"


def test_every_decision_is_in_the_index() -> None:
    decisions = {path.name for path in DECISIONS.glob("*.md")} - {"README.md"}
    index = (DECISIONS / "README.md").read_text()
    assert {name for name, _ in _LINK.findall(index)} == decisions


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_that_a_document_names_by_its_path_exists(document: Path) -> None:
    for named in _MODULE.findall(document.read_text()):
        for path in filter(lambda path: "/" in path, alternatives(named)):
            places = [*(parent / path for parent in (ROOT, ROOT / "hicache_ext")), *ROOT.glob(f"hicache_ext/**/{path}")]
            assert any(place.exists() for place in places), f"{path}: there is no such module"


def alternatives(path: str) -> list[str]:
    """``a/{b,c}.py`` -> ``a/b.py``, ``a/c.py``."""
    if (braces := re.search(r"\{([^}]*)\}", path)) is None:
        return [path]
    return [path[: braces.start()] + name + path[braces.end() :] for name in braces[1].split(",")]

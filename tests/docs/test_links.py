"""Links and modules that documents name exist, and every decision is in the index."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.documents import ROOT, Link, anchors, broken_links, links, standing_alone, with_links

DECISIONS = ROOT / "docs" / "decisions"
DOCUMENTS = sorted(
    str(path.relative_to(ROOT)) for place in ("*.md", ".github/**/*.md", "docs/**/*.md") for path in ROOT.glob(place)
)
_OF_THEIR_DAY = ("CHANGELOG",)
OF_TODAY = [name for name in DOCUMENTS if not name.startswith(_OF_THEIR_DAY)]

_MODULE = re.compile(r"`([a-z0-9_/{},]+\.py)`")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_link_of_a_document_leads_to_a_file_and_a_heading(document: str) -> None:
    assert broken_links(document) == []


def test_every_decision_is_in_the_index() -> None:
    decisions = {path.name for path in DECISIONS.glob("*.md")} - {"README.md"}
    index = (DECISIONS / "README.md").read_text()
    assert {link.path for link in links(index)} == decisions


@pytest.mark.parametrize("document", OF_TODAY)
def test_every_module_that_a_document_names_by_its_path_exists(document: str) -> None:
    for named in _MODULE.findall((ROOT / document).read_text()):
        for path in filter(lambda path: "/" in path, alternatives(named)):
            places = [*(parent / path for parent in (ROOT, ROOT / "hicache_ext")), *ROOT.glob(f"hicache_ext/**/{path}")]
            assert any(place.exists() for place in places), f"{path}: there is no such module"


def test_the_tour_says_where_each_function_that_decides_is() -> None:
    table = (ROOT / "docs" / "architecture.md").read_text().partition("| where ... |")[2].partition("\n\n")[0]
    rows = [re.findall(r"`([^`]+)`", cell) for row in table.splitlines()[2:] for cell in row.split(" | ")[1:]]
    assert len(rows) > 60
    for names, rooms in zip(rows[::2], rows[1::2], strict=True):
        found = [file for room in rooms for file in (ROOT / "hicache_ext" / room).rglob("*")]
        files = [file.read_text() for file in found if file.suffix in (".py", ".c", ".h")]
        for name in (part for whole in names for part in whole.split(".")):
            defined = re.compile(
                rf"^ *((def|class) {name}\b|{name}(:|$| =))|^(static|PUBLIC) .*\b{name}\(", re.MULTILINE
            )
            assert any(map(defined.search, files)), f"{name} is not in {rooms}"


def alternatives(path: str) -> list[str]:
    """``a/{b,c}.py`` -> ``a/b.py``, ``a/c.py``."""
    if (braces := re.search(r"\{([^}]*)\}", path)) is None:
        return [path]
    return [path[: braces.start()] + name + path[braces.end() :] for name in braces[1].split(",")]


# -- the mechanism itself ----------------------------------------------------------------------------------------------

TEXT = """\
# A `b` [c](d.md)
## Again, and: more / less
## Again, and: more / less
[one](docs/one.md#there) [`two`](two.md) `[code](code.md)` [far](https://host/x) [here](#again-and-more--less)
[![badge](docs/badge.svg)](docs/one.md) ![picture](docs/p.png "title") <img src="docs/q.svg" alt="q">.
<img src="docs/r.svg" alt="r">
```sh
# no heading
[code](code.md)
```
"""


def test_links_are_found_in_prose_and_pictures_and_not_in_code() -> None:
    found = [f"{link.path}#{link.anchor}" for link in links(TEXT)]
    assert found == [
        *("d.md#", "docs/one.md#there", "two.md#", "https://host/x#", "#again-and-more--less"),
        *("docs/badge.svg#", "docs/one.md#", "docs/p.png#", "docs/q.svg#", "docs/r.svg#"),
    ]


def test_anchors_are_those_of_github() -> None:
    assert anchors(TEXT) == {"a-b-c", "again-and-more--less", "again-and-more--less-1"}


def test_a_link_that_leads_nowhere_is_said(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# There\n")
    (tmp_path / "some.md").write_text("[a](gone.md) [b](other.md#there) [c](other.md#elsewhere) [d](#nowhere)")
    assert broken_links("some.md", tmp_path) == [
        "some.md: gone.md: there is no such file",
        "some.md: other.md#elsewhere: there is no such heading",
        "some.md: #nowhere: there is no such heading",
    ]


def test_links_that_are_rewritten_to_what_they_are_leave_the_text_as_it_is() -> None:
    assert with_links(TEXT, lambda link: link.path + (f"#{link.anchor}" if link.anchor else "")) == TEXT


def test_without_the_files_a_link_becomes_its_text_and_a_picture_goes() -> None:
    assert (
        standing_alone(TEXT, None)
        == """\
# A `b` c
## Again, and: more / less
## Again, and: more / less
one `two` `[code](code.md)` [far](https://host/x) [here](#again-and-more--less)
  .
```sh
# no heading
[code](code.md)
```
"""
    )


def test_with_the_address_of_the_repository_links_lead_to_its_files_of_that_version() -> None:
    shown = standing_alone(TEXT, "https://host/owner/project/", "v1.2")
    assert [link.path for link in links(shown) if "host/owner" in link.path] == [
        *("https://host/owner/project/blob/v1.2/d.md", "https://host/owner/project/blob/v1.2/docs/one.md"),
        *("https://host/owner/project/blob/v1.2/two.md", "https://host/owner/project/raw/v1.2/docs/badge.svg"),
        *("https://host/owner/project/blob/v1.2/docs/one.md", "https://host/owner/project/raw/v1.2/docs/p.png"),
        *("https://host/owner/project/raw/v1.2/docs/q.svg", "https://host/owner/project/raw/v1.2/docs/r.svg"),
    ]
    assert all(link.leaves_the_project or not link.path for link in links(shown))
    assert Link("", "again-and-more--less") in links(shown)

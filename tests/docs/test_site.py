"""The documentation as a site: whole, with every link and anchor, and nothing from another host."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from scripts.documents import ROOT
from scripts.site_markdown import with_plain_lists

_FORMS = ROOT / ".github" / "ISSUE_TEMPLATE"
_LOADED = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*?\bsrc=[\"']?([^\"'> ]+)|<link\b[^>]*?\bhref=[\"']?([^\"'> ]+)"
)


def _build(project: Path, place: Path) -> subprocess.CompletedProcess[str]:
    if shutil.which("mkdocs", path=str(Path(sys.executable).parent)) is None:
        pytest.skip("missing: the package mkdocs-material (extra docs)")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(place)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=project, capture_output=True, text=True, env=environment)


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_asks_no_other_host(tmp_path: Path) -> None:
    done = _build(ROOT, tmp_path / "site")
    assert not done.returncode, done.stderr
    pages = sorted((tmp_path / "site").rglob("*.html"))
    shown = {path.relative_to(tmp_path / "site").with_suffix(".md").as_posix() for path in pages}
    assert {"index.md", "CHANGELOG.md", "SECURITY.md", "decisions/index.md", "api/stores.md"} <= shown
    assert {f"{path.stem}.md" for path in (ROOT / "docs").glob("*.md")} <= shown
    for page in pages:
        loaded = {address for found in _LOADED.findall(page.read_text()) for address in found if address}
        assert [address for address in loaded if re.match(r"\w+:|//", address) and "data:" not in address] == [], page
    for document in [
        ROOT / "README.md",
        *(path for path in (ROOT / "docs").rglob("*.md") if path.parent.name != "api"),
    ]:
        page = (tmp_path / "site" / _page_of(document)).read_text()
        assert _lists_shown(page) == _lists_written(document.read_text()), document
    stores = (tmp_path / "site" / "api" / "stores.html").read_text()
    assert "Raises StoreSetupError for a required tier" in stores  # of the docstring of open_tiers


def _page_of(document: Path) -> Path:
    if document.parent == ROOT:
        return Path("index.html")
    page = document.relative_to(ROOT / "docs").with_suffix(".html")
    return page.with_name("index.html") if page.stem == "README" else page


def _lists_written(text: str) -> tuple[int, int]:
    """How many items of lists a document has, and how many numbered lists."""
    prose = re.sub(r"^ *(`{3,})\S*\n.*?^ *\1$", "", text, flags=re.DOTALL | re.MULTILINE)
    return (
        len(re.findall(r"^ *(?:[-*+]|\d\d?\.) +\S", prose, re.MULTILINE)),
        len(re.findall(r"^ *1\. +\S", prose, re.MULTILINE)),
    )


def _lists_shown(page: str) -> tuple[int, int]:
    (article,) = re.findall(r"<article.*?</article>", page, re.DOTALL)
    return article.count("<li>"), article.count("<ol>")


def test_lists_are_changed_where_the_site_would_show_other_ones_and_nowhere_else() -> None:
    assert with_plain_lists(_LISTS) == _PLAIN_LISTS
    table = "# A\n\n| - a | b |\n|---|---|\n| c | - d |\n\n**b** in\n2024. Then.\n\n```text\n- no\n  - list\n```\n"
    assert with_plain_lists(table) == table


_LISTS = """\
Some words:
- one
  goes on
- two
lazily, until
  2024. Then
  - below

    ```sh
    for it
      do
    ```
- three

1. first:
   ```yaml
   key:
     - value
   ```
2. second

After.
"""
_PLAIN_LISTS = """\
Some words:

- one
    goes on
- two
    lazily, until
    2024\\. Then
    - below

        ```sh
        for it
          do
        ```
- three

1. first:
    ```yaml
    key:
      - value
    ```
2. second

After.
"""


@pytest.mark.slow
@pytest.mark.thorough
def test_a_dead_link_a_dead_anchor_and_a_page_that_nobody_can_find_fail_the_build(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    for name in ("docs", "examples", "hicache_ext", "scripts"):
        shutil.copytree(ROOT / name, project / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file in (*ROOT.glob("*.md"), ROOT / "mkdocs.yml", ROOT / "pyproject.toml"):
        shutil.copy(file, project)
    with (project / "docs" / "guards.md").open("a") as page:
        page.write("\n[a](gone.md) [b](tiers.md#gone) [c](../README.md#gone)\n")
    (project / "docs" / "lost.md").write_text("# Lost\n")
    said = (done := _build(project, tmp_path / "site")).stderr
    assert done.returncode
    for trouble in ("'gone.md'", "'tiers.md#gone'", "'index.md#gone'", "lost.md"):
        assert trouble in said, said


def test_who_reports_a_bug_is_asked_for_what_the_tools_say() -> None:
    forms = {path.stem: yaml.safe_load(path.read_text()) for path in _FORMS.glob("*.yml") if path.stem != "config"}
    assert set(forms) == {"bug", "feature", "backend"}
    for form in forms.values():
        assert form["name"] and form["description"]
        fields = [field for field in form["body"] if field["type"] != "markdown"]
        assert len({field["id"] for field in fields}) == len(fields)
        assert any(field.get("validations", {}).get("required") for field in fields)
    asked = {field["attributes"].get("label", "") for field in forms["bug"]["body"]}
    assert any("hicache-ext doctor" in label for label in asked)
    assert any("hicache-ext explain" in label for label in asked)

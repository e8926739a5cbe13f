"""What MkDocs does not do by itself: the documentation reaches out of docs/, and the site has to be whole.

- Documents at the root of the project are pages of the site; README.md is its first one.
- A link to any other file or directory of the project (an example, a module, a test) leads to a page that shows it.
- ``DIRECTORY/*`` in the navigation stands for the pages of that directory.

Links hold in the repository and on the site alike: nobody writes them for one of the two.
"""

from __future__ import annotations

import functools
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from posixpath import dirname, relpath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))

from documents import ROOT, Link, links, with_links
from site_markdown import with_plain_lists

ROOT_PAGES = {"README.md": "index.md"} | {
    name: name for name in ("CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md")
}
"""Document at the root of the project -> page of the site."""
_SHOWN = "sources/"
"""Where the pages that show files and directories lie on the site."""
_BEHIND = ("decisions/", "benchmarks/", "reports/", _SHOWN)
"""Pages that come last in what a search finds."""
_LANGUAGES = {".yml": "yaml", ".yaml": "yaml", ".py": "python", ".sh": "bash", ".json": "json", ".toml": "toml"}
_SKIPPED = re.compile(r"(^|/)(__pycache__|\..*)(/|$)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The project's address, where it has one, and the navigation written out."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
    config.repo_url = urls.get("Source") or config.repo_url
    config.site_url = urls.get("Documentation") or config.site_url
    config.nav = [_written_out(item) for item in config.nav or []]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Pages for what lies outside docs/."""
    for document, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / document).read_text()))
    for path in sorted(_linked_from_outside()):
        page = _page_that_shows(path)
        files.append(File.generated(config, page, content=_shown(path), inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Links that lead out of docs/ lead to pages of the site; what users read is found before what is inside."""
    place = page.file.src_uri
    if place.startswith(_BEHIND):
        page.meta.setdefault("search", {"boost": 0.1})
    document = _document_of(place)

    def lead(link: Link) -> str:
        anchor = f"#{link.anchor}" if link.anchor else ""
        if link.leaves_the_project or not link.path:
            return link.path + anchor
        return relpath(_place_on_site(link.target(document)), dirname(place) or ".") + anchor

    return markdown if document is None else with_plain_lists(with_links(markdown, lead))


def _written_out(item: Any) -> Any:
    """A part of the navigation, ``DIRECTORY/*`` replaced by the pages of the directory."""
    if isinstance(item, list):
        return [_written_out(one) for one in item]
    if isinstance(item, dict):
        return {title: _written_out(below) for title, below in item.items()}
    if isinstance(item, str) and item.endswith("/*"):
        pages = [f"{item[:-1]}{path.name}" for path in sorted((ROOT / "docs" / item[:-2]).glob("*.md"))]
        return sorted(pages, key=lambda page: not page.endswith("README.md"))
    return item


def _document_of(place: str) -> str | None:
    """The document of the project that a page of the site shows; None for a page that is made here."""
    if place.startswith(_SHOWN):
        return None
    for document, page in ROOT_PAGES.items():
        if page == place:
            return document
    return f"docs/{place}"


def _place_on_site(target: str) -> str:
    """Where the site has a file or directory of the project."""
    if target in ROOT_PAGES:
        return ROOT_PAGES[target]
    if target.startswith("docs/"):
        inside = target.removeprefix("docs/")
        if not (ROOT / target).is_dir():
            return inside
        if (ROOT / target / "README.md").exists():
            return f"{inside}/README.md"
    return _page_that_shows(target)


def _page_that_shows(target: str) -> str:
    return f"{_SHOWN}{target}.md"


@functools.cache
def _linked_from_outside() -> frozenset[str]:
    """Files and directories of the project that documents link to and that are no pages by themselves."""
    documents = [*ROOT_PAGES, *(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
    found: set[str] = set()
    for document in documents:
        for link in links((ROOT / document).read_text()):
            if not link.leaves_the_project and (target := link.target(document)) != document:
                found.update(_to_show(target, document))
    return frozenset(found)


def _to_show(target: str, document: str) -> Iterator[str]:
    if not _place_on_site(target).startswith(_SHOWN):
        return
    if not (ROOT / target).exists():
        raise PluginError(f"{document}: {target}: there is no such file")
    yield target
    if (ROOT / target).is_dir():
        for path in _content(target):
            yield from _to_show(path, document)


def _content(directory: str) -> list[str]:
    paths = [str(path.relative_to(ROOT)) for path in sorted((ROOT / directory).iterdir())]
    return [path for path in paths if not _SKIPPED.search(path)]


def _shown(target: str) -> str:
    """A page that shows a file, or what is in a directory."""
    path = ROOT / target
    if not path.is_dir():
        fence = "`" * 4
        return f"# {target}\n\n{fence}{_LANGUAGES.get(path.suffix, 'text')}\n{path.read_text().rstrip()}\n{fence}\n"
    here = dirname(_page_that_shows(target))
    rows = [f"- [{_title(below)}]({relpath(_place_on_site(below), here)})" for below in _content(target)]
    return f"# {target}\n\n" + "\n".join(rows) + "\n"


def _title(target: str) -> str:
    """The first heading of a document, else the file's name."""
    heading = re.search(r"^# (.+)$", (ROOT / target).read_text(), re.MULTILINE) if target.endswith(".md") else None
    return heading[1] if heading else target.rpartition("/")[2]

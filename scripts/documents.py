"""Links of the project's Markdown documents: found, followed, checked, rewritten. One mechanism for three uses:

- the tests follow every link (tests/docs/test_links.py);
- the site leads links out of docs/ to pages of its own (scripts/site_hooks.py);
- the package index shows README.md alone, without the files it links to (setup.py).

The standard library alone: setup.py imports it where nothing is installed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]

_CODE = r"^ *(?P<fence>`{3,}|~{3,}).*?^ *(?P=fence)[`~]*\s*?$|(?P<ticks>`+)(?!`).+?(?<!`)(?P=ticks)(?!`)"
_TARGET = r"\]\(\s*(?P<inline><[^<>]*>|[^()\s]*)|(?<=\s)(?:src|href|srcset)=\"(?P<html>[^\"]*)\""
_LINK = re.compile(rf"{_CODE}|{_TARGET}", re.DOTALL | re.MULTILINE)
_HEADING = re.compile(r"^#+ +(.+?)(?: +#+)?$", re.MULTILINE)
_FENCE = re.compile(r"^ *(`{3,}|~{3,}).*?^ *\1[`~]*\s*?$", re.DOTALL | re.MULTILINE)
_TEXT = r"\[(?P<text>(?:`[^`]*`|[^\[\]`])*)\]\(\s*(?P<target>[^()\s]*)[^()]*\)"
_LINK_WITH_TEXT = re.compile(rf"{_CODE}|(?P<image>!?){_TEXT}", re.DOTALL | re.MULTILINE)
_PICTURES = (".svg", ".png", ".jpg", ".gif", ".webp")
_TAG = r"<picture>.*?</picture>|<img [^>]*>"
_PICTURE = re.compile(rf"^ *(?:{_TAG}) *\n|{_TAG}", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Link:
    """Where a link of a document leads."""

    path: str
    """As written; empty for a place in the same document."""
    anchor: str

    @property
    def leaves_the_project(self) -> bool:
        return re.match(r"[a-z][a-z0-9+.-]*:|//", self.path) is not None

    def target(self, document: str) -> str:
        """The path in the repository, for a link of ``document``, which is a path in the repository, too."""
        if not self.path:
            return document
        return os.path.normpath(PurePosixPath(document).parent / self.path).replace(os.sep, "/")


def links(text: str) -> Iterator[Link]:
    """Every link of a document, pictures included; none in code."""
    for found in _LINK.finditer(text):
        if (written := _written(found)) is not None:
            yield _link(written)


def with_links(text: str, lead: Callable[[Link], str]) -> str:
    """``text`` with every link leading to where ``lead`` says."""

    def replaced(found: re.Match[str]) -> str:
        written = _written(found)
        if written is None:
            return found[0]
        begin = found[0].rindex(written) if written else len(found[0])
        return found[0][:begin] + lead(_link(written)) + found[0][begin + len(written) :]

    return _LINK.sub(replaced, text)


def anchors(text: str) -> set[str]:
    """The anchors of the headings of a document, as GitHub makes them and the site does, too."""
    found: set[str] = set()
    for heading in _HEADING.findall(_FENCE.sub("", text)):
        shown = re.sub(_TEXT, lambda link: link["text"], heading).replace("`", "")
        name = anchor = re.sub(r"[^\w\- ]", "", shown.strip().lower()).replace(" ", "-")
        number = 0
        while anchor in found:
            number += 1
            anchor = f"{name}-{number}"
        found.add(anchor)
    return found


def broken_links(document: str, root: Path = ROOT) -> list[str]:
    """A sentence for each link of ``document`` that leads to no file or to no heading."""
    sentences = []
    for link in links((root / document).read_text()):
        if link.leaves_the_project:
            continue
        target = root / link.target(document)
        if not target.exists():
            sentences.append(f"{document}: {link.path}: there is no such file")
        elif link.anchor and target.suffix == ".md" and link.anchor not in anchors(target.read_text()):
            sentences.append(f"{document}: {link.path}#{link.anchor}: there is no such heading")
    return sentences


def standing_alone(text: str, source: str | None, tag: str = "") -> str:
    """``text`` of a document at the root, to be shown where none of the project's files is.

    ``source`` is the address of the repository (``[project.urls]`` of pyproject.toml): links lead to its files as they
    are at ``tag``. Without one a link to a file becomes its text, and a picture goes.
    """
    if source is not None:
        return with_links(text, lambda link: _address(link, source.rstrip("/"), tag))

    def in_words(found: re.Match[str]) -> str:
        if found["target"] is None:
            return found[0]
        link = _link(found["target"])
        if link.leaves_the_project or not link.path:
            return found[0]
        return "" if found["image"] else found["text"]

    def kept(found: re.Match[str]) -> str:
        return found[0] if all(link.leaves_the_project for link in links(found[0])) else ""

    text = _PICTURE.sub(kept, text)
    # A picture inside of a link goes first, then the link.
    while (changed := _LINK_WITH_TEXT.sub(in_words, text)) != text:
        text = changed
    return re.sub(r"\n{3,}", "\n\n", text)


def _address(link: Link, source: str, tag: str) -> str:
    anchor = f"#{link.anchor}" if link.anchor else ""
    if link.leaves_the_project or not link.path:
        return link.path + anchor
    # As GitHub has it, and GitLab understands it: a page about the file, and the file.
    kind = "raw" if link.path.endswith(_PICTURES) else "blob"
    return f"{source}/{kind}/{tag}/{link.target('')}{anchor}"


def _written(found: re.Match[str]) -> str | None:
    """The target as written; None for code."""
    return found["inline"] if found["inline"] is not None else found["html"]


def _link(written: str) -> Link:
    path, _, anchor = written.strip("<>").partition("#")
    return Link(path, anchor)

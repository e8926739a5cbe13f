"""The reference (docs/api) shows what is public, and says something of each name. Sources are read, not imported."""

from __future__ import annotations

import importlib
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from hicache_ext import __version__
from hicache_ext.config import ExtraConfig
from hicache_ext.sglang.releases import TESTED
from scripts.documents import ROOT

griffe = pytest.importorskip("griffe", reason="missing: the package griffelib (extra docs)")

_PAGES = sorted((ROOT / "docs" / "api").glob("*.md"))
_SHOWN = re.compile(r"^::: (\S+)\n((?: +.*\n?)*)", re.MULTILINE)
_RST = re.compile(r":(?:class|func|meth|mod|data|exc|attr):`|(?<!:)::$|^ *={3,}", re.MULTILINE)
"""Markup that the site does not know."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A name of the package on a page of the reference, and which of its members are shown."""

    page: str
    name: str
    members: list[str] | bool | None
    hidden: list[re.Pattern[str]]


def shown() -> Iterator[Shown]:
    for page in _PAGES:
        for name, indented in _SHOWN.findall(page.read_text()):
            options = (yaml.safe_load(indented) or {}).get("options", {})
            filters = [re.compile(one.removeprefix("!")) for one in options.get("filters", ["!^_"])]
            yield Shown(page.name, name, options.get("members"), filters)


@pytest.fixture(scope="module")
def package() -> Any:
    return griffe.load("hicache_ext", search_paths=[str(ROOT)], allow_inspection=False, resolve_aliases=True)


def _objects(package: Any, one: Shown) -> Iterator[Any]:
    """What is shown under a name: itself, and functions and classes below it."""
    found = package[one.name.removeprefix("hicache_ext.")]
    found = found.final_target if found.is_alias else found
    yield found
    chosen = one.members
    if chosen is False or found.kind.value not in ("module", "class"):
        return
    for name, member in found.members.items():
        wanted = name in chosen if isinstance(chosen, list) else not any(one.search(name) for one in one.hidden)
        if wanted and not member.is_alias:
            yield member
            if member.kind.value == "class":
                public = [below for name, below in member.members.items() if not name.startswith(("_", "test_"))]
                yield from (below for below in public if not below.is_alias)


def _overrides(member: Any) -> bool:
    """A method that says in other words what a documented one of a base class says."""
    owner = member.parent
    bases = owner.mro() if owner is not None and owner.kind.value == "class" else []
    return any(member.name in base.members for base in bases)


def test_every_name_of_the_reference_says_what_it_is(package: Any) -> None:
    silent = []
    for one in shown():
        for member in _objects(package, one):
            value_of_an_enum = member.kind.value == "attribute" and "Enum" in str(getattr(member.parent, "bases", ""))
            if (member.kind.value in ("module", "class", "function") or value_of_an_enum) and not member.docstring:
                silent += [] if _overrides(member) else [f"{one.page}: {member.path}"]
    assert silent == [], "the site leaves names without a docstring out: write one, or hide the name"


def test_docstrings_of_the_reference_are_written_in_what_the_site_understands(package: Any) -> None:
    wrong = [
        f"{member.path}: {found[0].strip()}"
        for one in shown()
        for member in _objects(package, one)
        if member.docstring and (found := _RST.search(member.docstring.value))
    ]
    assert wrong == [], "Markdown, please: ``name`` for names, a table with |"


def test_every_module_for_tests_of_others_is_in_the_reference_or_is_a_part_of_one(package: Any) -> None:
    pages = {one.name for one in shown()}
    parts = {  # inherited through PageStoreTests; or what the CPU rig is made of
        *("one_store", "torch_attention"),
    }
    modules = {
        str(path.relative_to(ROOT).with_suffix("")).replace("/", ".")
        for path in (ROOT / "hicache_ext" / "testing").rglob("*.py")
        if path.name != "__init__.py" and path.stem not in parts
    }
    assert {module for module in modules if not any(name.startswith(module) for name in pages)} == set()


@pytest.mark.parametrize(
    "name",
    [
        "hicache_ext.config.load_config",
        "hicache_ext.storage.opening.open_tiers",
        *(f"hicache_ext.storage.store.{name}" for name in ("PageStore", "PageBatch", "GetResult", "SetResult")),
    ],
)
def test_a_name_that_is_kept_for_good_can_be_imported_and_is_in_the_reference(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    assert hasattr(importlib.import_module(module), attribute)
    assert name in {one.name for one in shown()}
    promised = (ROOT / "docs" / "versions.md").read_text()
    assert f"`{name}`" in promised or "the four names of `hicache_ext.storage.store`" in promised


@pytest.mark.parametrize("page", ["config.md", "stores.md"])
def test_an_example_of_the_reference_prints_what_it_says(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "api" / page).read_text(), re.DOTALL)
    tier = {"type": "file", "path": str(tmp_path / "kv"), "capacity": "512GiB", "layout": "pages"}
    (tmp_path / "hicache.yaml").write_text(yaml.safe_dump(ExtraConfig.around({"tiers": {"nvme": tier}})))
    monkeypatch.chdir(tmp_path)
    exec(example, {})
    assert capsys.readouterr().out.splitlines() == re.findall(r"^print.*# (.*)$", example, re.MULTILINE) != []


def test_the_page_of_versions_says_what_is_tested_and_what_is_installed() -> None:
    text = (ROOT / "docs" / "versions.md").read_text()
    (row,) = re.findall(r"^\| (\d+\.\d+) \| (\S+) to (\S+) tested;.*\| (\S+) to (\S+) \| Linux", text, re.MULTILINE)
    assert __version__.startswith(f"{row[0]}.")
    assert (row[1], row[2]) == (TESTED[0], TESTED[-1])
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    minors = [int(found[1]) for line in classifiers if (found := re.search(r":: 3\.(\d+)$", line))]
    assert (row[3], row[4]) == (f"3.{min(minors)}", f"3.{max(minors)}")

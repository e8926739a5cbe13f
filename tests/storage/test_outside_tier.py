"""A package of somebody else's that adds a type of tier: ``tests/outside_tier``, installed by pip."""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hicache_ext.cli.main import main
from hicache_ext.config import ExtraConfig, HicacheExtConfig, load_config
from hicache_ext.errors import ConfigError, TierTypeError
from hicache_ext.storage.contract.registry import broken_tier_types, open_tier, tier_type, tier_type_names
from hicache_ext.storage.contract.store import PageStore, SetResult
from hicache_ext.storage.opening import open_tiers
from hicache_ext.testing.conformance.medium import Medium
from hicache_ext.testing.conformance.page_store import PageStoreTests
from hicache_ext.testing.conformance.pages import assert_hits, page_keys, store_pages

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of installed packages that has the outside one alone."""
    place = tmp_path_factory.mktemp("outside")
    source = shutil.copytree(ROOT / "tests" / "outside_tier", place / "source")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(place / "site"), str(source)], check=True, timeout=120)
    return place / "site"


@pytest.fixture(autouse=True)
def _installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(site)


def document(**tiers: dict[str, Any]) -> dict[str, Any]:
    return ExtraConfig.around({"tiers": tiers})


def config_of(file: Path, **settings: Any) -> HicacheExtConfig:
    return load_config(document(pages={"type": "sqlite", "file": str(file), **settings}))


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes a package visible that has this entry point."""

    def install(package: str, name: str, value: str) -> None:
        place = tmp_path / package
        facts = place / f"{package.replace('-', '_')}-1.0.dist-info"
        facts.mkdir(parents=True)
        (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (facts / "entry_points.txt").write_text(f"[hicache_ext.tiers]\n{name} = {value}\n")
        monkeypatch.syspath_prepend(place)

    return install


# -- the configuration -------------------------------------------------------------------------------------------------


def test_its_configuration_is_checked_like_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "hicache.yaml"
    file.write_text(json.dumps(document(pages={"type": "sqlite", "file": f"{tmp_path}/{{hostname}}.db"})))
    assert main(["config", "check", str(file)]) == 0
    printed = capsys.readouterr().out
    assert f"tier pages: sqlite, {tmp_path}/" in printed and "private (" in printed


@pytest.mark.parametrize(
    ("tier", "sentence"),
    [
        (
            {"type": "sqlte", "file": "/a/b"},
            "type: unknown tier type 'sqlte'; did you mean 'sqlite'?; allowed: file, memory, mooncake, object, redis,"
            " sqlite",
        ),
        (
            {"type": "sqlite", "file": "/a/b", "fil": "/c"},
            "fil: unknown key; did you mean 'file'?; allowed: type, required, timeout, codec, seal, admission,"
            " write_budget, file",
        ),
        ({"type": "sqlite"}, "file: required; allowed: an absolute path, such as /mnt/nvme0/pages.db"),
        ({"type": "sqlite", "file": "a"}, "file: 'a' is not an absolute path; allowed: an absolute path, such as "),
    ],
)
def test_a_mistake_is_one_sentence(tier: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(document(pages=tier))
    assert str(raised.value).startswith(f"hicache_ext.tiers.pages.{sentence}")


def test_the_schema_has_its_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    tier = schema["$defs"]["SqliteTierConfig"]
    assert tier["properties"]["file"]["description"] == "the database"
    assert tier["required"] == ["type", "file"]
    kinds = schema["$defs"]["HicacheExtConfig"]["properties"]["tiers"]["additionalProperties"]["oneOf"]
    assert {"$ref": "#/$defs/SqliteTierConfig"} in kinds


def test_two_tiers_do_not_share_its_directory(tmp_path: Path) -> None:
    mine = {"type": "sqlite", "file": str(tmp_path / "a.db")}
    with pytest.raises(ConfigError, match="a directory of this tier is the same directory as one of tier 'one'"):
        load_config(document(one=mine, two={"type": "sqlite", "file": str(tmp_path / "b.db")}))


# -- the store ---------------------------------------------------------------------------------------------------------


def test_pages_go_through_it_behind_guards(tmp_path: Path) -> None:
    config = config_of(tmp_path / "pages.db", timeout="300ms")
    store = open_tiers(config)
    keys = page_keys(3)
    store_pages(store, keys)
    assert store.count_leading(keys) == 3
    store.close()
    again = open_tiers(config)
    assert_hits(again, keys)
    locked = sqlite3.connect(tmp_path / "pages.db")
    locked.execute("BEGIN EXCLUSIVE")
    began = time.monotonic()
    assert set(store_pages(again, page_keys(2, "more"))) == {SetResult.TIMEOUT}
    assert time.monotonic() - began < 3  # SQLite itself waits 5 s
    locked.close()
    again.close()


def test_the_doctor_tries_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = json.dumps(document(pages={"type": "sqlite", "file": str(tmp_path / "pages.db")}))
    main(["doctor", file, "--tier", "pages"])
    printed = capsys.readouterr().out
    assert f"tier pages: sqlite, {tmp_path}/pages.db" in printed
    assert "open: the tier can be opened" in printed
    assert "round trip: 16 pages written, read back and removed" in printed
    assert "tier types" not in printed


class SqliteMedium(Medium):
    type = "sqlite"
    shared = False

    def __init__(self, directory: Path) -> None:
        self._file = directory / "pages.db"
        self._elsewhere = directory / "elsewhere" / "pages.db"

    def open(self) -> PageStore:
        return open_tier("pages", config_of(self._file).tiers["pages"])

    def open_elsewhere(self) -> PageStore:
        return open_tier("pages", config_of(self._elsewhere).tiers["pages"])

    def read(self, key: bytes) -> bytes | None:
        rows = self._run("SELECT object FROM pages WHERE key = ?", key)
        return rows[0][0] if rows else None

    def write(self, key: bytes, stored: bytes) -> None:
        self._run("INSERT OR REPLACE INTO pages VALUES (?, ?)", key, stored)

    def keys(self) -> list[bytes]:
        return [key for (key,) in self._run("SELECT key FROM pages")]

    @contextmanager
    def failing(self) -> Iterator[None]:
        self._run("ALTER TABLE pages RENAME TO away")
        yield
        self._run("ALTER TABLE away RENAME TO pages")

    @contextmanager
    def full(self) -> Iterator[None]:
        self._run("CREATE TRIGGER full BEFORE INSERT ON pages BEGIN SELECT RAISE(FAIL, 'disk is full'); END")
        yield
        self._run("DROP TRIGGER full")

    def _run(self, statement: str, *values: bytes) -> list[Any]:
        with sqlite3.connect(self._file) as database:
            rows = database.execute(statement, values).fetchall()
        database.close()
        return rows


class TestSqlitePageStore(PageStoreTests):
    @pytest.fixture
    def medium(self, tmp_path: Path) -> Medium:
        return SqliteMedium(tmp_path)


# -- packages that are wrong -------------------------------------------------------------------------------------------


def test_two_packages_with_one_name_are_named_and_harm_no_other_type(
    installed: Callable[..., None], tmp_path: Path
) -> None:
    installed("other-tiers", "sqlite", "hicache_sqlite:SqliteTier")
    installed("greedy-tiers", "redis", "hicache_sqlite:SqliteTier")
    for name, packages in (("sqlite", "hicache-sqlite, other-tiers"), ("redis", "greedy-tiers, hicache-ext")):
        with pytest.raises(TierTypeError) as raised:
            tier_type(name)
        assert str(raised.value) == (
            f"the tier type {name!r} is brought by several packages ({packages}): uninstall all but one"
        )
    with pytest.raises(ConfigError, match=r"tiers\.pages\.type: the tier type 'sqlite' is brought by several packages"):
        config_of(tmp_path / "pages.db")
    assert load_config(document(disk={"type": "file", "path": "/a", "capacity": "1GiB"})).tiers["disk"].type == "file"


def test_a_package_that_cannot_be_imported_is_a_sentence_and_harms_no_other_type(
    installed: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    installed("broken-tiers", "broken", "no_such_module:Tier")
    installed("wrong-tiers", "wrong", "json:JSONDecoder")
    assert {"broken", "wrong", "sqlite"} <= set(tier_type_names())
    with pytest.raises(ConfigError) as raised:
        load_config(document(pages={"type": "broken"}))
    sentence = "the tier type 'broken' of the package broken-tiers cannot be used: ModuleNotFoundError: No module named"
    assert str(raised.value) == f"hicache_ext.tiers.pages.type: {sentence} 'no_such_module'"
    assert main(["config", "schema"]) == 0
    assert "SqliteTierConfig" in capsys.readouterr().out
    file = json.dumps(document(pages={"type": "sqlite", "file": str(tmp_path / "pages.db")}))
    assert main(["doctor", file]) == 1
    printed = capsys.readouterr().out
    assert f"tier types: {sentence} 'no_such_module'" in printed
    assert "wrong-tiers cannot be used: TypeError: json:JSONDecoder is no subclass of TierType" in printed
    assert "open: the tier can be opened" in printed


@pytest.mark.parametrize(
    ("left", "entry_points"),
    [
        ({}, "[hicache_ext.tiers]\nhalf = hicache_sqlite:SqliteTier\n"),
        ({"METADATA": "Metadata-Version: 2.1\n"}, "[hicache_ext.tiers]\nredis = hicache_sqlite:SqliteTier\n"),
        ({"METADATA": "Metadata-Version: 2.1\nName: half\n"}, "[hicache_ext.tiers]\nno value\n"),
        ({"METADATA": "Metadata-Version: 2.1\nName: half\n"}, "[hicache_ext.tiers]\nhalf = !!\n"),
    ],
    ids=["removed half", "nameless", "no entry point", "no class"],
)
def test_a_package_whose_facts_cannot_be_read_harms_no_other_type(
    left: dict[str, str], entry_points: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = tmp_path / "half-1.0.dist-info"
    facts.mkdir()
    for name, text in (left | {"entry_points.txt": entry_points}).items():
        (facts / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert load_config(document(disk={"type": "file", "path": "/a", "capacity": "1GiB"})).tiers["disk"].type == "file"
    assert tier_type_names()
    assert all(str(error).startswith("the tier type ") for error in broken_tier_types())


def test_the_outside_package_is_what_pip_installed(site: Path) -> None:
    (found,) = importlib.metadata.distributions(path=[str(site)])
    assert found.name == "hicache-sqlite"


def test_a_configuration_of_one_type_imports_no_other(tmp_path: Path) -> None:
    code = (
        "import sys; from hicache_ext.config import ExtraConfig, load_config\n"
        "load_config(ExtraConfig.around({'tiers': {'pool': {'type': 'redis', 'url': 'redis://pool'}}}))\n"
        "heavy = {'numpy', 'numba', 'redis', 'obstore', 'mooncake', 'torch', 'hicache_sqlite'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
        "print(sorted(name for name in sys.modules if name.startswith('hicache_ext.storage.tiers.')))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    mine = ["", ".config", ".tier_type"]
    assert printed.splitlines() == ["[]", str([f"hicache_ext.storage.tiers.redis{end}" for end in mine])]


def test_the_page_about_writing_a_tier_shows_code_that_is_tested(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "write-a-tier.md").read_text()
    package = ROOT / "tests" / "outside_tier"
    code = "".join(
        re.sub(r"\n\n+", "\n", file.read_text())
        for file in (package / "hicache_sqlite.py", package / "pyproject.toml", Path(__file__))
    )
    shown = re.findall(r"```(?:python|text)\n(.*?)```", page, re.DOTALL)
    assert len(shown) == 5
    (configuration,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "hicache.yaml").write_text(configuration)
    assert main(["config", "check", str(tmp_path / "hicache.yaml")]) == 0
    for block in shown:
        assert re.sub(r"\n\n+", "\n", block) in code, block

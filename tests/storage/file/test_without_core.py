"""Where the native core was not built there are no slabs: what is refused and how, and what goes on."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hicache_ext import native
from hicache_ext.cli.main import main
from hicache_ext.config import ExtraConfig, load_config
from hicache_ext.errors import StoreError, StoreSetupError
from hicache_ext.storage.opening import open_tiers
from hicache_ext.storage.tiers.file.config import FileTierConfig
from hicache_ext.storage.tiers.file.inspection import open_editor, open_inspector
from hicache_ext.storage.tiers.file.layouts import choose_layout
from hicache_ext.storage.tiers.file.read_only import ReadOnlyStore
from hicache_ext.testing.conformance.pages import IDENTITY, assert_hits, page_keys, store_pages
from tests.cli.test_tools_change_nothing import seen

KEYS = page_keys(12)


def section(path: Path, layout: str) -> dict[str, Any]:
    quick = {"io": "buffered", "threads": 2}
    tier = {"type": "file", "path": str(path), "capacity": "16MiB", "layout": layout, **quick}
    return ExtraConfig.around({"tiers": {"disk": tier}})


def opened(path: Path, layout: str) -> Any:
    return open_tiers(load_config(section(path, layout)))


@pytest.fixture
def slabs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with pages in slabs, on a machine without the core."""
    store = opened(tmp_path / "l3", "slab")
    store_pages(store, KEYS)
    store.close()
    monkeypatch.setattr(native, "LIBRARY", Path("/nowhere/core.so"))
    return tmp_path / "l3"


def sentence(path: Path) -> str:
    return (
        f"layout of {str(path)!r} is slab, which needs the native core, and that is not there: "
        f"core.so was not built with this package; {native.REMEDY}; or set layout: pages with another path"
    )


@pytest.mark.parametrize("layout", ["auto", "slab"])
def test_a_directory_of_slabs_is_refused_in_one_sentence_and_stays_as_it_is(slabs: Path, layout: str) -> None:
    before = seen(slabs.parent)
    with pytest.raises(StoreSetupError) as refused:
        opened(slabs, layout)
    assert str(refused.value) == f"tier 'disk' cannot start: {sentence(slabs)}"
    assert seen(slabs.parent) == before


def test_a_path_that_is_refused_keeps_the_others_from_being_made(slabs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new = slabs.parent / "new"
    document = section(new, "auto")
    document["hicache_ext"]["tiers"]["disk"]["path"] = [str(new), str(slabs)]
    with pytest.raises(StoreSetupError) as refused:
        open_tiers(load_config(document))
    assert str(refused.value) == f"tier 'disk' cannot start: {sentence(slabs)}"
    assert not new.exists()
    monkeypatch.undo()
    store = open_tiers(load_config(document))
    assert store.tiers[0].describe().details["layout"] == "slab"
    store.close()


def test_slabs_that_are_named_for_a_new_directory_are_refused_and_none_is_made(slabs: Path) -> None:
    new = slabs.parent / "new"
    with pytest.raises(StoreSetupError) as refused:
        opened(new, "slab")
    assert str(refused.value) == f"tier 'disk' cannot start: {sentence(new)}"
    assert not new.exists()


def test_page_files_are_not_made_beside_slabs(slabs: Path) -> None:
    before = seen(slabs.parent)
    with pytest.raises(StoreSetupError, match="layout 'slab'; this tier writes format 2, layout 'pages'"):
        opened(slabs, "pages")
    assert seen(slabs.parent) == before


def test_auto_takes_page_files_for_a_new_directory_says_why_and_keeps_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with monkeypatch.context() as without_core:
        without_core.setattr(native, "LIBRARY", Path("/nowhere/core.so"))
        store = opened(tmp_path / "l3", "auto")
        store_pages(store, KEYS)
        assert_hits(store, KEYS)
        store.close()
    why = "layout pages (slabs need the native core, which is not there: core.so was not built with this package)"
    assert any(why in record.getMessage() for record in caplog.records)
    store = opened(tmp_path / "l3", "auto")
    assert store.tiers[0].describe().details["layout"] == "pages"
    assert_hits(store, KEYS)
    store.close()


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One that nobody has loaded yet."""
    library = tmp_path / "core.so"
    shutil.copy(native.LIBRARY, library)
    monkeypatch.setattr(native, "LIBRARY", library)
    return library


def test_a_shortage_makes_no_directory_one_of_page_files_and_passes(
    tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    why = f"{library}: failed to map segment from shared object"

    load = ctypes.CDLL

    def fail(name: str | None, **options: Any) -> ctypes.CDLL:
        if name == str(library):
            raise OSError(why)
        return load(name, **options)

    with monkeypatch.context() as patched:
        patched.setattr(ctypes, "CDLL", fail)
        assert not native.is_absent() and native.core() is None and native.why_not() == why
        assert choose_layout(tmp_path / "l3", 1 << 30)[0] == "slab"
        with pytest.raises(StoreSetupError) as refused:
            opened(tmp_path / "l3", "auto")
        assert str(refused.value) == f"tier 'disk' cannot start: directory {str(tmp_path / 'l3')!r}: {why}"
        assert isinstance(refused.value.__cause__, OSError)
        assert not (tmp_path / "l3").exists()
    assert native.core() is not None
    assert choose_layout(tmp_path / "l3", 1 << 30)[0] == "slab"
    opened(tmp_path / "l3", "auto").close()


def test_a_library_that_comes_in_the_place_of_a_missing_or_wrong_one_is_loaded(tmp_path: Path, library: Path) -> None:
    whole = library.rename(tmp_path / "whole.so")
    assert native.is_absent() and native.core() is None
    # While it is being written.
    library.write_bytes(whole.read_bytes()[:5000])
    assert not native.is_absent() and native.core() is None
    library.unlink()
    whole.rename(library)
    loaded = native.core()
    assert loaded is not None and native.why_not() is None
    library.unlink()
    assert native.core() is loaded and native.why_not() is None and not native.is_absent()


def test_a_library_of_other_sources_makes_no_directory_one_of_page_files(
    tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "_VERSION", 1)
    with pytest.raises(StoreSetupError, match=r"core\.so was built of other sources; install a C compiler"):
        opened(tmp_path / "l3", "auto")
    assert not (tmp_path / "l3").exists()


def test_who_only_looks_into_slabs_says_the_same(slabs: Path) -> None:
    before = seen(slabs.parent)
    for look in (open_inspector, open_editor):
        with pytest.raises(StoreError) as refused:
            look(slabs)
        assert sentence(slabs) in str(refused.value)
    tier = load_config(section(slabs, "slab")).tiers["disk"]
    assert isinstance(tier, FileTierConfig)
    with pytest.raises(StoreSetupError) as not_opened:
        ReadOnlyStore("disk", tier)
    assert sentence(slabs) in str(not_opened.value)
    assert seen(slabs.parent) == before


@pytest.fixture
def configuration(slabs: Path) -> Iterator[str]:
    file = slabs.parent / "hicache.yaml"
    file.write_text(yaml.safe_dump(section(slabs, "auto")))
    before = seen(slabs)
    yield str(file)
    assert seen(slabs) == before


@pytest.mark.parametrize(
    "words",
    [
        ["ls", "PATH"],
        ["ls", "PATH", "--json"],
        ["ls", "CONFIG"],
        ["stat", "PATH"],
        ["verify", "PATH"],
        ["verify", "PATH", "--remove"],
        ["gc", "PATH"],
        ["gc", "PATH", "--dry-run"],
        ["pins", "PATH"],
        ["clear", "PATH", "--identity", IDENTITY.hex(), "--yes"],
        ["clear", "PATH", "--all", "--dry-run"],
    ],
    ids=" ".join,
)
def test_every_tool_says_it_and_ends_with_1(
    slabs: Path, configuration: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"PATH": str(slabs), "CONFIG": configuration}
    assert main([places.get(word, word) for word in words]) == 1
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count(sentence(slabs))) == ("", 1)
